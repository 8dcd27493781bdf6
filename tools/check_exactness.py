#!/usr/bin/env python
r"""Runs a model through random sessions and compares every log-probability, bit by bit, with that
of the request computed alone and without a cache: what --batch-invariant promises.

    python tools/check_exactness.py                                     the reference model
    python tools/check_exactness.py --load DIR --logprobs 200000 --sampled 20000 --json out.json
    python tools/check_exactness.py --load DIR --load-format dummy --dtype bfloat16
    torchrun --nproc-per-node 2 tools/check_exactness.py --load DIR --tensor-model-parallel-size 2

All flags of the engine are taken too, and --batch-invariant is on unless it is switched off. First
requests are drawn that share beginnings, go on as conversations and fork, and each is computed
alone: in an engine of one request at a time, without a cache. Then engines on the same weights
compute all of them in other ways (--list), in sessions that are drawn, too: 1 to 96 requests at
once or one after the other, prompts' log-probabilities, answers scored as prompts, aborts. Each
engine does its part of --logprobs and --sampled at least.

Compared are the tokens, and the bits of the log-probabilities of sampled tokens, of prompts' tokens
and of scored ones, with those that they were sampled with alone. Where something differs, both are
computed once more with every operation watched, without CUDA graphs, and the first one is named
that does not give the same: see tools/exactness.

The exit code is 1 if anything differs, and 2 if nothing does, but less was compared than was asked
for (--time-limit), or an engine could not do its part.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.environment import describe_environment
from exactness.comparison import ALONE as ALONE_AS_PROMPT
from exactness.comparison import Comparison
from exactness.locating import Located, locate, of_difference
from exactness.ranks import goes_on
from exactness.sessions import Session, as_prompt, draw_sessions
from exactness.texts import Alone, ExactnessError, Sizes, Texts
from exactness.ways import ALONE, Engines, Pools, Way, ways
from megatron_hybrid.arguments import ArgumentParser, add_engine_arguments, values_from_args
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.build import load_weights
from megatron_hybrid.engine.choices import resolve_device
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.models.checkpoints import hub

IS_FIRST = os.environ.get("RANK", "0") == "0"
LONGEST = {"cpu": 256, "cuda": 2048}  # tokens of prompt and answer
SHORTEST_LIMIT = 48
SHARE_ALONE = 0.4  # of --time-limit, at most
# Of --sampled and --logprobs, those that are computed alone: each is compared several times.
SHARE_SAMPLED_ALONE, SHARE_ALONE_PLACES = 0.25, 0.125
MOST_LOCATED = 3  # ways in which something differs


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    group = parser.add_argument_group("check")
    group.add_argument(
        "--logprobs", type=int, default=20_000, metavar="N",
        help="log-probabilities to compare, at least (default: 20000)",
    )  # fmt: skip
    group.add_argument(
        "--sampled", type=int, metavar="N",
        help="of which so many are of sampled tokens, at least (default: a tenth)",
    )  # fmt: skip
    group.add_argument("--session-seed", type=int, default=0, help="of what is drawn (default: 0)")
    group.add_argument(
        "--longest", type=int, metavar="TOKENS",
        help="prompt and answer together (default: 2048 on a GPU, 256 on a CPU)",
    )  # fmt: skip
    group.add_argument(
        "--time-limit", type=float, default=math.inf, metavar="SECONDS",
        help="for all sessions, after which those that run are finished (default: none)",
    )  # fmt: skip
    group.add_argument("--only", default="", metavar="REGEX", help="ways that it is found in")
    group.add_argument("--list", action="store_true", help="show the ways' names")
    group.add_argument(
        "--locate", action=argparse.BooleanOptionalAction, default=None,
        help="look where in the model a difference arises, or, where there is none, compare every "
        "operation of one request all the same (default: where there is one)",
    )  # fmt: skip
    group.add_argument("--json", type=Path, metavar="FILE", help="write all figures there, too")
    add_engine_arguments(parser)
    args = parser.parse_args()
    for name in ("logprobs", "sampled", "time_limit"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be more than 0")
    if args.sampled is None:
        args.sampled = max(1, args.logprobs // 10)
    return args


def say(words: str) -> None:
    if IS_FIRST:
        print(words, flush=True)


@dataclass
class Check:
    """All of it. A way's sessions are the same in every run that has come as far."""

    engines: Engines
    texts: Texts
    chosen: list[Way]
    logprobs: int
    sampled: int
    until: float  # by time.monotonic
    comparison: Comparison = field(default_factory=Comparison)
    located: dict[str, Located] = field(default_factory=dict)  # by way
    seconds: dict[str, float] = field(default_factory=dict)
    _sessions: dict[tuple[str, int], Session] = field(default_factory=dict)

    def run(self, seed: int, wants_places: bool | None) -> None:
        """Raises ExactnessError where nothing can be computed alone."""
        start = time.monotonic()
        alone_until = start + SHARE_ALONE * (self.until - start)
        # of each way its part, in whole numbers
        each = [-(-one // len(self.chosen)) for one in (self.logprobs, self.sampled)]
        sampled = math.ceil(SHARE_SAMPLED_ALONE * self.sampled)
        positions = math.ceil(SHARE_ALONE_PLACES * self.logprobs)
        say(f"alone: {sampled:,} tokens are sampled")

        def learn(engine: DynamicInferenceEngine) -> None:
            for _ in self.texts.learn(Alone(engine), sampled, positions, alone_until):
                pass
            tokens = [len(a.tokens) for asked in self.texts.asked for a in asked.answers]
            self.engines.pools = Pools.of(engine, self.engines.model, tokens)

        self.engines.use(ALONE, learn)
        self.comparison.add_texts(self.texts)
        self._note(ALONE_AS_PROMPT, start)
        for number, way in enumerate(self.chosen):
            self._go(way, number, seed, each)
        if wants_places is not False:
            self._locate(wants_places)

    def _go(self, way: Way, number: int, seed: int, each: list[int]) -> None:
        start, comparison = time.monotonic(), self.comparison
        until = start + (self.until - start) / (len(self.chosen) - number)

        def work(engine: DynamicInferenceEngine) -> None:
            for session in draw_sessions(self.texts.asked, seed, number):
                done = comparison.total(way=way.name), comparison.total("sampled", way.name)
                enough = all(own >= wanted for own, wanted in zip(done, each, strict=True))
                if enough or (session.number and not goes_on(until)):
                    return
                self._sessions[way.name, session.number] = session
                comparison.add(way.name, session, session.run(engine))
                engine.check_integrity()

        try:
            self.engines.use(way, work)
        except ConfigurationError as error:
            comparison.failures.append(f"{way.name}: {error}")
        self._note(way.name, start)

    def _note(self, way: str, start: float) -> None:
        self.seconds[way] = time.monotonic() - start
        compared, sampled = self.comparison.total(way=way), self.comparison.total("sampled", way)
        figures = self.engines.figures.get(way, {})
        words = ", ".join(f"{name} {n:,}" for name, n in figures.items() if n)
        say(
            f"{way}: {compared:,} compared, {sampled:,} of them sampled, "
            f"{self.comparison.total_differing(way=way):,} differ; {self.seconds[way]:.1f} s"
            + (f" ({words})" if words else "")
        )

    def _locate(self, wants_places: bool | None) -> None:
        by_name = {way.name: way for way in self.chosen}
        for difference in self.comparison.differences:
            if difference.way in self.located or len(self.located) >= MOST_LOCATED:
                continue
            if difference.way == ALONE_AS_PROMPT:
                asked = next(a for a in self.texts.asked if a.name == difference.request)
                session = as_prompt(asked, difference.index)
            else:
                session = self._sessions[difference.way, difference.session]
            say(f"\nlocating: {difference}")
            way = by_name.get(difference.way, ALONE)
            found = of_difference(self.engines, way, session, difference)
            self.located[difference.way] = found
            say(str(found))
            if found.place is None:
                say("so it comes behind them, from CUDA graphs, or not in every run")
        if wants_places and not self.located and self._sessions:
            (name, _), session = list(self._sessions.items())[-1]
            item = max(session.items, key=lambda item: len(item.prompt))
            tokens = item.asked.answers[item.index].tokens
            found = locate(self.engines, by_name[name], session, item, item.index, len(tokens) - 1)
            self.located[name] = found
            say(f"\nall operations, {name}: {found}")

    def exit_code(self) -> int:
        """As the description says."""
        comparison = self.comparison
        if comparison.total_differing():
            return 1
        places = [found.place for found in self.located.values()]
        if any(place is not None for place in places):
            return 1
        enough = comparison.total() >= self.logprobs
        enough = enough and comparison.total("sampled") >= self.sampled
        return 0 if enough and not comparison.failures else 2

    def summary(self) -> str:
        """What was compared, and what differs."""
        comparison, texts = self.comparison, self.texts
        lines = ["", comparison.table(), ""]
        lines.append(
            f"{comparison.total():,} log-probabilities compared, {comparison.total('sampled'):,} "
            f"of sampled tokens: {comparison.total_differing():,} differ. They are those of "
            f"{len(texts.asked)} requests alone, {texts.sampled:,} tokens sampled and at most "
            f"{texts.positions:,} places."
        )
        shown = comparison.differences[:10] if not self.located else comparison.differences[:5]
        lines += [f"differs: {one}" for one in shown]
        lines += [f"not done: {one}" for one in comparison.failures[:10]]
        if self.exit_code() == 2:
            lines.append(f"wanted: {self.logprobs:,}, and {self.sampled:,} of sampled tokens.")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self.comparison.as_dict(),
            "wanted": {"all": self.logprobs, "sampled": self.sampled},
            "alone": {
                "requests": len(self.texts.asked),
                "sampled": self.texts.sampled,
                "places": self.texts.positions,
            },
            "engines": self.engines.figures,
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "located": {
                name: {
                    "place": None if found.place is None else found.place.as_dict(),
                    "operations": found.operations,
                    "tokens": found.tokens,
                }
                for name, found in self.located.items()
            },
        }


def check(args: argparse.Namespace) -> Check:
    """Raises ConfigurationError and WeightsError for what can't be run."""
    (values,) = values_from_args(args, EngineConfig)
    config = hub.with_files(EngineConfig(**{"batch_invariant": True} | values), None)
    chosen = [way for way in ways(config) if re.search(args.only, way.name)]
    if not chosen:
        raise ConfigurationError(f"--only {args.only} is found in no way's name (--list).")
    device = resolve_device(config)
    start = time.monotonic()
    model = load_weights(config)
    say(f"weights: {time.monotonic() - start:.1f} s")
    longest = args.longest or LONGEST[device.type]
    limit = config.inference_max_seq_length or model.config.max_position_embeddings
    if min(longest, limit) < SHORTEST_LIMIT:
        raise ConfigurationError(
            f"Requests of {min(longest, limit)} tokens are too short for this; at least "
            f"{SHORTEST_LIMIT} are needed (--longest, --inference-max-seq-length)."
        )
    texts = Texts(Sizes(min(longest, limit), model.config.vocab_size), args.session_seed)
    until = time.monotonic() + args.time_limit
    found = Check(Engines(config, model), texts, chosen, args.logprobs, args.sampled, until)
    found.run(args.session_seed, args.locate)
    return found


def main() -> int:
    args = parse_arguments()
    if args.list:
        say("\n".join(way.name for way in ways(EngineConfig())))
        return 0
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    try:
        found = check(args)
    except (ConfigurationError, WeightsError, ExactnessError) as error:
        print(f"check_exactness.py: {error}", file=sys.stderr)
        return 2
    if not IS_FIRST:  # whose end torchrun takes for that of all, if it is not 0
        return 0
    say(found.summary())
    if args.json is not None:
        report = {**describe_environment(), **found.as_dict()}
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return found.exit_code()


if __name__ == "__main__":
    sys.exit(main())
