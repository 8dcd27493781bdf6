"""Recurrences whose states lie on the grid alone: a token's bits are the same in whatever calls its
sequence is computed, beside whomever; the values are the token loop's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels import replay
from megatron_hybrid.kernels.contract import DecodeRuns, PrefillSegments
from megatron_hybrid.kernels.protocols import ConvConstants, Gates
from tests.kernels import (
    test_gated_delta_rule,
    test_mamba1_scan,
    test_mamba2_scan,
    test_mlstm,
    test_rg_lru,
    test_wkv,
)
from tests.kernels.recurrence_contract import Data, Recurrence, close
from tests.kernels.replay_cases import wider
from tests.kernels.segments import Segment, int64, poisoned, prefill_segments
from tests.thorough import A_THIRD, usually

CHUNKS = (1, 4, 16)
DRAFTS = 5
WIDTH, CHANNELS = 4, 7
SCANS = {
    "mamba1": (
        test_mamba1_scan,
        (test_mamba1_scan.CHANNELS, test_mamba1_scan.SIZE),
        replay.TORCH_REPLAYS.mamba1_scan,
    ),
    "mamba2": (
        test_mamba2_scan,
        (test_mamba2_scan.HEADS, test_mamba2_scan.HEAD_DIM, test_mamba2_scan.SIZE),
        replay.TORCH_REPLAYS.mamba2_scan,
    ),
    "gated_delta_rule": (
        test_gated_delta_rule,
        test_gated_delta_rule.SHAPE,
        replay.TORCH_REPLAYS.gated_delta_rule,
    ),
    "rg_lru": (test_rg_lru, (test_rg_lru.CHANNELS,), replay.TORCH_REPLAYS.rg_lru),
    "mlstm": (test_mlstm, test_mlstm.SHAPE, replay.TORCH_REPLAYS.mlstm),
    "wkv": (test_wkv, (test_wkv.CHANNELS, 2), replay.TORCH_REPLAYS.wkv),
}
Part = DecodeRuns | PrefillSegments


@dataclass
class Kind:
    """A Replay, or the convolution's, with what it is called with."""

    name: str
    shape: tuple[int, ...]  # of a state
    draw: Callable[..., Any]  # (length, seed) -> tokens
    join: Callable[[list[Any]], Any]
    rows: Callable[[Any, int, int], Any]
    call: Callable[[Any, Tensor, Any, Part, int, int], Tensor]
    rings: Callable[[int, int], Any]
    expected: Callable[[Any], tuple[Tensor, list[Tensor]]]  # in float64; states after 0, 1, ...


def scan_kind(name: str) -> Kind:
    module, shape, kernel = SCANS[name]
    recurrence = Recurrence(None, shape, module.draw, module.step)

    def call(
        data: Data, state: Tensor, ring: Any, part: Part, chunk: int, ring_length: int
    ) -> Tensor:
        plan = kernel.plan(part, chunk, ring_length)
        out = recurrence.empty_output(data)
        assert kernel.run(*data.arguments(), state, ring, plan, out) is out
        return out

    return Kind(
        name, shape, module.draw, Data.join, Data.rows, call, recurrence.rings,
        recurrence.token_loop,
    )  # fmt: skip


def conv_kind(silu: bool = True, gated: bool = False) -> Kind:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(WIDTH, CHANNELS, generator=generator).t()
    constants = ConvConstants(weight, torch.randn(CHANNELS, generator=generator), silu)
    kernel = replay.TORCH_REPLAYS.conv

    def draw(length: int, seed: int = 0) -> Tensor:
        g = torch.Generator().manual_seed(seed)
        return torch.randn(length, 3 * CHANNELS, generator=g)

    def split(x: Tensor) -> tuple[Tensor, Gates]:
        own, before, after = x.split(CHANNELS, dim=1)
        return own, Gates(before, after) if gated else Gates()

    def call(x: Tensor, state: Tensor, ring: Any, part: Part, chunk: int, length: int) -> Tensor:
        plan = kernel.plan(part, chunk, WIDTH, length)
        own, gates = split(x)
        out = torch.full(own.shape, torch.nan)
        given = gates if gated else None
        some = wider(ring)
        assert kernel.run(own, constants, state, some, plan, out, given) is out
        ring.copy_(some)
        return out

    def expected(x: Tensor) -> tuple[Tensor, list[Tensor]]:
        own, gates = split(x.double())
        if gates.before is not None:
            own = own * gates.before
        rows = torch.cat((own.new_zeros(WIDTH - 1, CHANNELS), own))
        y = sum(rows[k : k + len(x)] * weight[:, k].double() for k in range(WIDTH))
        y = y + constants.bias.double()
        y = torch.nn.functional.silu(y) if silu else y
        y = y if gates.after is None else y * gates.after
        return y, [rows[t : t + WIDTH - 1].t() for t in range(len(x) + 1)]

    return Kind(
        "conv",
        (CHANNELS, WIDTH - 1),
        draw,
        torch.cat,
        lambda x, begin, end: x[begin:end],
        call,
        lambda rows, length: poisoned(rows, length, CHANNELS),
        expected,
    )


KINDS: dict[str, Callable[[], Kind]] = {
    "conv": conv_kind,
    "gated conv": lambda: conv_kind(silu=False, gated=True),
    **{name: lambda name=name: scan_kind(name) for name in SCANS},  # type: ignore[misc]
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]()


@dataclass
class Text:
    """Of one sequence, as it is computed at once: outputs, and the states on the grid."""

    tokens: Any
    length: int
    outputs: Tensor
    states: dict[int, Tensor]
    # where it is now
    row: int = 0
    position: int = 0
    slot: int = 0
    folded: int = 0  # after how many tokens the state is that is in its slot
    kept: dict[int, int] = field(default_factory=dict)  # slots of its checkpoints, by position

    @classmethod
    def drawn(cls, kind: Kind, length: int, chunk: int, seed: int) -> Text:
        tokens = kind.draw(length, seed)
        grid = list(range(chunk, length + 1, chunk))
        state = poisoned(len(grid) + 2, *kind.shape)
        checkpoints = [(p, 2 + i) for i, p in enumerate(grid)]
        part = replace(prefill_segments([Segment(0, length, 0, 1, checkpoints)]), ring=int64([0]))
        outputs = kind.call(tokens, state, kind.rings(1, chunk), part, chunk, chunk)
        states = {position: state[slot] for position, slot in checkpoints}
        states[0] = torch.zeros(kind.shape)
        return cls(tokens, length, outputs, states)


def texts_of(kind: Kind, chunk: int, lengths: tuple[int, ...]) -> list[Text]:
    return [Text.drawn(kind, n, chunk, 10 + i) for i, n in enumerate(lengths)]


@A_THIRD
@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_sequence_at_once_has_the_token_loop_s_values(kind: Kind, chunk: int) -> None:
    for length in (1, 3, 4, 15, 16, 17, 48, 53):
        text = Text.drawn(kind, length, chunk, length)
        expected, states = kind.expected(text.tokens)
        close(text.outputs, expected)
        for position, state in text.states.items():
            close(state, states[position])


class Session:
    """Random calls for some sequences, which have two slots each and one for each checkpoint."""

    def __init__(self, kind: Kind, chunk: int, texts: list[Text], seed: int) -> None:
        self.kind, self.chunk, self.texts = kind, chunk, texts
        self.pick = random.Random(seed)
        self.ring_length = chunk + 2 * DRAFTS
        rows = list(range(len(texts)))
        self.pick.shuffle(rows)
        for i, text in enumerate(texts):
            text.row, text.position, text.slot, text.kept = rows[i], 0, 0, {}
            text.folded = 0
        self.slots = 1 + 2 * len(texts)
        total = self.slots + sum(len(text.states) for text in texts)
        self.state = poisoned(total, *kind.shape)
        self.ring = kind.rings(len(texts), self.ring_length)

    def keep(self, text: Text, first: int, last: int) -> tuple[int, int]:
        """A position up to `last` behind `first`, and a new slot; 0: none."""
        positions = [p for p in text.states if first < p <= last and p not in text.kept]
        if not positions or self.pick.random() < 0.4:
            return 0, 0
        position = self.pick.choice(positions)
        self.slots += 1
        return position, self.slots - 1

    def write_slot(self, index: int, text: Text) -> int:
        own = 2 * index + 1, 2 * index + 2
        if text.slot in own and self.pick.random() < 0.6:
            return text.slot
        return next(slot for slot in own if slot != text.slot)

    def go(self) -> bool:
        """One call for some of those that are not at their ends; False: nobody is left."""
        left = [i for i, text in enumerate(self.texts) if text.position < text.length]
        if not left:
            return False
        some = [i for i in left if self.pick.random() < 0.7] or left[:1]
        decodes = [i for i in some if self.texts[i].position and self.pick.random() < 0.6]
        prompts = [i for i in some if i not in decodes]
        for who, call in ((decodes, self.decode), (prompts, self.prefill)):
            if who:
                call(who)
        return True

    def catch_up(self, who: list[int]) -> None:
        """Take up the drafts of the last call that held."""
        columns = []
        for i in who:
            text = self.texts[i]
            last = text.position - text.position % self.chunk
            keeps = self.keep(text, text.folded, last)
            if keeps[1]:
                text.kept[keeps[0]] = keeps[1]
            unfolded = text.position - text.folded
            columns.append((text.position, unfolded, text.slot, text.slot, text.row, *keeps))
            text.folded = last
        figures = map(int64, map(list, zip(*columns, strict=True)))
        self.run([self.kind.draw(0)], DecodeRuns(int64([0] * (len(who) + 1)), *figures), [])

    def prefill(self, who: list[int]) -> None:
        behind = [i for i in who if self.texts[i].position - self.texts[i].folded >= self.chunk]
        if behind:
            self.catch_up(behind)
        segments, parts, expected = [], [], []
        for i in who:
            text = self.texts[i]
            left = text.length - text.position
            count = min(left, self.pick.choice((1, 2, 3, 7, self.chunk, 2 * self.chunk + 1, left)))
            end = text.position + count
            keeps = self.keep(text, text.position, end)
            write = self.write_slot(i, text)
            checkpoints = [keeps] if keeps[1] else []
            segments.append(Segment(text.position, count, text.slot, write, checkpoints))
            parts.append(self.kind.rows(text.tokens, text.position, end))
            expected.append(text.outputs[text.position : end])
            if keeps[1]:
                text.kept[keeps[0]] = keeps[1]
            text.position, text.slot = end, write
            text.folded = end - end % self.chunk
        padding = self.pick.choice((0, 0, 2))
        part = replace(
            prefill_segments(segments, padding),
            ring=int64([self.texts[i].row for i in who] + [0] * padding),
        )
        self.run(parts, part, expected)

    def decode(self, who: list[int]) -> None:
        """One token each and drafts, of which some are the text's."""
        parts, columns, expected = [], [], []
        for i in who:
            text = self.texts[i]
            start = text.position
            drafts = min(self.pick.choice((0, 1, DRAFTS)), text.length - start - 1)
            held = self.pick.randint(0, drafts)
            end = start + 1 + held
            own = [self.kind.rows(text.tokens, start, end)]
            wrong = self.kind.draw(drafts - held + 1, 999)
            parts.append(self.kind.join([*own, self.kind.rows(wrong, 0, drafts - held)]))
            expected.append(text.outputs[start:end])
            expected.append(torch.full((drafts - held, *text.outputs.shape[1:]), torch.nan))
            first, last = text.folded, (start + 1) - (start + 1) % self.chunk
            keeps = self.keep(text, first, last)
            if keeps[1]:
                text.kept[keeps[0]] = keeps[1]
            elif self.pick.random() < 0.3:  # one that is not reached yet
                keeps = last + self.chunk, len(self.state) - 1
            write = self.write_slot(i, text)
            columns.append(
                (1 + drafts, start, start - first, text.slot, write, text.row, *keeps, end, last)
            )
            text.slot = write
        padding = self.pick.choice((0, 0, 2))
        nobody = [0] * padding
        lengths, *figures = (list(c) + nobody for c in list(zip(*columns, strict=True))[:8])
        part = DecodeRuns(int64([0, *lengths]).cumsum(0), *map(int64, figures))
        self.run(parts, part, expected, padding)
        for i, (*_, end, last) in zip(who, columns, strict=True):
            self.texts[i].position, self.texts[i].folded = end, last

    def run(self, parts: list[Any], part: Part, expected: list[Tensor], padding: int = 0) -> None:
        tokens = self.kind.join(parts)
        if padding:
            tokens = self.kind.join([tokens, self.kind.draw(padding, 3)])
        found = self.kind.call(tokens, self.state, self.ring, part, self.chunk, self.ring_length)
        if expected:
            whole = torch.cat(expected)
            assert not found[len(whole) :].any(), "padding has outputs"
            assert ((found[: len(whole)] == whole) | whole.isnan()).all()
        assert self.state[0].isnan().all()

    def check_states(self) -> None:
        for text in self.texts:
            for position, slot in text.kept.items():
                assert torch.equal(self.state[slot], text.states[position]), position
            if text.slot:
                assert torch.equal(self.state[text.slot], text.states[text.folded])


@A_THIRD
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("seed", range(usually(3, 30)))
def test_any_calls_give_the_same_bits(kind: Kind, chunk: int, seed: int) -> None:
    texts = texts_of(kind, chunk, (1, 15, 16, 33, 48, 61)[: 1 + seed % 6 or 6])
    session = Session(kind, chunk, texts, seed)
    while session.go():
        session.check_states()
    session.check_states()
