"""TailIndex: cached prefixes that end inside a block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar

from megatron_hybrid.cache.block_hash import BlockKey

K = TypeVar("K")


class MayHaveLogits(Protocol):
    """A cached state, or what is known of one."""

    @property
    def has_logits(self) -> bool:
        """Whether the logits after its last token are there, too."""


class Fills(dict[K, Counter[int]]):
    """How many tails of which lengths are behind each full block, by its key: what is needed to
    find them without knowing their tokens."""

    def add(self, parent: K, fill: int) -> None:
        """A tail of `fill` tokens is behind the block of `parent` from now on."""
        self.setdefault(parent, Counter())[fill] += 1

    def remove(self, parent: K, fill: int) -> None:
        """Such a tail is there no more."""
        fills = self[parent]
        fills[fill] -= 1
        if not fills[fill]:
            del fills[fill]
            if not fills:
                del self[parent]

    def ends(
        self, beginning: K, blocks: Sequence[K], size: int, key_at: Callable[[int], K], length: int
    ) -> Iterator[tuple[int, K]]:
        """Where a prompt of `length` tokens may be continued, the furthest first, and the key of
        each place: after the `blocks` of `size` tokens (their keys) and after tails behind them.

        beginning: the key of no tokens. key_at: gives the key of a position inside a block.
        """
        for count in range(len(blocks), -1, -1):
            parent = blocks[count - 1] if count else beginning
            if fills := self.get(parent):
                for fill in sorted(fills, reverse=True):
                    if (position := count * size + fill) <= length:
                        yield position, key_at(position)
            if count:
                yield count * size, parent


def is_usable(
    state: MayHaveLogits | None, position: int, length: int, *, needs_state: bool
) -> bool:
    """Whether a prompt of `length` tokens can be continued at `position`, where its KV and `state`
    are cached. At its very end that takes the logits: the last token would be applied to the state
    twice. `needs_state`: the model has recurrent layers."""
    if position == length:
        return state is not None and state.has_logits
    return state is not None or not needs_state


class Tail(NamedTuple):
    """Where a prefix that ends inside a block is kept."""

    parent: BlockKey  # of its last full block, or the root
    fill: int  # tokens after that block
    block: int  # holds their KV; 0 in a model without attention


class TailIndex(dict[BlockKey, Tail]):
    """Tails by their keys, and their `fills`. All calls are O(1)."""

    def __init__(self) -> None:
        super().__init__()
        self.fills: Fills[BlockKey] = Fills()

    def add(self, key: BlockKey, tail: Tail) -> None:
        """Add a tail whose key is new."""
        self[key] = tail
        self.fills.add(tail.parent, tail.fill)

    def remove(self, key: BlockKey) -> Tail | None:
        """Forget a tail and return it; None if there is none."""
        tail = self.pop(key, None)
        if tail is not None:
            self.fills.remove(tail.parent, tail.fill)
        return tail

    def clear(self) -> None:
        """Forget all tails."""
        super().clear()
        self.fills.clear()
