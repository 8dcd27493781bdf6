"""Attention of all heads over one cached latent a token."""
