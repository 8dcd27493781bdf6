"""Sequences that go through a Replay in pieces of any kind: prompts, decodes, drafts that hold or
not, with states left at checkpoints and gone on from. Each token's output, and each state, has to
be that of one prompt."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid.kernels.contract import DecodeRuns, PrefillSegments

# Any tokens: a tuple of tensors [T, ...].
Tokens = Any


def wider(ring: Tensor) -> Tensor:
    """The same as some channels of a ring with more, as of a layer with several convolutions."""
    return torch.nn.functional.pad(ring, (3, 5), value=torch.nan)[..., 3:-5]


@dataclass
class Kind:
    """A Replay, and how its tokens are made."""

    draw: Callable[[int, torch.Generator], Tokens]  # so many
    # (tokens, state, ring, plan) -> outputs
    run: Callable[[Tokens, Tensor, Any, Any], Tensor]
    plan: Callable[[DecodeRuns | PrefillSegments, int], Any]  # of a ring's length
    state: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...]  # what a ring keeps of a token
    chunk: int
    device: str = "cpu"
    dtype: torch.dtype = torch.float32

    def take(self, tokens: Tokens, rows: Tensor) -> Tokens:
        if isinstance(tokens, Tensor):
            return tokens[rows]
        return type(tokens)(*(values[rows] for values in tokens))

    def ints(self, values: list[int]) -> Tensor:
        dtype = torch.int64 if self.device == "cpu" else torch.int32
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass
class Sequence:
    text: Tokens
    length: int
    slot: int
    ring: int
    position: int = 0
    unfolded: int = 0  # where drafts were accepted: more than position % chunk
    outputs: dict[int, Tensor] = field(default_factory=dict)
    read: int = 0
    states: dict[int, int] = field(default_factory=dict)  # position -> slot


def prompts(
    kind: Kind, sequences: list[Sequence], lengths: list[int],
    checkpoints: list[list[tuple[int, int]]], padding: int = 0,
) -> PrefillSegments:  # fmt: skip
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    nobody = [0] * padding
    cu = [0]
    for own in checkpoints:
        cu.append(cu[-1] + len(own))
    flat = [(s, p, slot) for s, own in enumerate(checkpoints) for p, slot in own]
    of_token = [s for s, length in enumerate(lengths) for _ in range(length)]
    return PrefillSegments(
        cu_seqlens=kind.ints(bounds + [bounds[-1]] * padding),
        start_position=kind.ints([s.position for s in sequences] + nobody),
        read_slot=kind.ints([s.read for s in sequences] + nobody),
        write_slot=kind.ints([s.slot for s in sequences] + nobody),
        cu_checkpoints=kind.ints(cu + [cu[-1]] * padding),
        checkpoint_sequence=kind.ints([s for s, _, _ in flat]),
        checkpoint_position=kind.ints([p for _, p, _ in flat]),
        checkpoint_slot=kind.ints([slot for _, _, slot in flat]),
        sequence_of_token=kind.ints(of_token + [-1] * padding),
        longest=max(lengths, default=0),
        ring=kind.ints([s.ring for s in sequences] + nobody),
    )


def runs(
    kind: Kind, sequences: list[Sequence], lengths: list[int],
    checkpoints: list[tuple[int, int]], padding: int = 0,
) -> DecodeRuns:  # fmt: skip
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    nobody = [0] * padding
    # One token each, of the chunk that is in the ring.
    is_single = max(lengths) <= 1 and all(s.unfolded < kind.chunk for s in sequences)
    return DecodeRuns(
        cu_seqlens=kind.ints(bounds + [bounds[-1]] * padding),
        position=kind.ints([s.position for s in sequences] + nobody),
        unfolded=kind.ints([s.unfolded for s in sequences] + nobody),
        read_slot=kind.ints([s.read for s in sequences] + nobody),
        write_slot=kind.ints([s.slot for s in sequences] + nobody),
        ring=kind.ints([s.ring for s in sequences] + nobody),
        checkpoint_position=kind.ints([p for p, _ in checkpoints] + nobody),
        checkpoint_slot=kind.ints([slot for _, slot in checkpoints] + nobody),
        most_unfolded=kind.chunk - 1 if is_single else None,
    )


class Session:
    """Some sequences of one kind, and what their kernels keep."""

    def __init__(self, kind: Kind, lengths: list[int], seed: int, drafts: int = 3) -> None:
        self.kind, self.drafts = kind, drafts
        self.pick = random.Random(seed)
        self.generator = torch.Generator(kind.device).manual_seed(seed)
        count = len(lengths)
        self.slots = 1 + 5 * count
        self.state = torch.full((self.slots, *kind.state), torch.nan, device=kind.device)
        self.ring_length = kind.chunk + 2 * drafts
        rings = tuple(
            torch.full(
                (count + 1, self.ring_length, *shape), torch.nan, device=kind.device,
                dtype=kind.dtype,
            )
            for shape in kind.kept
        )  # fmt: skip
        self.ring: Any = rings
        self.free = list(range(count + 1, self.slots))
        self.sequences = [
            Sequence(kind.draw(length, self.generator), length, 1 + i, 1 + i)
            for i, length in enumerate(lengths)
        ]

    def whole(self, sequence: Sequence) -> tuple[Tensor, dict[int, Tensor]]:
        """The outputs of a sequence as one prompt, and the states on the grid."""
        kind, chunk = self.kind, self.kind.chunk
        ends = list(range(chunk, sequence.length + 1, chunk))
        state = torch.full((len(ends) + 2, *kind.state), torch.nan, device=kind.device)
        ring = tuple(part[:2].clone() for part in self.ring)
        alone = Sequence(sequence.text, sequence.length, len(ends) + 1, 1)
        part = prompts(
            kind, [alone], [alone.length], [[(end, 1 + i) for i, end in enumerate(ends)]]
        )
        y = kind.run(alone.text, state, ring, kind.plan(part, self.ring_length))
        return y, {end: state[1 + i] for i, end in enumerate(ends)}

    def step(self) -> None:
        """Some of them, in one call."""
        pick, kind = self.pick, self.kind
        left = [s for s in self.sequences if s.position < s.length]
        chosen = pick.sample(left, pick.randint(1, len(left)))
        as_runs = pick.random() < 0.6
        is_single = as_runs and pick.random() < 0.5
        lengths, held = [], []
        for s in chosen:
            remaining = s.length - s.position
            if as_runs:
                count = 1 if is_single else 1 + pick.choice([0, pick.randint(0, self.drafts)])
                held.append(min(pick.randint(0, count - 1), remaining - 1))
                lengths.append(count)
            else:
                lengths.append(min(remaining, pick.choice([1, 2, 3, 13, 16, 17, 40, 100])))
        if not as_runs:  # a prompt begins where the state's chunk does
            pairs = [
                (s, n) for s, n in zip(chosen, lengths, strict=True)
                if s.unfolded == s.position % kind.chunk
            ]  # fmt: skip
            if not pairs:
                return
            chosen, lengths = [s for s, _ in pairs], [n for _, n in pairs]
        tokens = []
        for i, (s, n) in enumerate(zip(chosen, lengths, strict=True)):
            rows = torch.arange(s.position, s.position + n)
            own = kind.take(s.text, rows.clamp(max=s.length - 1))
            if as_runs and n > 1 + held[i]:  # drafts that do not hold: others
                wrong = kind.draw(n, self.generator)
                keep = torch.arange(n, device=kind.device) < 1 + held[i]
                own = _mixed(keep, own, wrong)
            tokens.append(own)
        padding = pick.choice([0, 0, 2])
        if padding:
            tokens.append(kind.draw(padding, self.generator))
        packed = _joined(tokens)
        checkpoints: list[list[tuple[int, int]]] = []
        for s, n in zip(chosen, lengths, strict=True):
            certain = 1 if as_runs else n
            first, chunk = s.position - s.unfolded, kind.chunk
            ends = range(first + chunk, s.position + certain + 1, chunk)
            own_points = []
            for end in ends:
                if self.free and pick.random() < 0.5 and (not as_runs or not own_points):
                    own_points.append((end, self.free.pop()))
            checkpoints.append(own_points)
        if as_runs:
            ones = [own[0] if own else (0, 0) for own in checkpoints]
            part: Any = runs(kind, chosen, lengths, ones, padding)
        else:
            part = prompts(kind, chosen, lengths, checkpoints, padding)
        y = kind.run(packed, self.state, self.ring, kind.plan(part, self.ring_length))
        row = 0
        for i, (s, n) in enumerate(zip(chosen, lengths, strict=True)):
            good = 1 + held[i] if as_runs else n
            for j in range(good):
                s.outputs[s.position + j] = y[row + j]
            row += n
            certain = s.position + (1 if as_runs else n)
            state_at = certain - certain % kind.chunk
            s.position += good
            s.unfolded = s.position - state_at
            s.read = s.slot
            s.states |= dict(checkpoints[i])
            # Go on from a kept state now and then, as another request would.
            if s.states and pick.random() < 0.1:
                s.position, s.read = pick.choice(list(s.states.items()))
                s.unfolded = 0

    def check(self) -> None:
        """All of them to their ends, bit for bit as whole."""
        while any(s.position < s.length for s in self.sequences):
            self.step()
        for s in self.sequences:
            y, states = self.whole(s)
            got = torch.stack([s.outputs[i] for i in range(s.length)])
            assert torch.equal(got, y), first_difference(got, y)
            for position, slot in s.states.items():
                assert torch.equal(self.state[slot], states[position]), position


def first_difference(got: Tensor, wanted: Tensor) -> str:
    rows = (got != wanted).flatten(1).any(1).nonzero().flatten().tolist()
    return f"outputs of tokens {rows[:10]} differ, of {len(got)}"


def _joined(parts: list[Tokens]) -> Tokens:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    return type(parts[0])(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _mixed(keep: Tensor, one: Tokens, other: Tokens) -> Tokens:
    if isinstance(one, Tensor):
        return torch.where(keep.view(-1, *[1] * (one.dim() - 1)), one, other)
    return type(one)(*(_mixed(keep, a, b) for a, b in zip(one, other, strict=True)))
