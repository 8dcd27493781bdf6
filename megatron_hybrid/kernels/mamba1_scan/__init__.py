"""The selective scan of Mamba1 over packed sequences, with its state kept per slot."""
