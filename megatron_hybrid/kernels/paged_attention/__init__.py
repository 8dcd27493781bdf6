"""Attention over a paged KV cache, for decodes and prefills in one batch."""
