"""Functions that a model may call: what a request says of them, how models write calls, and how
calls are read out of an answer."""
