"""One folder an operation: reference.py is the meaning, in plain torch; kernels know no request."""
