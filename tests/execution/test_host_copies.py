"""What goes to pages of host memory comes back as it was."""

from __future__ import annotations

import ctypes
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_hybrid.cache.host_tier import Copy
from megatron_hybrid.execution import batch_copies
from megatron_hybrid.execution.batch_copies import COPY, BatchCopies, Copies
from megatron_hybrid.execution.host_copies import HostCopier
from megatron_hybrid.execution.long_rows import LONG_ROW, LongRows
from megatron_hybrid.execution.page_parts import PageParts, Part
from megatron_hybrid.kernels.contract import FP8
from megatron_hybrid.layers.inputs import KVSpec, LayerCaches, StateSpec, allocate_caches

BLOCKS, SIZE, SLOTS, PACKED, VOCABULARY = 9, 4, 5, 4, 11
STATES = {
    "mamba2": StateSpec((6, 3), torch.bfloat16, (2, 4, 8), torch.float32, 4),
    "short convolution": StateSpec((5, 2), torch.bfloat16, (0,), torch.float32, 1),
}


def tensors(caches: LayerCaches) -> list[torch.Tensor]:
    """[blocks or slots, ...] each; of blocks first."""
    kv = [t for cache in caches.kv.values() for t in (cache.key, cache.value)]
    if not caches.packed:
        return kv + [t for one in caches.state.values() for t in (one.conv, one.ssm)]
    parts = [t for one in caches.packed for t in (one.conv, one.values, one.scales)]
    return kv + [layer for part in parts if part is not None for layer in part]


def make_caches(kinds: list[str], kv: torch.dtype | None, packed: torch.dtype | None):
    specs = {} if kv is None else {10 + i: KVSpec(2, 3, kv) for i in range(2)}
    caches = allocate_caches(
        specs, {i: STATES[kind] for i, kind in enumerate(kinds)}, BLOCKS, SIZE, SLOTS,
        torch.device("cpu"), VOCABULARY, num_packed=PACKED if packed else 0, packed_dtype=packed,
    )  # fmt: skip
    generator = np.random.default_rng(0)
    for tensor in [*tensors(caches), caches.end_logits]:
        if tensor.numel():
            bits = generator.integers(0, 255, tensor.numel() * tensor.itemsize, dtype=np.uint8)
            tensor.view(torch.uint8).view(-1).copy_(torch.from_numpy(bits))
    return caches


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("packed", [None, torch.int8, torch.bfloat16])
@pytest.mark.parametrize("kv", [torch.float32, torch.bfloat16, FP8, None])
@pytest.mark.parametrize(
    "kinds", [["mamba2", "mamba2"], ["mamba2", "short convolution"], ["short convolution"], []]
)
def test_blocks_and_states_come_back_to_other_places(
    kinds: list[str], kv: torch.dtype | None, packed: torch.dtype | None
) -> None:
    if not kinds and (kv is None or packed is not None):
        pytest.skip("there is nothing to copy")
    caches = make_caches(kinds, kv, packed)
    num_kv = len(caches.kv) * 2
    block_bytes = sum(t[0].numel() * t.itemsize for t in tensors(caches)[:num_kv])
    state_bytes = sum(t[0].numel() * t.itemsize for t in tensors(caches)[num_kv:])
    state_bytes += 4 * VOCABULARY
    page_bytes = block_bytes or state_bytes
    per_state = -(-state_bytes // page_bytes)
    copier = HostCopier(caches, 40, page_bytes)
    first = SLOTS if packed else 0  # the number of the first slot of cached states
    state_pages = [(7 * i + 3) % 29 + 12 for i in range(per_state)]
    source, goal = 2 + first, 3 + first
    before = [t.clone() for t in tensors(caches)]
    logits = caches.end_logits.clone()
    blocks = [3, 1, 8] if kv is not None else []
    pages = [9, 4, 11][: len(blocks)]
    assert copier.write(Copy(blocks, pages, source, state_pages)).is_done()
    for tensor, old in zip(tensors(caches)[:num_kv], before, strict=False):
        tensor[3] = 0  # what was copied is its own
        assert not torch.equal(tensor[3], old[3])
    there = [5, 2, 6][: len(blocks)]
    assert copier.fetch(Copy(there, pages, goal, state_pages)).is_done()
    for i, (tensor, old) in enumerate(zip(tensors(caches), before, strict=True)):
        places = dict(zip(there, blocks, strict=True)) if i < num_kv else {goal - first: 2}
        for row in range(len(tensor)):
            if i < num_kv and row == 3:
                continue
            assert bits(tensor[row]) == bits(old[places.get(row, row)])
    for slot in range(len(logits)):
        assert bits(caches.end_logits[slot]) == bits(logits[source if slot == goal else slot])


def test_kv_may_be_copied_alone() -> None:
    caches = make_caches(["mamba2"], torch.bfloat16, None)
    before = [t.clone() for t in tensors(caches)]
    copier = HostCopier(caches, 4, SIZE * 2 * 2 * 2 * 2 * 3)
    copier.write(Copy([1, 2], [4, 1], 0, []))
    copier.fetch(Copy([7, 8], [1, 4], 0, []))
    for tensor, old in zip(tensors(caches)[:4], before, strict=False):
        assert bits(tensor[7]) == bits(old[2]) and bits(tensor[8]) == bits(old[1])
    for tensor, old in zip(tensors(caches)[4:], before[4:], strict=True):
        assert bits(tensor) == bits(old)


def move(copies: Copies) -> None:
    """In place of CUDA."""
    assert copies.dtype == COPY
    for one in copies:
        for row in range(int(one["rows"])):
            places = (int(at["address"] + row * at["pitch"]) for at in (one["to"], one["source"]))
            ctypes.memmove(*places, int(one["width"]))


@pytest.mark.parametrize("words", [55, 13, 11, 60])
def test_rows_that_are_copied_by_themselves_come_to_their_places(words: int) -> None:
    """words: of a page."""
    widths, first = (5, 7, 3, 40), 2
    starts = np.cumsum([0, *widths]).tolist()
    parts = [
        Part(torch.randint(0, 1000, (10, width)), start, first)
        for width, start in zip(widths, starts, strict=False)
    ]
    pages = torch.zeros(12, words, dtype=torch.int64)
    rows = LongRows(parts, pages)
    places = [3, 9, 10, 5, 1][: -(-55 // words)]
    move(rows.of_state(4 + first, places, to_host=True))
    wanted = torch.cat([part.rows[4] for part in parts])
    assert torch.equal(torch.cat([pages[place] for place in places])[:55], wanted)
    before = [part.rows.clone() for part in parts]
    move(rows.of_state(6 + first, places, to_host=False))
    for part, old in zip(parts, before, strict=True):
        old[6] = old[4]
        assert torch.equal(part.rows, old)
    if words < 55:
        return
    blocks, there = [3, 4, 9, 5, 6, 7, 8, 2], [7, 1, 2, 4, 5, 9, 10, 11]
    move(rows.of_blocks(blocks, there, to_host=True))
    for block, page in zip(blocks, there, strict=True):
        assert torch.equal(pages[page, :55], torch.cat([part.rows[block] for part in parts]))
    before = [part.rows.clone() for part in parts]
    move(rows.of_blocks([0, 1, 2, 4], [9, 10, 11, 7], to_host=False))
    for part, old in zip(parts, before, strict=True):
        old[[0, 1, 2, 4]] = old[[7, 8, 2, 3]]
        assert torch.equal(part.rows, old)


def test_what_lies_side_by_side_in_both_places_is_one_copy() -> None:
    parts = [
        Part(torch.zeros(10, width, dtype=torch.int64), start) for width, start in ((4, 0), (6, 4))
    ]
    rows = LongRows(parts, torch.zeros(12, 10, dtype=torch.int64))
    found = rows.of_blocks([2, 3, 4, 7, 8, 6], [5, 6, 7, 8, 10, 11], to_host=True)
    assert found["rows"].tolist() == [3, 3, 1, 1, 1, 1, 1, 1]
    rows = LongRows(parts, torch.zeros(12, 3, dtype=torch.int64))
    for pages, widths in (
        ([1, 2, 3, 4], [4, 6]),
        ([1, 2, 4, 5], [4, 2, 4]),
        ([4, 2, 7, 5], [3, 1, 2, 3, 1]),
    ):
        found = rows.of_state(1, pages, to_host=False)
        assert (found["width"] // 8).tolist() == widths


def test_so_many_copies_are_enqueued_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bytes] = []

    def copy(number: int, at: int, flags: int, stream: int) -> int:
        calls.append(ctypes.string_at(at, number * COPY.itemsize))
        return stream

    streams = iter((0, 0, 0, 7))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cudaMemcpy3DBatchAsync=copy))
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=next(streams))
    )
    monkeypatch.setattr(batch_copies, "AT_ONCE", 3)
    parts = [Part(torch.zeros(10, 4, dtype=torch.int64))]
    rows = LongRows(parts, torch.zeros(20, 4, dtype=torch.int64))
    copies = rows.of_blocks(range(1, 9), range(2, 18, 2), to_host=True)
    assert len([*BatchCopies().enqueue(copies)]) == 3
    assert [len(call) // COPY.itemsize for call in calls] == [3, 3, 2]
    assert b"".join(calls) == copies.tobytes()
    with pytest.raises(RuntimeError, match="3 copies could not be enqueued: CUDA's error 7"):
        next(BatchCopies().enqueue(copies))


@pytest.mark.parametrize("width", [LONG_ROW // 8 - 1, LONG_ROW // 8])
def test_short_rows_are_gathered(width: int) -> None:
    parts = [Part(torch.zeros(2, width, dtype=torch.int64), 0)]
    pages = torch.zeros(2, width, dtype=torch.int64)
    assert (LongRows.of(parts, pages) is not None) == (width * 8 >= LONG_ROW)
    assert LongRows.of([], pages) is None


def test_a_rank_without_any_layer_of_a_kind_has_pages_all_the_same() -> None:
    """A stage of a pipeline: its pages are numbered as the others', and small."""
    caches = allocate_caches({}, {}, 4, 16, 4, torch.device("cpu"))
    assert PageParts.of(caches).page_bytes(3) == 8
    copier = HostCopier(caches, 6, 8)
    copier.write(Copy([1, 2], [3, 4], 1, [5, 6]))
    copier.fetch(Copy([1, 2], [3, 4], 1, [5, 6]))
    caches = allocate_caches(
        {}, {0: StateSpec((4, 3), torch.float32, (2, 8, 5), torch.float32, 16)}, 4, 16, 4,
        torch.device("cpu"), 10,
    )  # fmt: skip
    state = 4 * (4 * 3 + 2 * 8 * 5 + 10)
    assert PageParts.of(caches).page_bytes(3) == math.ceil(state / 3 / 8) * 8
