"""ObjectStores: where prefixes may lie outside of the process."""
