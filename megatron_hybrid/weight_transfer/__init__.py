"""How weights come from a trainer's processes to an engine's: groups, handles, layouts. It knows
tensors by name, and no model."""
