"""Prefill and decode on different servers: what passes between them."""
