"""One rank of replicas that share experts: generates and saves tokens and cached tokens.

torchrun --nproc-per-node N -m tests.parallel.lockstep_worker OUTPUT_FOLDER JOBS

JOBS, in JSON: by name, and done in this order: the engine's "options" (with "idle_tokens": how long
one replica decodes while others idle) and the models' "folders".
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_hybrid import LLM, EngineConfig, SamplingParams
from megatron_hybrid.errors import ConfigurationError, InvalidRequestError
from megatron_hybrid.parallel import initialize
from megatron_hybrid.rank_layout import RankLayout

Prompts = list[list[int]]
Answers = dict[str, list[list[Any]]]

OPTIONS: dict[str, Any] = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_buffer_size_gb": 0.01,
    "inference_dynamic_batching_max_requests": 6,
    "inference_dynamic_batching_max_tokens": 128,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.002,
    "mamba_inference_state_write_interval": 3,
    "dtype": "float32",
}
SECONDS = 280  # before pytest's own limit: where the ranks hang is seen then
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def prompts() -> Prompts:
    """More than run at a time, with much in common."""
    rng = random.Random(0)
    shared = [rng.randrange(160) for _ in range(64)]
    return [shared[:n] + [rng.randrange(160) for _ in range(n % 7)] for n in range(16, 64, 6)]


class Replica:
    """What one replica does in each of several scenes, in which all take part."""

    def __init__(self, folder: str, options: dict[str, Any], idle_tokens: int) -> None:
        self.options = OPTIONS | options
        self.folder = folder
        self.idle_tokens = idle_tokens
        self.llm = LLM(folder, **self.options)
        layout = RankLayout.from_environment(self.llm.config.parallel_sizes)
        self.number, self.count = layout.replica, layout.num_replicas

    def generate(
        self, prompts: Prompts, params: SamplingParams = GREEDY, llm: LLM | None = None
    ) -> list[list[Any]]:
        outputs = (llm or self.llm).generate(prompts, params, progress=False)
        return [[output.token_ids, output.cached_tokens] for output in outputs]

    def in_turn(self) -> Answers:
        """All prompts at one replica, the others idle, then at the next one: cold and warm."""
        found: Answers = {}
        for turn in range(self.count):
            mine = prompts() if turn == self.number else []
            for name in ("cold", "warm"):
                answers = self.generate(mine)
                if mine:
                    found[name] = answers
        return found

    def shared_out(self) -> Answers:
        """Some prompts at each replica at the same time, one has the log-probabilities of its
        prompt, and the steps are in flight when the next ones are planned."""
        self.llm.engine.reset()
        usual = self.llm.engine.runner.asynchronous
        self.llm.engine.runner.asynchronous = True
        logprobs = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=2)
        mine = prompts()[self.number :: self.count]
        params = [logprobs if self.number == 0 and i == 1 else GREEDY for i in range(len(mine))]
        outputs = self.llm.generate(mine, params, progress=False)
        self.llm.engine.runner.asynchronous = usual
        return {"shared out": [[output.token_ids] for output in outputs]}

    def idle(self) -> Answers:
        """The last replica decodes for long; the others only join. What they cached stays."""
        mine, cache = prompts(), self.llm.engine.context.cache
        self.generate(mine)
        works = self.number == self.count - 1
        before = cache.occupancy(), *map(sorted, cache.last_uses())
        if works:
            long = SamplingParams(temperature=0.0, max_tokens=self.idle_tokens, ignore_eos=True)
            self.llm.generate([mine[0]], long, progress=False)
        else:
            self.llm.generate([], progress=False)
        # Alone a dummy computes; in lockstep it does nothing when nobody has anything to do.
        for _ in range(self.idle_tokens if self.count == 1 else 3):
            self.llm.engine.dummy_forward()
        self.llm.engine.check_integrity()
        if not works:
            assert before == (cache.occupancy(), *map(sorted, cache.last_uses()))
        after = self.generate(mine)
        assert any(cached for _, cached in after)
        return {"idle": [[tokens] for tokens, _ in after]}

    def chunked(self) -> Answers:
        small = LLM(self.folder, **self.options | {"inference_dynamic_batching_max_tokens": 25})
        params = SamplingParams(temperature=0.8, top_k=10, seed=3, max_tokens=6)
        answers = self.generate(prompts(), params, small)
        small.engine.check_integrity()
        return {"chunked": answers}

    def stream(self) -> Answers:
        """One replica streams, and ends early."""
        found: list[list[Any]] = []
        if self.number == 0:
            for output in self.llm.stream(prompts()[3], GREEDY):
                if len(output.token_ids) == 4:
                    found.append(list(output.token_ids))
                    break
        else:
            self.llm.generate([], progress=False)
        return {"stream": [found[:1]] if found else []}

    def refused(self) -> Answers:
        """What one replica's call refuses leaves the others in step."""
        calls: list[Callable[[], object]] = [
            lambda: self.llm.generate("a text, without a tokenizer"),
            lambda: self.llm.chat([{"role": "user", "content": "the same"}]),
            lambda: list(self.llm.stream([1, 2], replace(GREEDY, n=2))),
            lambda: list(self.llm.stream([10**6], GREEDY)),
        ]
        for call in calls:
            if self.number:
                self.llm.generate([], progress=False)
                continue
            try:
                call()
            except (ConfigurationError, InvalidRequestError):
                continue
            raise AssertionError("it was not refused")
        assert self.llm.engine.lockstep is None or not self.llm.engine.lockstep.has_work
        return {"refused": self.generate(prompts()[:1])}


def answers_of(folder: str, options: dict[str, Any], idle_tokens: int = 20) -> Answers:
    replica = Replica(folder, options, idle_tokens)
    found: Answers = {}
    for scene in (
        replica.in_turn,
        replica.shared_out,
        replica.idle,
        replica.chunked,
        replica.stream,
        replica.refused,
    ):
        found |= scene()
    found["replica"] = [[replica.number, replica.count]]
    return found


def main() -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    output, text = sys.argv[1:]
    found: dict[str, dict[str, Answers]] = {}
    for name, job in json.loads(text).items():
        options = dict(job["options"])
        idle_tokens = options.pop("idle_tokens", 20)
        found[name] = {
            Path(folder).name: answers_of(folder, options, idle_tokens) for folder in job["folders"]
        }
        sizes = EngineConfig.from_mapping(options, "the test").parallel_sizes
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        initialize(sizes, device=device if torch.cuda.is_available() else None).destroy()
    Path(output, f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
