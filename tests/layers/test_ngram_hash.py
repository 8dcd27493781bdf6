"""Rows of n-grams against transformers' Qwen4ExpTextNGramEmbedding."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp as theirs

from megatron_hybrid.layers.ngram_hash import ID_BYTES, NGramHashes

END = 70_001  # more than one byte of it is not zero


class Places(nn.Module):
    """In the place of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))

    def forward(self, places: Tensor) -> Tensor:
        return places


def made(size: int, index: int, seed: int) -> tuple[NGramHashes, nn.Module]:
    hashes = NGramHashes(index, size, 3, 1000, 248_320, seed, END)
    config = Qwen4ExpTextConfig(
        vocab_size=248_320, ngram_size=size, heads_per_ngram=3, ngram_vocab_size_base=1000,
        seed=seed, eos_token_id=END,
    )  # fmt: skip
    module = theirs.Qwen4ExpTextNGramEmbedding(config, 6 * (size - 1), 0, index)
    module.ngram_embedding = Places()  # type: ignore[assignment]
    return hashes, module


def text_with_ends(count: int) -> list[int]:
    draw = random.Random(count)
    return [END if draw.random() < 0.25 else draw.randrange(248_320) for _ in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "index", "seed"), [(2, 0, 1234), (3, 2, 7), (5, 1, 0)])
def test_rows_are_transformers(size: int, index: int, seed: int, dtype: torch.dtype) -> None:
    """... also around ends of texts, one behind another; what is before a text is zeros."""
    hashes, module = made(size, index, seed)
    ids = torch.tensor(text_with_ends(200))
    assert int((ids == END).sum()) > 20
    own = hashes.as_bytes(ids, dtype)
    padded = torch.cat([own.new_zeros((size - 1, ID_BYTES)), own])
    before = [padded[size - 1 - lag : len(padded) - lag] for lag in range(1, size)]
    found = hashes.places(ids, torch.cat(before, dim=1), hashes.constants(ids.device))
    expected = module(ids[None], None).view(len(ids), -1)  # as rows are flattened
    assert torch.equal(found, expected)
    assert len(set(found[:, 0].tolist())) > 50


def test_the_primes_of_the_released_model() -> None:
    """Also those of a second layer of embeddings, which begin behind the first one's."""
    first, second = (NGramHashes(i, 3, 8, 20_000_000, 248_320, 1234, 248_044) for i in range(2))
    assert len(first.rows) == len(second.rows) == 16 and first.rows == sorted(first.rows)
    assert first.rows[-1] == theirs._find_nth_prime_after(20_000_000 - 1, 16)
    assert second.rows[0] == theirs._find_nth_prime_after(first.rows[-1], 1)
    # 128 shards of 2,500,012 rows
    assert -(-sum(first.rows) // 128) * 128 == 320_001_536
