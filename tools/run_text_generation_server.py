#!/usr/bin/env python
r"""Serves a model over HTTP in OpenAI's wire format.

    python tools/run_text_generation_server.py                       the reference model
    python tools/run_text_generation_server.py --load DIR            a Hugging Face folder
    torchrun --nproc-per-node 2 tools/run_text_generation_server.py --load DIR \
        --tensor-model-parallel-size 2

All flags: --help.
"""

from __future__ import annotations

import sys

from megatron_hybrid.server.cli import main

if __name__ == "__main__":
    sys.exit(main())
