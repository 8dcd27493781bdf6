"""Who comes when, with what, and who is aborted: one random session of an engine."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from exactness.texts import Asked, Bits, Result, params_of_prompt
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.request import SamplingParams
from megatron_hybrid.scoring import kept_at, params_behind

# How many requests a session has, at least and at most, as often the one as the other.
SIZES = ((1, 1), (2, 8), (9, 24), (25, 64), (65, 96))
IDLE_STEPS = 10_000  # after which a session that gives nothing is stuck


class Style(enum.Enum):
    """What of a request is computed how."""

    ANSWERED = "answered"
    WITH_PROMPT = "answered, with its prompt's log-probabilities"
    WITH_END = "answered, with those of its prompt's end"
    SCORED = "an answer scored behind its prompt"
    WHOLE = "prompt and answer as a prompt"


STYLES = (*[Style.ANSWERED] * 4, Style.WITH_PROMPT, *[Style.WITH_END] * 2, *[Style.SCORED] * 2,
          Style.WHOLE)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Item:
    """A request of a session: its prompt is all that is known, or some of it."""

    id: str
    asked: Asked
    style: Style
    index: int  # of the answer that is in the prompt, where one is
    params: SamplingParams
    arrives: int  # step
    aborted: int | None = None  # so many steps later
    priority: int = 0

    @property
    def prompt(self) -> list[int]:
        """What is sent."""
        if self.style in (Style.SCORED, Style.WHOLE):
            return self.asked.answers[self.index].tokens
        return self.asked.prompt

    @property
    def first(self) -> int:
        """Position of the first prompt token whose log-probability is wanted, if any is."""
        return self.params.prompt_logprobs_start

    def known(self, index: int) -> tuple[list[int], Bits]:
        """Tokens of prompt and answer, and bits of all, alone. `index`: which of its answers."""
        answer = self.asked.answers[self.index or index]
        return answer.tokens, answer.bits

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Where states are wanted, as LLM.score says."""
        return kept_at(len(self.asked.prompt)) if self.style is Style.SCORED else ()


@dataclass(frozen=True)
class Session:
    """number: counts those of a way, for which it is drawn."""

    number: int
    items: list[Item]

    @property
    def kind(self) -> str:
        """How many come together."""
        count = len(self.items)
        low, high = next((size for size in SIZES if count <= size[1]), SIZES[-1])
        return f"sessions of {low} to {high} requests" if high > low else "sessions of 1 request"

    def run(self, engine: DynamicInferenceEngine) -> dict[tuple[Item, int], Result]:
        """What the engine gives, by answer; its cache is empty when it begins."""
        engine.reset()
        by_id = {item.id: item for item in self.items}
        coming = sorted(self.items, key=lambda item: item.arrives)
        aborts: dict[int, list[Item]] = defaultdict(list)
        results: dict[tuple[Item, int], Result] = {}
        step = idle = 0
        while coming or engine.has_work():
            if not engine.has_work() and coming:
                step = max(step, coming[0].arrives)
            while coming and coming[0].arrives <= step:
                item = coming.pop(0)
                engine.add_request(
                    item.id,
                    item.prompt,
                    item.params,
                    priority=item.priority,
                    cache_checkpoints=item.checkpoints,
                )
                results |= {(item, index): Result() for index in range(item.params.n)}
                if item.aborted is not None:
                    aborts[step + item.aborted].append(item)
            for item in aborts.pop(step, []):
                engine.abort(item.id)
            events = engine.step()
            for event in events:
                results[by_id[event.request_id], event.index].add(event)
            step, idle = step + 1, 0 if events else idle + 1
            if idle > IDLE_STEPS:
                raise RuntimeError(f"{IDLE_STEPS} steps of an engine gave nothing.")
        return results


def as_prompt(asked: Asked, index: int) -> Session:
    """One of its answers behind its prompt as one prompt, and nothing else."""
    item = Item(asked.name, asked, Style.WHOLE, index, params_of_prompt(), 0)
    return Session(0, [item])


def draw_sessions(asked: Sequence[Asked], seed: int, way: int) -> Iterator[Session]:
    """Without end, for the way of this number: all requests in another order, and all again."""
    draw = np.random.default_rng([seed, 2, way])
    waiting: list[Asked] = []
    number = 0
    while True:
        low, high = SIZES[(number + way) % len(SIZES)]
        count = min(int(draw.integers(low, high + 1)), 2 * len(asked))
        while len(waiting) < count:
            waiting += [asked[i] for i in draw.permutation(len(asked))]
        chosen, waiting = waiting[:count], waiting[count:]
        again = [one for one in chosen if draw.random() < 0.2]  # the same at once, or warm
        yield Session(number, list(_items([*chosen, *again], draw)))
        number += 1


def _items(chosen: Sequence[Asked], draw: np.random.Generator) -> Iterator[Item]:
    """All at once, or one after the other, while others decode."""
    gap = float(draw.choice([0.0, 0.5, 3.0]))
    step = 0
    for i, asked in enumerate(chosen):
        style = STYLES[int(draw.integers(len(STYLES)))]
        index = int(draw.integers(len(asked.answers)))
        length = len(asked.prompt)
        params = asked.params
        if style is Style.WITH_PROMPT:
            params = replace(params, prompt_logprobs=0)
        elif style is Style.WITH_END:
            params = replace(
                params, prompt_logprobs=0, prompt_logprobs_start=int(draw.integers(length))
            )
        elif style is Style.SCORED:
            params = params_behind(length)
        elif style is Style.WHOLE:
            params = params_of_prompt()
        behind = index if style in (Style.SCORED, Style.WHOLE) else 0
        aborted = int(draw.integers(1, 30)) if draw.random() < 0.08 else None
        priority = int(draw.random() < 0.15)
        yield Item(f"{i} {asked.name}", asked, style, behind, params, step, aborted, priority)
        step += int(draw.poisson(gap))
