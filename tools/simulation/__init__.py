"""The prefix cache at the scale of millions of requests, without a model.

Generated traces drive the real scheduler and cache; a runner that computes nothing returns the
tokens that the trace has scripted. What comes out: how many prompt tokens each policy skips at
which pool size, against the bound of an unlimited, token-granular cache, and what a decision costs.
"""
