"""Guesses of what a request will write next, for the model to verify several tokens at once."""
