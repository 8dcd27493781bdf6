from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_hybrid.kernels import paged_attention
from megatron_hybrid.kernels.contract import KVCache, PagedSequences
from tests.kernels.segments import int64, poisoned

HEAD_DIM, BLOCK = 8, 4
SCALE = 0.3


def naive(query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
    """In float64: query [n, heads, dim] from position `start`, key [kv, kv_heads, dim]."""
    repeat = query.shape[1] // key.shape[1]
    k = key.double().repeat_interleave(repeat, 1)
    v = value.double().repeat_interleave(repeat, 1)
    rows = []
    for i, q in enumerate(query.double()):
        seen = start + i + 1
        scores = torch.einsum("hd,khd->hk", q, k[:seen]) * SCALE
        rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), v[:seen]))
    return torch.stack(rows)


def check(
    lengths: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    scattered: bool = True,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 1e-5,
) -> None:
    """`lengths`: (queries, keys) of each sequence. Every place of the cache that holds no token of
    these sequences is NaN."""
    generator = torch.Generator().manual_seed(0)
    blocks_of = [-(-keys // BLOCK) for _, keys in lengths]
    total_blocks = sum(blocks_of) + 1
    order = torch.randperm(total_blocks - 1, generator=generator) + 1
    if not scattered:
        order = torch.arange(1, total_blocks)
    cache = KVCache(
        poisoned(total_blocks, BLOCK, kv_heads, HEAD_DIM, dtype=dtype),
        poisoned(total_blocks, BLOCK, kv_heads, HEAD_DIM, dtype=dtype),
    )
    table = torch.zeros(len(lengths), max(blocks_of) + 1, dtype=torch.int64)
    queries, new_keys, new_values, slots, expected = [], [], [], [], []
    begin = 0
    for row, (n, keys) in enumerate(lengths):
        own = order[begin : begin + blocks_of[row]]
        begin += blocks_of[row]
        table[row, : len(own)] = own
        key = torch.randn(keys, kv_heads, HEAD_DIM, generator=generator).to(dtype)
        value = torch.randn(keys, kv_heads, HEAD_DIM, generator=generator).to(dtype)
        query = torch.randn(n, heads, HEAD_DIM, generator=generator).to(dtype)
        at = own.repeat_interleave(BLOCK)[:keys] * BLOCK + torch.arange(keys) % BLOCK
        past = keys - n
        paged_attention.append(key[:past], value[:past], cache, at[:past])
        queries.append(query)
        new_keys.append(key[past:])
        new_values.append(value[past:])
        slots.append(at[past:])
        if n:
            expected.append(naive(query, key, value, past))
    paged = PagedSequences(
        cu_seqlens=int64([0] + [n for n, _ in lengths]).cumsum(0),
        kv_length=int64([keys for _, keys in lengths]),
        block_table=table,
        kv_slot=torch.cat(slots),
        num_decodes=sum(n == 1 for n, _ in lengths),
    )
    plan = paged_attention.plan(paged, BLOCK, dtype)
    paged_attention.append(torch.cat(new_keys), torch.cat(new_values), cache, plan.kv_slot)
    out = paged_attention.attend(torch.cat(queries), cache, SCALE, plan)
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=tolerance, rtol=tolerance)


def test_decodes_of_different_lengths_share_a_batch() -> None:
    check([(1, 9), (1, 1), (1, 4), (1, 200), (1, 90), (1, 5)])


def test_decodes_of_one_length_need_no_mask() -> None:
    check([(1, 12)] * 3)


@pytest.mark.parametrize("scattered", [True, False])
def test_one_decode_reads_consecutive_or_scattered_blocks(scattered: bool) -> None:
    check([(1, 11)], scattered=scattered)


@pytest.mark.parametrize("scattered", [True, False])
def test_a_first_prefill_is_causal(scattered: bool) -> None:
    check([(10, 10)], scattered=scattered)


def test_a_long_first_prefill_is_causal() -> None:
    check([(1, 6), (150, 150)])


def test_a_continued_prefill_sees_its_past() -> None:
    check([(5, 18)])


@pytest.mark.parametrize("scattered", [True, False])
def test_a_long_continued_prefill_is_tiled(scattered: bool) -> None:
    check([(3, 7), (1200, 1230)], scattered=scattered)


def test_decodes_and_prefills_of_all_lengths_mix() -> None:
    check([(1, 3), (1, 70), (7, 7), (8, 8), (5, 40), (6, 33), (1, 1), (130, 131), (2, 9), (8, 60)])


@pytest.mark.parametrize("scattered", [True, False])
def test_a_segment_may_start_and_end_anywhere(scattered: bool) -> None:
    """At every place of a block, alone and beside all the others."""
    lengths = [(n, start + n) for start in range(2 * BLOCK + 1) for n in range(1, 2 * BLOCK + 2)]
    check(lengths, scattered=scattered)
    for one in lengths:
        check([one], scattered=scattered)


def test_sequences_without_queries_are_skipped() -> None:
    check([(2, 5), (0, 3), (4, 4), (0, 0)])


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 3)])
def test_query_heads_share_key_heads(heads: int, kv_heads: int) -> None:
    check([(1, 6), (1, 9), (3, 8), (5, 5)], heads=heads, kv_heads=kv_heads)


def test_bfloat16_follows_float32() -> None:
    check([(1, 30), (7, 20), (9, 9)], dtype=torch.bfloat16, tolerance=3e-2)


def test_copied_tokens_leave_the_rest_of_a_block_alone() -> None:
    """Two readers of one source; what a source holds past the copied tokens may be anything."""
    generator = torch.Generator().manual_seed(0)
    shape = (5, BLOCK, 2, HEAD_DIM)
    cache = KVCache(torch.randn(shape, generator=generator), poisoned(*shape))
    cache.value[1, :3] = torch.randn(3, 2, HEAD_DIM, generator=generator)
    before = KVCache(cache.key.clone(), cache.value.clone())
    # tokens 0 to 2 of block 1 to block 4, its token 0 to block 2
    paged_attention.copy_tokens(cache, int64([4, 5, 6, 4]), int64([16, 17, 18, 8]))
    for new, old in ((cache.key, before.key), (cache.value, before.value)):
        expected = old.clone()
        expected[4, :3], expected[2, 0] = old[1, :3], old[1, 0]
        assert torch.equal(new.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_masked_writes_leave_shared_blocks_alone() -> None:
    """Tokens of matched blocks are computed again; their writes go to the dummy block 0."""
    cache = KVCache(torch.ones(3, BLOCK, 1, HEAD_DIM), torch.ones(3, BLOCK, 1, HEAD_DIM))
    new = torch.full((3, 1, HEAD_DIM), 7.0)
    paged_attention.append(new, new, cache, int64([0, 1, 9]))
    assert (cache.key[1] == 1).all() and (cache.value[1] == 1).all()
    assert (cache.key[2, 1] == 7).all() and (cache.key[2, 0] == 1).all()
