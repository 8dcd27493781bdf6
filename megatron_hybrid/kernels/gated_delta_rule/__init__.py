"""The gated delta rule over packed sequences, with its state kept per slot."""
