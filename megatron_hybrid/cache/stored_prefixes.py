"""StoredPrefixes: what prefixes leave in an ObjectStore, and how they are found there again.

Three kinds of objects, each under a digest of its kind, of `root` (all that bytes depend on besides
tokens) and of a prefix's key:

    KV       of a block, or of the tokens behind the last full one
    STATE    after a prefix, with the logits that go with it
    ENDINGS  a list of the states behind a full block, since nobody can ask for unknown tokens

An ending is written last, so whoever finds one may expect the rest; but each object may go by
itself, and then the prefix is a miss. Two writers of one list may lose an ending, which is a miss,
too. All of this runs beside the engine, in threads: it touches nothing of the engine's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

from megatron_hybrid.cache.block_hash import BlockKey, SequenceKeys
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.object_store import ObjectStore
from megatron_hybrid.cache.tail_index import is_usable

KV, STATE, ENDINGS = b"kv", b"state", b"endings"
MOST_ENDINGS = 64  # behind one block: the newest

Views = Sequence[memoryview]


class Ending(NamedTuple):
    """A prefix that can be gone on from, as JSON."""

    fill: int  # tokens behind the last full block
    key: str  # of the prefix
    has_state: bool
    has_logits: bool
    kind: str
    turn: int
    pause: int


class Found(NamedTuple):
    """How far a prompt is there."""

    position: int
    ending: Ending | None  # None: nothing but KV is needed, or there
    place: Any = None  # where it lies, for who has found it


class Stored(NamedTuple):
    """A prefix to write, or to read: the keys of its KV, in order, and its own."""

    root: bytes
    kv: list[BlockKey]
    parent: BlockKey  # of the last full block
    end: BlockKey
    place: Any = None  # of Found


class Wanted(NamedTuple):
    """Of a prompt of `length` tokens."""

    root: bytes
    keys: SequenceKeys  # nobody else's
    first: int  # blocks that need not be there
    beyond: int  # tokens that need not be computed anyway
    length: int
    most: int | None = None  # see PrefixMatch
    peer: str = ""  # that has computed it


class Prefixes(Protocol):
    """What lies below the host memory of one engine. Its methods are called by threads beside the
    engine's, and raise StoreError."""

    name: str  # in figures
    max_bytes: int  # 0: it does not say
    pause: float  # seconds without it after it failed
    patience: float  # seconds that a request waits for an answer, and for a read besides its time
    writes: bool  # whether what is in host memory is written to it
    # Whether what is there is read even where computing it would be quicker.
    is_always_read: bool

    def is_asked(self, peer: str) -> bool:
        """Whether it may have something of a prompt. Quick. peer: see Wanted."""

    def find(self, wanted: Wanted) -> Found | None:
        """The furthest place from which the prompt can go on, past `beyond`; None: there is
        none."""

    def follow(
        self, peer: str, request: str, kv: list[BlockKey], first: int
    ) -> Future[Found | None]:
        """What there is of a prompt while a peer's request computes it, as soon as there is
        something: KV, of more than its first blocks; at 0 nothing new yet. None: the request has
        ended. Quick: the engine's thread calls it."""

    def read(self, stored: Stored, blocks: Sequence[Views], state: Views) -> bool:
        """Fill the memory of the last blocks of KV, and of a state if there is any; whether all of
        it was there."""

    def ended(self, place: Any) -> None:
        """What was found is not read any more, on any rank, or never was."""

    def write(
        self, stored: Stored, blocks: Sequence[Views], state: Views, ending: Ending
    ) -> int | None:
        """Write what is not there yet, all of the blocks being given. Bytes that it took; None:
        there is no room."""

    def usage(self) -> tuple[int, int]:
        """See ObjectStore."""

    def close(self) -> None:
        """It is not called any more."""


class StoredPrefixes:
    """In one store, of engines with caches of one shape."""

    pause, patience, writes, is_always_read = 10.0, 1.0, True, False

    def __init__(self, store: ObjectStore, geometry: CacheGeometry) -> None:
        self.store, self._geometry = store, geometry
        self.name, self.max_bytes = store.name, store.max_bytes

    def is_asked(self, peer: str) -> bool:
        """Any prompt may be there."""
        return True

    def find(self, wanted: Wanted) -> Found | None:
        """As Prefixes."""
        root, keys, first, beyond, length, most, _ = wanted
        geometry, store = self._geometry, self.store
        size, needs_state = geometry.block_size, geometry.has_recurrent
        last = length if most is None else min(most, length)
        keys.extend_to(last)
        full = last // size
        if geometry.has_attention and full > first:
            there = store.has([_name(root, KV, key) for key in keys.blocks[first:full]])
            full = first + (there.index(False) if False in there else len(there))
        counts = range(full, beyond // size - 1, -1)
        lists = [_name(root, ENDINGS, keys.of_block(count)) for count in counts]
        for count, name, is_there in zip(counts, lists, store.has(lists), strict=True):
            for ending in self._endings(name) if is_there else ():
                position = count * size + ending.fill
                if beyond < position <= last and self._can_go_on(
                    root, keys, position, length, ending
                ):
                    return Found(position, ending)
            if not needs_state and beyond < count * size < length:
                return Found(count * size, None)
        return None

    def follow(
        self, peer: str, request: str, kv: list[BlockKey], first: int
    ) -> Future[Found | None]:
        """Nobody computes anything for it."""
        nothing: Future[Found | None] = Future()
        nothing.set_result(None)
        return nothing

    def read(self, stored: Stored, blocks: Sequence[Views], state: Views) -> bool:
        """As Prefixes."""
        root, get = stored.root, self.store.get
        missing = stored.kv[len(stored.kv) - len(blocks) :]
        for key, views in zip(missing, blocks, strict=True):
            if not get(_name(root, KV, key), views):
                return False
        return not state or get(_name(root, STATE, stored.end), state)

    def write(
        self, stored: Stored, blocks: Sequence[Views], state: Views, ending: Ending
    ) -> int | None:
        """As Prefixes."""
        root, store = stored.root, self.store
        names = [_name(root, KV, key) for key in stored.kv]
        objects = list(zip(names, blocks, strict=True))
        if state:
            objects.append((_name(root, STATE, stored.end), state))
        there = store.has([name for name, _ in objects])
        written = 0
        for (name, views), is_there in zip(objects, there, strict=True):
            if not is_there:
                if not store.put(name, views):
                    return None
                written += sum(view.nbytes for view in views)
        name = _name(root, ENDINGS, stored.parent)
        others = [one for one in self._endings(name) if one.key != ending.key]
        listed = [ending, *others][:MOST_ENDINGS]
        return written if store.put(name, [json.dumps(listed).encode()]) else None

    def ended(self, place: Any) -> None:
        """There is nothing to give back."""

    def usage(self) -> tuple[int, int]:
        """Of the store."""
        return self.store.usage()

    def close(self) -> None:
        """The store, too."""
        self.store.close()

    def _endings(self, name: bytes) -> list[Ending]:
        """Those with the most tokens first; what can't be read is none."""
        data = self.store.read(name)
        try:
            found = [Ending(*row) for row in json.loads(data or b"[]")]
        except (ValueError, TypeError):
            return []
        return sorted(found, key=lambda ending: -ending.fill)

    def _can_go_on(
        self, root: bytes, keys: SequenceKeys, position: int, length: int, ending: Ending
    ) -> bool:
        geometry = self._geometry
        key = keys.at(position)
        if ending.key != key.hex():
            return False
        state = ending if ending.has_state else None
        if not is_usable(state, position, length, needs_state=geometry.has_recurrent):
            return False
        wanted = [_name(root, STATE, key)] if ending.has_state else []
        if ending.fill and geometry.has_attention:
            wanted.append(_name(root, KV, key))
        return all(self.store.has(wanted))


def _name(root: bytes, kind: bytes, key: BlockKey) -> bytes:
    return blake2b(kind + b":" + key, key=root, digest_size=16).digest()
