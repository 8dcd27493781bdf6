"""The real-gated linear recurrent unit of Griffin."""
