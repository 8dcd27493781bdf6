"""What part of the whole model's caches a rank's pages hold, and how they are filled from pages of
a server that is split over ranks in another way.

A page holds a KV block, or a part of a state, as HostCopier writes it: one tensor of one layer
behind the other. Of each a rank has some rows of one axis, which are the rows that it has of the
weights: KV heads as what makes keys, channels of a convolution as its weight, heads of a recurrence
as A_log. The channels of a convolution on two ranks, and on one:

    rank 0   | x 0-63   | B 0-15  | C 0-15  |
                                                  | x 0-127 | B 0-31 | C 0-31 |
    rank 1   | x 64-127 | B 16-31 | C 16-31 |

Of a pipeline's ranks each has some of the layers. What there is less of than ranks, several have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megatron_hybrid.disaggregation.remote_memory import FLAG
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.cached_attention import CachedAttention
from megatron_hybrid.layers.inputs import LayerCaches
from megatron_hybrid.layers.kimi_delta_attention import KimiDeltaAttention
from megatron_hybrid.layers.lightning_attention import LightningAttention
from megatron_hybrid.layers.parts import Parts
from megatron_hybrid.layers.recurrent import RecurrentMixer
from megatron_hybrid.models.hybrid_model import HybridModel

NO_LAYER = -1  # that the logits belong to

Bytes = npt.NDArray[np.uint8]
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PagePart:
    """What a rank has of one tensor of one layer's caches: some rows of the whole model's `total`
    along `axis`, in order the `runs` (first row, count)."""

    layer: int  # in the whole model
    name: str  # key, value, index, conv, ssm, values, scales, logits
    dtype: str  # torch's name
    shape: tuple[int, ...]  # as the bytes lie, the last dimension side by side
    axis: int
    runs: Runs
    total: int
    start: int = 0  # bytes, from where the block or the state begins

    def __post_init__(self) -> None:
        rows = sum(count for _, count in self.runs)
        if rows != self.shape[self.axis]:
            raise ValueError(f"{self} has {self.shape[self.axis]} rows, its runs have {rows}.")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype.itemsize

    @property
    def end(self) -> int:
        """Bytes, as `start`."""
        return self.start + math.prod(self.shape) * self.itemsize

    @property
    def whole(self) -> str:
        """The whole model's tensor, in words: the same on all ranks, however it is split."""
        rest = [size for i, size in enumerate(self.shape) if i != self.axis]
        return f"{self.total} x {rest} in {self.dtype}"

    def place(self, row: int) -> int | None:
        """Of a row of the whole along this rank's axis; None: it does not have it."""
        place = 0
        for first, count in self.runs:
            if first <= row < first + count:
                return place + row - first
            place += count
        return None

    def view(self, place: int, count: int) -> _View:
        """So many rows from this place on: [count, the other dimensions in order]."""
        strides = [math.prod(self.shape[i + 1 :]) * self.itemsize for i in range(len(self.shape))]
        own = strides.pop(self.axis)
        rest = self.shape[: self.axis] + self.shape[self.axis + 1 :]
        start = self.start + place * own
        return _View(f"u{self.itemsize}", start, (count, *rest), (own, *strides))


class _View(NamedTuple):
    """Of some bytes."""

    dtype: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, memory: Bytes) -> npt.NDArray[Any]:
        # Raises ValueError where the memory is too small.
        return np.ndarray(self.shape, self.dtype, memory, self.start, self.strides)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """What one rank's pages hold: each a KV block, or so many together a state, one page behind the
    other."""

    page_bytes: int
    pages_per_state: int
    block_size: int  # tokens
    blocks: tuple[PagePart, ...]  # of each block
    states: tuple[PagePart, ...]  # of each state

    def __post_init__(self) -> None:
        room = self.page_bytes, self.page_bytes * self.pages_per_state
        if any(part.end > self.page_bytes for part in self.blocks) or self.state_bytes > room[1]:
            raise ValueError(f"A block or a state has more bytes than there are: {room}.")

    @property
    def state_bytes(self) -> int:
        """Of a state that a rank has; what is behind them in its last page means nothing."""
        return self.states[-1].end if self.states else 0

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def load(cls, text: str) -> PageLayout:
        """What `dump` gave, on another server. Raises ConfigurationError for anything else."""
        try:
            found: dict[str, Any] = json.loads(text)
            found |= {
                kind: tuple(PagePart(**_with_tuples(part)) for part in found[kind])
                for kind in ("blocks", "states")
            }
            return cls(**found)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigurationError(
                f"{FLAG}: what a peer says of its pages can't be read ({error}); both servers need "
                "the same version."
            ) from None


def _with_tuples(part: dict[str, Any]) -> dict[str, Any]:
    runs = tuple((int(first), int(count)) for first, count in part["runs"])
    return {**part, "shape": tuple(map(int, part["shape"])), "runs": runs}


def layout_of(
    model: HybridModel,
    caches: LayerCaches,
    *,
    page_bytes: int,
    pages_per_state: int,
    block_size: int,
) -> PageLayout:
    """Of this rank's pages, which a HostCopier of these caches of this model fills."""
    return PageLayout(
        page_bytes,
        pages_per_state,
        block_size,
        _placed(_block_parts(model, caches)),
        _placed(_state_parts(model, caches)),
    )


def _placed(parts: Iterable[PagePart]) -> tuple[PagePart, ...]:
    """One behind the other, but for those without elements."""
    parts = [part for part in parts if math.prod(part.shape)]
    starts = accumulate((part.end for part in parts), initial=0)
    return tuple(replace(part, start=start) for part, start in zip(parts, starts, strict=False))


class _Split(NamedTuple):
    """A rank's rows of so many, as in PagePart."""

    runs: Runs
    total: int

    @classmethod
    def whole(cls, total: int) -> _Split:
        return cls(((0, total),), total)

    @classmethod
    def of_weight(cls, parts: Parts, *roles: str, each: int = 1) -> _Split:
        """As the rows of a weight, or of several, one below the other; `each` make one."""
        begins, total, runs = dict[str, int](), 0, list[tuple[int, int]]()
        for part in parts:
            if part.role in roles:
                own = part.source[0]
                if part.role not in begins:
                    begins[part.role], total = total, total + part.shape[0]
                begin = begins[part.role] + own.start
                runs.append((begin // each, (own.stop - own.start) // each))
        assert runs, f"the layer has none of {', '.join(roles)}"
        return cls(tuple(runs), total // each)


def _part(layer: int, name: str, rows: Tensor, split: _Split, axis: int = 0) -> PagePart:
    """`rows`: [blocks or slots, ...]; `axis`: counted without the first one."""
    shape = tuple(rows.shape[1:])
    if not rows.is_contiguous():  # channels lie side by side; HostCopier takes them as they lie
        shape, axis = (*shape[:-2], shape[-1], shape[-2]), len(shape) - 1 - axis
    return PagePart(
        layer, name, str(rows.dtype).removeprefix("torch."), shape, axis, split.runs, split.total
    )


def _block_parts(model: HybridModel, caches: LayerCaches) -> Iterator[PagePart]:
    """In HostCopier's order."""
    attentions = _attentions(model)
    for layer, cache in caches.kv.items():
        attention = attentions[layer]
        parts, dim = attention.weight_parts(), attention.kv_spec().head_dim
        heads = _Split.of_weight(parts, attention.key_role, each=dim)
        for name, rows in (("key", cache.key), ("value", cache.value)):
            yield _part(layer, name, rows, heads, axis=1)
        if cache.index is not None:  # every rank has all of it
            whole = _Split.whole(cache.index.shape[2])
            yield _part(layer, "index", cache.index, whole, axis=1)


def _state_parts(model: HybridModel, caches: LayerCaches) -> Iterator[PagePart]:
    """In HostCopier's order."""
    recurrent = _recurrent(model)
    for layer, name, rows in _state_rows(model, caches):
        split = _channels if name == "conv" else _recurrence
        if rows[0].numel():
            yield _part(layer, name, rows, split(recurrent[layer]))
    logits = caches.end_logits
    yield _part(NO_LAYER, "logits", logits, _Split.whole(logits.shape[1]))


def _state_rows(model: HybridModel, caches: LayerCaches) -> Iterator[tuple[int, str, Tensor]]:
    if not caches.packed:
        for layer, state in caches.state.items():
            yield layer, "conv", state.conv
            yield layer, "ssm", state.ssm
    # Layers of one shape are packed together: see allocate_caches.
    specs = model.state_specs
    for spec, packed in zip(dict.fromkeys(specs.values()), caches.packed, strict=False):
        layers = [layer for layer, own in specs.items() if own == spec]
        parts = (("conv", packed.conv), ("values", packed.values), ("scales", packed.scales))
        for name, of_layers in parts:
            if of_layers is not None:
                for layer, rows in zip(layers, of_layers, strict=True):
                    yield layer, name, rows


def _attentions(model: HybridModel) -> dict[int, CachedAttention]:
    found = {index: block.attention for index, block in model.own_blocks()}
    if model.mtp is not None:
        found[model.mtp.first] = model.mtp.attention
    return {index: layer for index, layer in found.items() if layer is not None}


def _recurrent(model: HybridModel) -> dict[int, RecurrentMixer]:
    found = {index: block.mixer.recurrent for index, block in model.own_blocks()}
    if model.mtp is not None:
        found[model.mtp.first] = model.mtp.delay
    return {index: layer for index, layer in found.items() if layer is not None}


def _channels(layer: RecurrentMixer) -> _Split:
    """Of the convolution's state."""
    if layer.state_runs is not None:
        runs, total = layer.state_runs
        return _Split(tuple(runs), total)
    roles = "conv1d conv conv_1d q_conv1d k_conv1d v_conv1d k_sconv v_sconv sconv"
    names = [f"{role}.weight" for role in roles.split()]  # each layer has some of these
    parts = [part for part in layer.weight_parts() if part.role in names]
    if not parts:  # of a Delay, of RWKV: it is no weight, and every rank has all of it
        return _Split.whole(layer.spec.conv_shape[0])
    return _Split.of_weight(iter(parts), *names)


def _recurrence(layer: RecurrentMixer) -> _Split:
    """Of the recurrence's state, and of its scales: their first dimension."""
    if isinstance(layer, KimiDeltaAttention):  # A_log may be nested
        return _Split.of_weight(layer.weight_parts(), "dt_bias", each=layer.config.head_dim)
    if isinstance(layer, LightningAttention):  # whose decays are no weights
        return _Split.of_weight(layer.weight_parts(), "norm.weight", each=layer.config.head_dim)
    return _Split.of_weight(
        layer.weight_parts(), "A_log", "time_decay", "rg_lru.recurrent_param", "igate_preact.weight"
    )


class _Move(NamedTuple):
    """Some rows of one tensor."""

    rank: int  # of the peer's
    source: _View
    target: _View


class PageGather:
    """Fills a rank's pages from those of a peer's ranks.

    `same_rank`: a peer's rank whose pages are as ours are, byte by byte, and can be taken whole;
    None: there is none. `block_ranks`, `state_ranks`: whose pages a block or a state is filled
    from, as few as there can be; the same one alone where there is one. No ranks: this rank has
    nothing of blocks, or of states.
    """

    def __init__(self, own: PageLayout, peers: Sequence[PageLayout], nearest: int = 0) -> None:
        """`peers`: of all ranks of the peer, in order. `nearest`: its rank that is read where
        several have the same, so that not all of our ranks read from one. Raises ConfigurationError
        for a peer whose caches are not the same but for how they are split."""
        order = [(nearest + i) % len(peers) for i in range(len(peers))]
        self.same_rank = next((rank for rank in order if peers[rank] == own), None)
        if self.same_rank is not None:
            order.remove(self.same_rank)
            order.insert(0, self.same_rank)
        sizes = {peer.block_size for peer in peers}
        if sizes != {own.block_size}:
            raise _unlike(
                f"A KV block is {own.block_size} tokens here, and "
                f"{', '.join(map(str, sorted(sizes)))} there."
            )
        blocks = _pieces(own.blocks, {rank: peers[rank].blocks for rank in order})
        states = _pieces(own.states, {rank: peers[rank].states for rank in order})
        needed = {rank for piece in blocks + states if (rank := piece.only_holder) is not None}
        self._states = [piece.move(needed) for piece in states]
        self._blocks = [piece.move(needed) for piece in blocks]
        self.block_ranks, self.state_ranks = (
            tuple(sorted({move.rank for move in moves})) for moves in (self._blocks, self._states)
        )

    @property
    def needed_ranks(self) -> tuple[int, ...]:
        """Of blocks and of states."""
        return tuple(sorted({*self.block_ranks, *self.state_ranks}))

    def fill_block(self, own_page: Bytes, pages: Mapping[int, Bytes]) -> None:
        """Write what this rank has of a block. `pages`: of the same block, one of each of the
        block_ranks. All contiguous; raises ValueError for one that is too short."""
        _fill(own_page, pages, self._blocks)

    def fill_state(self, own: Bytes, states: Mapping[int, Bytes]) -> None:
        """Write what this rank has of a state. `states`: the same state's pages of each of the
        state_ranks, one behind the other, as `own` are. Otherwise as `fill_block`."""
        _fill(own, states, self._states)


def _fill(own: Bytes, peers: Mapping[int, Bytes], moves: Iterable[_Move]) -> None:
    for rank, source, target in moves:
        target.of(own)[...] = source.of(peers[rank])


class _Piece(NamedTuple):
    """Rows that each of `holders` has side by side, as this rank has."""

    own: PagePart
    place: int
    size: int
    holders: dict[int, tuple[PagePart, int]]  # by the peer's rank: its part, and the place there

    @property
    def only_holder(self) -> int | None:
        return next(iter(self.holders)) if len(self.holders) == 1 else None

    def move(self, needed: set[int]) -> _Move:
        """From a rank that is needed anyway, if it has the rows; else from the first, which is then
        needed, too."""
        rank = min(self.holders, key=lambda rank: rank not in needed)
        needed.add(rank)
        theirs, place = self.holders[rank]
        return _Move(rank, theirs.view(place, self.size), self.own.view(self.place, self.size))


def _pieces(own: Iterable[PagePart], peers: Mapping[int, Collection[PagePart]]) -> list[_Piece]:
    """All that this rank has, of every part what lies side by side everywhere."""
    theirs: dict[tuple[int, str], dict[int, PagePart]] = {}
    for rank, parts in peers.items():
        for part in parts:
            theirs.setdefault((part.layer, part.name), {})[rank] = part
    pieces: list[_Piece] = []
    for part in own:
        found = theirs.get((part.layer, part.name), {})
        _check(part, found.values())
        pieces += _cut(part, found)
    return pieces


def _cut(own: PagePart, peers: Mapping[int, PagePart]) -> Iterator[_Piece]:
    """Wherever a run of any rank begins or ends."""
    runs = [run for part in peers.values() for run in part.runs]
    bounds = sorted({bound for first, count in runs for bound in (first, first + count)})
    place = 0
    for first, count in own.runs:
        inner = [bound for bound in bounds if first < bound < first + count]
        for low, high in pairwise([first, *inner, first + count]):
            holders = {
                rank: (part, there)
                for rank, part in peers.items()
                if (there := part.place(low)) is not None
            }
            if not holders:
                raise _unlike(f"Rows {low} to {high} of {_name(own)} are on none of its ranks.")
            yield _Piece(own, place + low - first, high - low, holders)
        place += count


def _check(own: PagePart, peers: Collection[PagePart]) -> None:
    if not peers:
        raise _unlike(f"It has nothing of {_name(own)}.")
    for part in peers:
        if part.whole != own.whole:
            raise _unlike(f"{_name(own)} is {own.whole} here, and {part.whole} there.")


def _name(part: PagePart) -> str:
    return part.name if part.layer == NO_LAYER else f"{part.name} of layer {part.layer}"


def _unlike(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{FLAG}: a peer's caches are not as this server's. {what} Both need the same model, block "
        "size, types of KV and states, and drafts from the model's head on both or on neither."
    )
