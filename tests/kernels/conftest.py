"""Without a GPU Triton's kernels run in its interpreter."""

import tests.interpreter  # noqa: F401
