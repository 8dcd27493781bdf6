"""Replays on a GPU: see replay_protocol.py."""
