"""PrefixTree: prompts by their block keys, to find where others leave one of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.engine.tracked_request import TrackedRequest


@dataclass(slots=True, eq=False)
class _Node:
    """Blocks [start, end) of `keys`, which follow the parent's and which all below have."""

    parent: _Node | None
    keys: Sequence[BlockKey]  # some request's; never copied
    start: int
    end: int
    children: dict[BlockKey, _Node] = field(default_factory=dict)  # by the first block
    requests: dict[TrackedRequest, None] = field(default_factory=dict)  # which end here

    def shares(self, keys: Sequence[BlockKey]) -> int:
        """Blocks that a sequence, which has the first one of this node, shares with it. Keys are
        chained: one that is equal says the same of all before it."""
        end = min(self.end, len(keys))
        differ = range(self.start + 1, end)
        return self.start + 1 + bisect_left(differ, True, key=lambda i: self.keys[i] != keys[i])


class PrefixTree:
    """What requests have in common in whole blocks. Adding one takes time that grows with the
    places where others part from it, not with its length."""

    def __init__(self) -> None:
        self._root = _Node(None, (), 0, 0)
        self._node_of: dict[TrackedRequest, _Node] = {}

    def __len__(self) -> int:
        return len(self._node_of)

    def add(self, request: TrackedRequest, keys: Sequence[BlockKey]) -> None:
        """Add a request with the keys of its full blocks, which may grow but not change."""
        node, length = self._root, len(keys)
        while node.end < length:
            start = node.end
            child = node.children.get(keys[start])
            if child is None:
                child = node.children[keys[start]] = _Node(node, keys, start, length)
            elif (shared := child.shares(keys)) < child.end:
                child = self._split(child, shared)
            node = child
        node.requests[request] = None
        self._node_of[request] = node

    def remove(self, request: TrackedRequest) -> None:
        """Forget a request, if it is here."""
        node = self._node_of.pop(request, None)
        if node is None:
            return
        del node.requests[request]
        while not node.requests and not node.children and node.parent is not None:
            del node.parent.children[node.keys[node.start]]
            node = node.parent

    def leavers(
        self, keys: Sequence[BlockKey], first: int
    ) -> Iterator[tuple[int, Iterator[TrackedRequest]]]:
        """Where requests leave the sequence that has these keys, at its block `first` or behind:
        (blocks in common, those that have no more). Each place once, ascending."""
        node, shared = self._root, 0
        while True:
            following = node.children.get(keys[shared]) if shared < len(keys) else None
            if shared >= first:
                yield shared, _below(node, following)
            if following is None:
                return
            shared = following.shares(keys)
            if shared < following.end:
                if shared >= first:
                    yield shared, _below(following, None)
                return
            node = following

    @staticmethod
    def _split(node: _Node, end: int) -> _Node:
        """Part a node's blocks at `end`; returns the upper part."""
        assert node.parent is not None
        upper = _Node(node.parent, node.keys, node.start, end)
        node.parent.children[node.keys[node.start]] = upper
        upper.children[node.keys[end]] = node
        node.parent, node.start = upper, end
        return upper


def _below(node: _Node, but: _Node | None) -> Iterator[TrackedRequest]:
    """The requests of a node and of all below it, but for those below one child."""
    path = [iter([node])]
    while path:
        here = next(path[-1], None)
        if here is None:
            path.pop()
        elif here is not but:
            yield from here.requests
            path.append(iter(here.children.values()))
