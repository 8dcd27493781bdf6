"""Tokens in, tokens out, as trainers of reinforcement learning ask for them (docs/tokens.md)."""
