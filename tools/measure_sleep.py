#!/usr/bin/env python
"""What an engine takes of a GPU awake and asleep, and what it takes to go to sleep and wake up.

    python tools/measure_sleep.py --config configs/nemotron-h-8b.yaml [--json FILE] [ENGINE FLAGS]

For levels 1 and 2: the device's memory in use before, asleep and awake again, in GiB; seconds of
`sleep`, of `wake_up`, of new weights at level 2 (random ones are drawn again from their seed), and
from then to the first token of a new prompt; and whether answers are those of before. On a CPU the
memory is the process's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))

from megatron_hybrid import EngineConfig, SamplingParams  # noqa: E402
from megatron_hybrid.arguments import (  # noqa: E402
    ArgumentParser,
    add_engine_arguments,
    engine_config_from_args,
)
from megatron_hybrid.cache.geometry import GIB  # noqa: E402
from megatron_hybrid.engine.build import build_engine  # noqa: E402
from megatron_hybrid.engine.engine import DynamicInferenceEngine  # noqa: E402
from megatron_hybrid.errors import ConfigurationError  # noqa: E402
from megatron_hybrid.models.checkpoints.folder import ModelFolder  # noqa: E402
from megatron_hybrid.models.checkpoints.weights import _fill_randomly  # noqa: E402

PROMPTS, LENGTH, ANSWER = 8, 512, 32
COLUMNS = {
    "level": "level",
    "before": "GiB before",
    "asleep": "GiB asleep",
    "awake": "GiB awake",
    "sleep_s": "s to sleep",
    "wake_s": "s to wake up",
    "weights_s": "s for weights",
    "first_token_s": "s to a first token",
    "same": "same answers",
}


def in_use() -> float:
    """GiB: of the GPU, or of the process."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return (total - free) / GIB
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / GIB


class Engine:
    """One whose prompts are new each time, or the same."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.engine: DynamicInferenceEngine = build_engine(config)
        self._random, self._names = random.Random(0), 0
        self.fixed = [self._prompt() for _ in range(PROMPTS)]

    def _prompt(self) -> list[int]:
        length = min(LENGTH, self.engine.max_seq_length - ANSWER)
        return [self._random.randrange(self.engine.vocab_size) for _ in range(length)]

    def answers(self) -> list[list[int]]:
        """To the same prompts, all at once, and nothing of them cached: the same steps."""
        self.engine.reset()
        found: dict[str, list[int]] = {}
        for prompt in self.fixed:
            self._add(prompt, ANSWER)
            found[str(self._names)] = []
        while self.engine.has_work():
            for event in self.engine.step():
                found[event.request_id] += event.token_ids
        return list(found.values())

    def first_token(self) -> float:
        """Seconds to that of a new prompt."""
        begun = time.perf_counter()
        self._add(self._prompt(), 2)
        while not any(event.token_ids for event in self.engine.step()):
            pass
        took = time.perf_counter() - begun
        while self.engine.has_work():
            self.engine.step()
        return took

    def _add(self, prompt: list[int], count: int) -> None:
        self._names += 1
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        self.engine.add_request(str(self._names), prompt, params)

    def new_weights(self) -> None:
        """The same once more."""
        if self.config.load_format != "dummy":
            self.engine.update_weights(ModelFolder.of(self.config).path)
            return
        model = self.engine.runner._model  # type: ignore[attr-defined]
        _fill_randomly(model, self.config.seed)
        model.after_loading()
        model.kernels.linear.weights_changed()
        self.engine.sleeper.weights_came()


def measure(config: EngineConfig) -> list[dict[str, Any]]:
    """A row a level."""
    engine = Engine(config)
    engine.answers()
    expected = engine.answers()  # with what is compiled at first
    rows = [{"level": 0, "before": in_use(), "first_token_s": engine.first_token()}]
    for level in (1, 2):
        row: dict[str, Any] = {"level": level, "before": in_use()}
        begun = time.perf_counter()
        engine.engine.sleep(keep_weights=level == 1)
        row["sleep_s"], row["asleep"] = time.perf_counter() - begun, in_use()
        begun = time.perf_counter()
        engine.engine.wake_up()
        awake = time.perf_counter()
        row["wake_s"], row["awake"] = awake - begun, in_use()
        if level == 2:
            engine.new_weights()
            in_use()
            row["weights_s"] = time.perf_counter() - awake
        row["first_token_s"] = engine.first_token()
        row["same"] = engine.answers() == expected
        rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """For people."""

    def cell(value: Any) -> str:
        return f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)

    lines = [list(COLUMNS.values())] + [[cell(row.get(name)) for name in COLUMNS] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    """Measure, and print a table."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="the figures, too")
    add_engine_arguments(parser)
    args = parser.parse_args()
    try:
        config = engine_config_from_args(args).replace(enable_sleep_mode=True)
        rows = measure(config)
    except ConfigurationError as error:
        print(f"measure_sleep.py: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    if args.json is not None:
        args.json.write_text(json.dumps({"config": str(args.config), "rows": rows}, indent=2))
    return 0 if all(row.get("same", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
