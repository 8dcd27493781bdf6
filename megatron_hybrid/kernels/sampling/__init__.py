"""Logits to tokens: which tokens may be drawn, and which one a random number draws."""
