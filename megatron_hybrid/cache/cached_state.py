"""CachedState: one recurrent state that is kept for reuse, and its place among the others."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hybrid.cache.block_hash import BlockKey
from megatron_hybrid.cache.checkpoint_placement import SHARED_KINDS


@dataclass(slots=True, eq=False, repr=False)
class CachedState:
    """The state after `position` tokens of a sequence.

    States form a tree: a state's parent is one that stands earlier on the same sequence. A state
    that was evicted stays in its children's `parent` until somebody asks for their ancestor, so
    an eviction touches no other state.
    """

    key: BlockKey  # of the tokens that it has seen
    position: int  # how many they are
    kind: str  # why it was placed there: see checkpoint_placement
    parent: CachedState | None = None
    has_logits: bool = False  # the slot also holds the logits after its last token
    slot: int = 0
    children: int = 0  # cached states whose nearest cached ancestor this is
    hits: int = 0
    last_use: int = 0
    alive: bool = False  # in the pool
    runners: int = 0  # running requests that went on from here and left nothing further on
    users: int = 0  # running requests that read or left it; only under ref_zero
    used_at: int = 0  # step of the last use
    turn: int = 0  # how often its conversation has gone on from a cached answer
    pause: int = 0  # steps before it last did
    fork: CachedState | None = None  # nearest shared beginning
    born: int = 0  # of a fork: first answers that ended behind it
    continued: int = 0  # of those, how many went on
    group: tuple[str, int, int] = ("", 0, 0)  # of the reuse estimator
    # Where it is kept elsewhere, too: tokens that could be computed while it comes. 0: it is not.
    fetch_tokens: int = 0
    window: tuple[int, ...] = ()  # blocks that layers with a sliding window read behind it

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
    def is_shared(self) -> bool:
        """Whether other sequences branch off here: it is worth keeping beside those behind it."""
        return self.kind in SHARED_KINDS or self.hits > 1

    @property
    def replay_tokens(self) -> int:
        """Tokens to compute again if it is lost and wanted, or the time of so many."""
        ancestor = self.ancestor()
        tokens = self.position - (0 if ancestor is None else ancestor.position)
        return min(tokens, self.fetch_tokens) if self.fetch_tokens else tokens

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
