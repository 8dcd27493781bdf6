"""Attention that sees what an index chooses."""
