"""The weighted key values of RWKV-4."""
