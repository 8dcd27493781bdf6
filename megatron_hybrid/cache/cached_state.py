"""CachedState: one recurrent state that is kept for reuse, and its place among the others."""

from __future__ import annotations

from megatron_hybrid.cache.block_hash import BlockKey


class CachedState:
    """The state after `position` tokens of a sequence.

    States form a tree: a state's parent is one that stands earlier on the same sequence. A state
    that was evicted stays in its children's `parent` until somebody asks for their ancestor, so
    an eviction touches no other state.
    """

    __slots__ = (
        "alive", "born", "children", "continued", "fork", "group", "has_logits", "hits", "key",
        "kind", "last_use", "parent", "pause", "position", "runners", "slot", "turn", "used_at",
    )  # fmt: skip

    def __init__(
        self,
        key: BlockKey,
        position: int,
        kind: str,
        parent: CachedState | None = None,
        has_logits: bool = False,
    ) -> None:
        self.key = key  # of the tokens that it has seen
        self.position = position  # how many they are
        self.kind = kind  # why it was placed there: see checkpoint_placement
        self.slot = 0
        self.has_logits = has_logits  # the slot also holds the logits after its last token
        self.parent = parent
        self.children = 0  # cached states whose nearest cached ancestor this is
        self.hits = 0
        self.last_use = 0
        self.alive = False  # in the pool
        self.runners = 0  # running requests that went on from here and left nothing further on
        self.used_at = 0  # step of the last use
        self.turn = 0  # how often its conversation has gone on from a cached answer
        self.pause = 0  # steps before it last did
        self.fork: CachedState | None = None  # nearest shared beginning
        self.born = 0  # of a fork: first answers that ended behind it
        self.continued = 0  # of those, how many went on
        self.group = ("", 0, 0)  # of the reuse estimator

    def ancestor(self) -> CachedState | None:
        """The nearest state before it that is still cached; None at the sequence's beginning."""
        found = self.parent
        while found is not None and not found.alive:
            found = found.parent
        node: CachedState | None = self  # compress the path: the next call is one step
        while node is not None and node.parent is not found:
            node.parent, node = found, node.parent
        return found

    @property
    def replay_tokens(self) -> int:
        """Tokens to compute again if it is lost and wanted."""
        ancestor = self.ancestor()
        return self.position - (0 if ancestor is None else ancestor.position)

    def join(self) -> None:
        """It is cached from now on."""
        self.alive = True
        if (ancestor := self.ancestor()) is not None:
            ancestor.children += 1

    def leave(self) -> CachedState | None:
        """It is cached no more; its children are its ancestor's from now on. Returns that one."""
        self.alive = False
        ancestor = self.ancestor()
        if ancestor is not None:
            ancestor.children += self.children - 1
        self.children = 0
        return ancestor
