"""Engines on both sides, and what they are to answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.request import RequestEvent

PREFIX = "inference_dynamic_batching_"
ANSWER = SamplingParams(max_tokens=6, temperature=0.0)
ROOT = Path(__file__).parents[2]


def options(folder: str = "", **given: Any) -> dict[str, Any]:
    small = {
        PREFIX + "buffer_size_gb": 0.03,
        PREFIX + "prefix_caching_mamba_gb": 0.03,
        PREFIX + "max_requests": 8,
        "inference_max_seq_length": 600,
        "prefix_caching_host_gb": 0.1,
        "device": "cpu",
    }
    return small | ({"load": folder} if folder else {}) | given


def answers(
    llm: LLM, prompts: list[list[int]], peer: str = "", params: SamplingParams = ANSWER
) -> tuple[list[list[int]], list[int]]:
    """Of the prompts, all at once: tokens, and how many of each prompt were skipped."""
    last: dict[str, RequestEvent] = {}
    tokens: dict[str, list[int]] = {}
    for number, prompt in enumerate(prompts):
        llm.engine.add_request(str(number), prompt, params, prefilled_by=peer)
    while llm.engine.has_work():
        for event in llm.engine.step():
            tokens.setdefault(event.request_id, []).extend(event.token_ids)
            last[event.request_id] = event
    llm.engine.check_integrity()
    names = [str(number) for number in range(len(prompts))]
    return [tokens[name] for name in names], [last[name].cached_tokens for name in names]


class PrefillProcess:
    """Of prefill_worker.py."""

    def __init__(self, address: str, folder: str = "") -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.address = address
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.disaggregation.prefill_worker", address, folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip

    def wait_for(self, word: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.strip() == word:
                return
        raise AssertionError(f"it ended before it said {word!r}")

    def compute(self, prompt: list[int], *, wait: bool = True) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(prompt) + "\n")
        self.process.stdin.flush()
        if wait:
            self.wait_for("computed")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
