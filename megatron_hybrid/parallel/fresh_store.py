"""A part of torchrun's key-value store that no earlier start of the same ranks has written to.

torchrun's agent keeps one store for as long as it lives, and torch's process groups write their
ranks' addresses under the same keys after each restart: a rank that is a little early finds the
addresses of processes that are dead, and hangs. The number of restarts is no way out:
with several nodes each agent counts its own. So the ranks agree on a name: rank 0 calls the roll
until everybody who has answered is alive.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.rank_layout import RankLayout

ROLL, NONCE, HERE, GO = "roll", "nonce", "here", "go"
FIRST_PAUSE, LONGEST_PAUSE = 0.005, 0.2  # seconds between two looks


def fresh_prefix(layout: RankLayout, name: str, timeout: timedelta) -> tuple[dist.Store, str]:
    """torchrun's store, and a prefix in it for what is called `name`, which the ranks of the
    lockstep group have for this start of theirs. Waits until all of them are here."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timeout))
    group = f"{name}_{layout.lockstep_index}"
    rank, size = layout.lockstep_rank, layout.sizes.lockstep_group
    start = agree_on_prefix(dist.PrefixStore(group, store), rank, size, timeout)
    return store, f"{group}/{start}"


def agree_on_prefix(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """A prefix for `store` that the `size` ranks that live now, and nobody before them, have.

    Every rank writes a random nonce; rank 0 publishes the list of nonces as it finds them. Only a
    rank that finds its own there says that it is here, and rank 0 waits for all. A dead rank's
    nonce is never answered for, and when its successor comes the list is another one.

    Raises ConfigurationError that names the ranks that did not come in time.
    """
    nonce = uuid.uuid4().hex
    store.set(f"{NONCE}/{rank}", nonce)
    deadline = time.monotonic() + timeout.total_seconds()
    pause = FIRST_PAUSE
    while True:
        name = _call_roll(store, size) if rank == 0 else _answer(store, rank, nonce)
        if name is not None:
            return name
        if time.monotonic() > deadline:
            raise ConfigurationError(_missing(store, size, timeout))
        time.sleep(pause)
        pause = min(1.5 * pause, LONGEST_PAUSE)


def _call_roll(store: dist.Store, size: int) -> str | None:
    """Rank 0's turn: the name, once every rank is here."""
    keys = [f"{NONCE}/{rank}" for rank in range(size)]
    if not store.check(keys):
        return None
    nonces = b" ".join(store.get(key) for key in keys)
    name = _name(nonces)
    others = [f"{HERE}/{name}/{rank}" for rank in range(1, size)]
    if not store.check([ROLL]) or store.get(ROLL) != nonces:
        store.set(ROLL, nonces.decode())
    if others and not store.check(others):
        return None
    store.set(f"{GO}/{name}", "")
    return name


def _answer(store: dist.Store, rank: int, nonce: str) -> str | None:
    """Another rank's turn: the name, once rank 0 has found everybody."""
    if not store.check([ROLL]):
        return None
    nonces = store.get(ROLL)
    if nonce.encode() not in nonces.split():
        return None  # the list of an earlier start, or one with our predecessor
    name = _name(nonces)
    store.set(f"{HERE}/{name}/{rank}", "")
    return name if store.check([f"{GO}/{name}"]) else None


def _name(nonces: bytes) -> str:
    return "start_" + hashlib.blake2b(nonces, digest_size=8).hexdigest()


def _missing(store: dist.Store, size: int, timeout: timedelta) -> str:
    seconds = timeout.total_seconds()
    if store.check([ROLL]):
        name = _name(store.get(ROLL))
        keys = [f"{HERE}/{name}/{rank}" for rank in range(1, size)]
    else:
        keys = [f"{NONCE}/{rank}" for rank in range(size)]
    missing = [key.rpartition("/")[2] for key in keys if not store.check([key])]
    return (
        f"Rank(s) {', '.join(missing) or '0'} of the lockstep group did not come within "
        f"{seconds:.0f} seconds; their logs say why."
    )
