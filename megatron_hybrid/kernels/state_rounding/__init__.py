"""Stochastic rounding of recurrent states to float16."""
