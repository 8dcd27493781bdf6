"""Keys of blocks: a chained digest of every token up to the block's end.

The key of block i is H(key of block i - 1, tokens of block i), so equal keys mean equal prefixes.
The root stands for everything besides tokens that a cached value depends on: the weights' epoch
and the caller's salt.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

DIGEST_SIZE = 16  # bytes; 128 bits, compared in full by the dictionaries that hold the keys

BlockKey = bytes


def root_key(model_epoch: int, cache_salt: str = "", adapter: str = "") -> BlockKey:
    """The key that the first block of a sequence is chained to."""
    digest = blake2b(digest_size=DIGEST_SIZE)
    for part in (str(model_epoch), cache_salt, adapter):
        # "surrogatepass" only so that no salt can raise here
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def extend_keys(parent: BlockKey, tokens: npt.NDArray[np.int32], block_size: int) -> list[BlockKey]:
    """Keys of the full blocks of `tokens`, which continue the sequence that ends at `parent`."""
    data = np.ascontiguousarray(tokens, dtype="<i4").tobytes()
    stride = 4 * block_size
    keys = []
    for end in range(stride, len(data) + 1, stride):
        parent = blake2b(parent + data[end - stride : end], digest_size=DIGEST_SIZE).digest()
        keys.append(parent)
    return keys
