"""Models: a configuration, a stack of blocks, and what is read from folders."""
