"""Depthwise causal convolution over packed sequences, with its window kept per slot."""
