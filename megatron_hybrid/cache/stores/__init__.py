"""ObjectStores."""
