"""Device memory that can be given back and taken again at the same addresses."""
