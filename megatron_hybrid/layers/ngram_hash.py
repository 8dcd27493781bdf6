"""Which rows of a table the n-grams that end at a token have (Qwen4's n-gram embeddings): each has
several, by hashes of their token ids, as transformers' Qwen4ExpTextNGramEmbedding draws them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count, islice

import torch
from torch import Tensor

ID_BYTES = 3  # of a token id
_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_SEED_STEP = 10007  # from one layer's to the next one's


@dataclass(frozen=True)
class NGramHashes:
    """`heads` hashes for each length from 2 to `size`, whose rows are in a part of the table for
    each hash, as large as a prime number from `least_rows` on: of the layer `index`, those behind
    the primes of the layers before. A text begins behind every `end` token, and before it there
    are only such."""

    index: int
    size: int
    heads: int
    least_rows: int
    vocab_size: int
    seed: int
    end: int

    @cached_property
    def multipliers(self) -> list[int]:
        """Of token ids, by how far they are back: odd, by splitmix64 (Steele, Lea, Flood 2014)."""
        half = max(1, (2**63 - 1) // max(self.vocab_size, 1) // 2)
        seed = self.seed + _SEED_STEP * self.index
        return [
            2 * (_splitmix64((seed + _GAMMA * (lag + 1)) & _MASK) % half) + 1
            for lag in range(self.size)
        ]

    @cached_property
    def rows(self) -> list[int]:
        """Of each hash."""
        each = (self.size - 1) * self.heads
        return list(islice(_primes(self.least_rows), each * self.index, each * (self.index + 1)))

    @cached_property
    def starts(self) -> list[int]:
        """The first row of each hash."""
        return [0, *accumulate(self.rows[:-1])]

    def constants(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Multipliers, rows and starts, int64 on a device."""
        kinds = self.multipliers, self.rows, self.starts
        multipliers, rows, starts = (torch.tensor(kind, device=device) for kind in kinds)
        return multipliers, rows, starts

    def as_bytes(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens] -> [tokens, ID_BYTES] numbers up to 255, which every type holds exactly: zeros
        are the `end` token, so that a window of zeros is what is before a text."""
        ids = token_ids.long() ^ self.end
        return torch.stack([(ids >> 8 * i) & 255 for i in range(ID_BYTES)], dim=1).to(dtype)

    def places(self, token_ids: Tensor, before: Tensor, constants: tuple[Tensor, ...]) -> Tensor:
        """token_ids [tokens], and `as_bytes` of the tokens 1, 2 ... size - 1 `before` each,
        [tokens, (size - 1) * ID_BYTES] -> rows of the table [tokens, (size - 1) * heads]."""
        multipliers, rows, starts = constants
        bytes_of = before.long().unflatten(1, (self.size - 1, ID_BYTES)).unbind(2)
        ids = bytes_of[0]
        for i, byte in enumerate(bytes_of[1:], 1):
            ids = ids | (byte << 8 * i)
        # Behind an `end` token nothing of what was before it is seen.
        ids = (ids * (ids != 0).long().cumprod(1)) ^ self.end
        mixed = token_ids.long() * multipliers[0]
        found = []
        for lag in range(1, self.size):
            mixed = mixed ^ (ids[:, lag - 1] * multipliers[lag])
            found.append(mixed)
        each = torch.stack(found, dim=1).repeat_interleave(self.heads, dim=1)
        return each.remainder(rows) + starts


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _primes(least: int) -> Iterator[int]:
    """From `least` on, in order."""
    for number in count(max(least, 2)):
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number
