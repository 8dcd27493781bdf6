"""Residual streams: what goes in and out of a block whose residual is several of them."""
