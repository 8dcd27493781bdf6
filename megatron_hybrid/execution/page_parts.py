"""How caches lie in pages of host memory: one tensor of one layer behind the other.

A page holds one KV block of all layers, or a part of one state: of all recurrent layers, and the
logits that go with it. Tensors lie there as they are, to the bit, or smaller: numbers of 8 bits,
and behind those of one row a scale for each group of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megatron_hybrid.kernels.packed_states.reference import quantise
from megatron_hybrid.layers.inputs import SCALES_DTYPE, LayerCaches

# Dimensions of keys and values, [blocks, tokens, heads, head_dim], whose numbers share a scale.
_KV_OVER = (1, 3)

Where = Tensor | slice  # [n] indices int64, or one row


@dataclass(frozen=True)
class HostForm:
    """What caches become in host memory; None: what they are.

    scaled_over: by recurrent layer the dimension of its state, from the last one, whose numbers
    share a scale.
    """

    kv: torch.dtype | None = None
    states: torch.dtype | None = None
    scaled_over: Mapping[int, int] = field(default_factory=dict)


EXACT = HostForm()


@dataclass(frozen=True)
class Part:
    """One tensor's place in a page, or in the pages of a state; it lies there as it is."""

    rows: Tensor  # [blocks or slots, words of the page, or its own]
    start: int = 0  # in words
    first: int = 0  # the number of row 0

    @property
    def width(self) -> int:
        """Words of a row."""
        return self.rows.shape[1]

    @property
    def row_bytes(self) -> int:
        """Of a row, in the page."""
        return self.width * self.rows.itemsize

    @property
    def end(self) -> int:
        """As `start`."""
        return self.start + self.width

    def in_words(self, word: torch.dtype, start: int) -> Part:
        """In its place; the rows are of whole words."""
        return replace(self, rows=self.rows.view(word), start=start)

    def take(self, where: Where) -> Tensor:
        """[n, width]: what becomes of rows in pages."""
        return self._some(where)

    def put(self, where: Where, words: Tensor) -> None:
        """Rows from pages."""
        self._overwrite(where, words)

    def _some(self, where: Where) -> Tensor:
        return self.rows[where] if isinstance(where, slice) else self.rows.index_select(0, where)

    def _overwrite(self, where: Where, rows: Tensor) -> None:
        if isinstance(where, slice):
            self.rows[where] = rows
        else:
            self.rows.index_copy_(0, where, rows)


@dataclass(frozen=True)
class RoundedPart(Part):
    """The same, rounded to 8 bits. `rows` are [blocks or slots, ...]; dimensions `over` share a
    scale, of which the largest number becomes the largest one of the type."""

    dtype: torch.dtype = torch.int8
    over: tuple[int, ...] = ()
    word: torch.dtype = torch.int8

    @property
    def row_bytes(self) -> int:
        return _rounded_bytes(tuple(self.rows.shape), self.over)

    @property
    def width(self) -> int:
        return self.row_bytes // self.word.itemsize

    def in_words(self, word: torch.dtype, start: int) -> Part:
        return replace(self, word=word, start=start)

    def take(self, where: Where) -> Tensor:
        numbers_and_scales = quantise(self._some(where), self.over, self.dtype)
        parts = [one.reshape(len(one), -1).view(torch.uint8) for one in numbers_and_scales]
        return torch.cat(parts, 1).view(self.word)

    def put(self, where: Where, words: Tensor) -> None:
        shape = self.rows.shape[1:]
        size = math.prod(shape)
        flat = words.contiguous().view(torch.uint8)
        numbers = flat[:, :size].contiguous().view(self.dtype).view(len(flat), *shape)
        grouped = [1 if dim + 1 in self.over else n for dim, n in enumerate(shape)]
        scales = flat[:, size:].contiguous().view(SCALES_DTYPE).view(len(flat), *grouped)
        self._overwrite(where, (numbers.float() * scales).to(self.rows.dtype))


def _rounded_bytes(shape: tuple[int, ...], over: tuple[int, ...]) -> int:
    """Of a row of [rows, ...]."""
    numbers = math.prod(shape[1:])
    return numbers + numbers // math.prod(shape[dim] for dim in over) * SCALES_DTYPE.itemsize


def kv_row_bytes(shape: tuple[int, int, int]) -> int:
    """Of the keys or values of a block, [tokens, heads, head_dim], rounded."""
    return _rounded_bytes((1, *shape), _KV_OVER)


@dataclass(frozen=True)
class PageParts:
    """Of a KV block, and of a state."""

    blocks: Sequence[Part]
    states: Sequence[Part]

    @classmethod
    def of(cls, caches: LayerCaches, form: HostForm = EXACT) -> PageParts:
        """Without their places. Tensors without elements are left out."""
        return cls(_filled(_blocks_of(caches, form)), _filled(_states_of(caches, form)))

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of a block and of a state."""
        block, state = (sum(p.row_bytes for p in parts) for parts in (self.blocks, self.states))
        return block, state

    def page_bytes(self, pages_per_state: int) -> int:
        """Of a page that takes a block, and of which so many take a state: what one rank has of
        them, which may be nothing."""
        block, state = self.sizes
        part = -(-state // pages_per_state) if pages_per_state else 0
        return -(-max(block, part, 1) // 8) * 8

    def word(self, page_bytes: int) -> torch.dtype:
        """The longest integer of which pages and all parts are whole numbers."""
        sizes = [page_bytes, *(part.row_bytes for part in (*self.blocks, *self.states))]
        common = math.gcd(*sizes, 8)
        return {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[common]

    def placed(self, word: torch.dtype) -> PageParts:
        """One behind the other."""
        return PageParts(_placed(self.blocks, word), _placed(self.states, word))


def _blocks_of(caches: LayerCaches, form: HostForm) -> Iterable[Part]:
    for cache in caches.kv.values():
        for tensor in (cache.key, cache.value):
            if form.kv is None or not tensor[0].numel():
                yield _exact(tensor)
            else:
                yield RoundedPart(tensor, dtype=form.kv, over=_KV_OVER)
        if cache.index is not None:
            yield _exact(cache.index)
    if caches.routed is not None:
        yield _exact(caches.routed)


def _states_of(caches: LayerCaches, form: HostForm) -> Iterable[Part]:
    """Of cached states and their logits."""
    if not caches.packed:
        for layer, state in caches.state.items():
            yield _exact(state.conv)
            if form.states is None or not state.ssm[0].numel():
                yield _exact(state.ssm)
            else:
                over = state.ssm.dim() + form.scaled_over[layer]
                yield RoundedPart(state.ssm, dtype=form.states, over=(over,))
    for packed in caches.packed:
        tensors = [packed.conv, packed.values, *([] if packed.scales is None else [packed.scales])]
        for tensor in tensors:
            yield from (_exact(layer, packed.full_ssm.shape[1]) for layer in tensor)
    yield _exact(caches.end_logits)


def _exact(tensor: Tensor, first: int = 0) -> Part:
    if not tensor[0].numel():
        return Part(tensor.view(len(tensor), 0), first=first)
    if not tensor.is_contiguous():  # channels lie side by side
        tensor = tensor.transpose(-1, -2)
    return Part(tensor.view(len(tensor), -1), first=first)


def _filled(parts: Iterable[Part]) -> list[Part]:
    return [part for part in parts if part.row_bytes]


def _placed(parts: Sequence[Part], word: torch.dtype) -> list[Part]:
    found: list[Part] = []
    for part in parts:
        found.append(part.in_words(word, found[-1].end if found else 0))
    return found
