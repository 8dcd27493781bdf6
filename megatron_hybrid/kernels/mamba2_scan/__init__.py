"""The selective scan of Mamba2 over packed sequences, with its state kept per slot."""
