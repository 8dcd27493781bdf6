"""`megatron-hybrid chat`: a chat with a running server, in the terminal."""
