"""Keys of prefixes: chained digests of every token so far.

The key of block i is H(key of block i - 1, tokens of block i), so equal keys mean equal prefixes.
A prefix that ends inside a block has a key too, H(key of the last full block, the tokens after it):
fewer tokens go in than for a block, so it can't be taken for a block's. The root stands for
everything besides tokens that a cached value depends on: the weights' epoch, the caller's salt, the
adapter and the types that values are stored in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

DIGEST_SIZE = 16  # bytes; 128 bits, compared in full by the dictionaries that hold the keys

BlockKey = bytes
Tokens = npt.NDArray[np.int32]


def root_key(
    model_epoch: int, cache_salt: str = "", adapter: str = "", stored_as: str = ""
) -> BlockKey:
    """The key that the first block of a sequence is chained to."""
    digest = blake2b(digest_size=DIGEST_SIZE)
    for part in (str(model_epoch), cache_salt, adapter, stored_as):
        # "surrogatepass" only so that no salt can raise here
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def extend_keys(parent: BlockKey, tokens: Tokens, block_size: int) -> list[BlockKey]:
    """Keys of the full blocks of `tokens`, which continue the sequence that ends at `parent`."""
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    stride = 4 * block_size
    keys = []
    for end in range(stride, len(data) + 1, stride):
        parent = blake2b(parent + data[end - stride : end], digest_size=DIGEST_SIZE).digest()
        keys.append(parent)
    return keys


@dataclass(slots=True, eq=False)
class SequenceKeys:
    """The keys of one sequence that may grow."""

    root: BlockKey
    block_size: int
    # [end - start] the sequence's tokens from start to end; asked for each once, and again for the
    # few behind the last full block
    tokens: Callable[[int, int], Tokens]
    blocks: list[BlockKey] = field(default_factory=list)  # of full blocks so far
    _: KW_ONLY
    # what the root was made of, for those who are told of the cache's contents
    cache_salt: str = ""
    adapter: str = ""
    _partial: dict[int, BlockKey] = field(default_factory=dict)  # by position inside a block

    @property
    def known(self) -> int:
        """Tokens in the blocks whose keys are known."""
        return len(self.blocks) * self.block_size

    def copy_for(
        self, tokens: Callable[[int, int], Tokens], length: int | None = None
    ) -> SequenceKeys:
        """The keys of another sequence that begins with the same tokens; `length` of them (None:
        all)."""
        return SequenceKeys(
            self.root,
            self.block_size,
            tokens,
            self.blocks[: None if length is None else length // self.block_size],
            cache_salt=self.cache_salt,
            adapter=self.adapter,
        )

    def extend_to(self, position: int) -> None:
        """Know the keys of all full blocks below `position`."""
        size, known = self.block_size, len(self.blocks)
        full = position // size
        if full > known:
            parent = self.blocks[-1] if known else self.root
            self.blocks += extend_keys(parent, self.tokens(known * size, full * size), size)

    def of_block(self, count: int) -> BlockKey:
        """The key of the first `count` blocks, which are known; the root for none."""
        return self.blocks[count - 1] if count else self.root

    def at(self, position: int) -> BlockKey:
        """The key of the first `position` tokens."""
        count, rest = divmod(position, self.block_size)
        if count > len(self.blocks):
            self.extend_to(position)
        if not rest:
            return self.of_block(count)
        key = self._partial.get(position)
        if key is None:
            data = self.tokens(position - rest, position).astype("<i4", copy=False).tobytes()
            key = blake2b(self.of_block(count) + data, digest_size=DIGEST_SIZE).digest()
            self._partial[position] = key
        return key
