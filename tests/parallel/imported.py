"""What the process that ranks are forked from has imported: no more than imports, since threads and
connections do not survive a fork."""

import torch.distributed  # noqa: F401

import megatron_hybrid.llm  # noqa: F401
import megatron_hybrid.parallel.megatron  # noqa: F401
