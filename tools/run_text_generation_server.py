#!/usr/bin/env python
r"""Serves a model over HTTP in OpenAI's wire format.

    python tools/run_text_generation_server.py                       the reference model
    python tools/run_text_generation_server.py --load DIR            a Hugging Face folder
    torchrun --nproc-per-node 2 tools/run_text_generation_server.py --load DIR \
        --tensor-model-parallel-size 2

When the engine process dies, the HTTP front end stays: it answers 503 and waits for the next one
(--engine-restart-timeout). What starts the next one is a supervisor, such as

    torchrun --max-restarts 3 --nproc-per-node 1 tools/run_text_generation_server.py ...
    until megatron-hybrid serve ...; do sleep 1; done

All flags: --help.
"""

from __future__ import annotations

import sys

from megatron_hybrid.server.cli import main

if __name__ == "__main__":
    sys.exit(main())
