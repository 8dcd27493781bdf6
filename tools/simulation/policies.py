"""The policies that are compared: how each one builds the cache. All run on the same scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron_hybrid.cache.checkpoint_placement import (
    NO_HINTS,
    CheckpointHints,
    CheckpointPlacement,
    PlannedCheckpoint,
)
from megatron_hybrid.cache.eviction import EvictionQueue
from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.cache.replay_cost import ReplayCost
from simulation.baselines import (
    BlockPlacement,
    MarconiPlacement,
    MarconiQueue,
    PeriodicPlacement,
)
from simulation.pools import ModelShape

Build = Callable[[CacheGeometry, ModelShape], HybridCache]

INTERVAL = 1024  # the engine's default


@dataclass(frozen=True, slots=True)
class Policy:
    """`builds`: candidates for the cache, of which the best one is reported, as with splits.
    `cached_dtype`: of cached states, see divide_pool."""

    name: str
    description: str
    builds: tuple[Build, ...]
    twins: bool = True
    cached_dtype: str | None = None


# ------------------------------------------------------------------ ours and what lacks a feature


class _WithoutLookAhead(CheckpointPlacement):
    def for_waiters(
        self, shared: Iterable[tuple[int, int]], reached: int, above: int, prompt_tokens: int
    ) -> list[PlannedCheckpoint]:
        return []


class _WithoutHints(CheckpointPlacement):
    def for_prompt(
        self,
        prompt_tokens: int,
        skip: int,
        matched_tokens: int,
        hints: CheckpointHints = NO_HINTS,
    ) -> list[PlannedCheckpoint]:
        return super().for_prompt(prompt_tokens, skip, matched_tokens)


class _WithoutDivergence(CheckpointPlacement):
    def for_prompt(
        self,
        prompt_tokens: int,
        skip: int,
        matched_tokens: int,
        hints: CheckpointHints = NO_HINTS,
    ) -> list[PlannedCheckpoint]:
        return super().for_prompt(prompt_tokens, skip, skip, hints)


class _WithoutDecode(CheckpointPlacement):
    def decode_position(self, position: int) -> bool:
        return False


class _Untaught(ReplayCost):
    """Takes every state for one that is read the later the older it is."""

    def _count(self, counts: list[float], age: int) -> None:
        pass


def _without_learning(geometry: CacheGeometry, shape: ModelShape) -> HybridCache:
    return HybridCache(geometry, queue=EvictionQueue(_Untaught()))


def _ours(
    placement: type[CheckpointPlacement] = CheckpointPlacement,
    *,
    policy: str = "replay_cost",
    exact_ends: bool = True,
    interval: int = INTERVAL,
) -> tuple[Build]:
    def build(geometry: CacheGeometry, shape: ModelShape) -> HybridCache:
        checkpoints = placement(geometry, exact_ends=exact_ends, interval=interval)
        return HybridCache(geometry, policy=policy, checkpoints=checkpoints)

    return (build,)


# ---------------------------------------------------------------------------------- the others


def _block_lru(geometry: CacheGeometry, shape: ModelShape) -> HybridCache:
    return HybridCache(geometry, policy="lru", checkpoints=BlockPlacement(geometry))


def _periodic(interval: int) -> Build:
    def build(geometry: CacheGeometry, shape: ModelShape) -> HybridCache:
        checkpoints = PeriodicPlacement(geometry, interval)
        return HybridCache(geometry, policy="lru", checkpoints=checkpoints)

    return build


def _marconi(alpha: float) -> Build:
    def build(geometry: CacheGeometry, shape: ModelShape) -> HybridCache:
        queue = MarconiQueue(geometry, shape, alpha)
        return HybridCache(geometry, checkpoints=MarconiPlacement(geometry), queue=queue)

    return build


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("ours", "our placement, replay cost", _ours()),
        Policy("ours-int8", "ours, cached states in int8", _ours(), cached_dtype="int8"),
        Policy("ours-bf16", "ours, cached states in 16 bits", _ours(), cached_dtype="bfloat16"),
        Policy("lru", "our placement, least recently used", _ours(policy="lru")),
        Policy(
            "block-lru",
            "states where prompts part and at their last block, least recently used",
            (_block_lru,),
        ),
        Policy(
            "periodic",
            "a state every 512 or 2048 tokens, least recently used",
            (_periodic(512), _periodic(2048)),
        ),
        Policy(
            "marconi",
            "states where prompts part and after answers, recency + alpha * FLOPs per byte",
            (_marconi(0.0), _marconi(0.5), _marconi(2.0)),
        ),
        Policy("no-twins", "ours, nobody waits for a twin", _ours(), twins=False),
        Policy("no-exact-ends", "ours, states on the grid only", _ours(exact_ends=False)),
        Policy("no-look-ahead", "ours, without a look at who waits", _ours(_WithoutLookAhead)),
        Policy("no-hints", "ours, without the ends of messages", _ours(_WithoutHints)),
        Policy("no-divergence", "ours, no states where prompts part", _ours(_WithoutDivergence)),
        Policy("no-decode", "ours, without states inside answers", _ours(_WithoutDecode)),
        Policy("no-learning", "ours, replay tokens by age alone", (_without_learning,)),
        Policy("no-interval", "ours, without states every 1024 tokens", _ours(interval=0)),
    )
}  # fmt: skip

# what a plain run compares
BASELINES = ("ours", "ours-int8", "lru", "block-lru", "periodic", "marconi")
ABLATIONS = (
    "ours", "lru", "no-twins", "no-exact-ends", "no-look-ahead", "no-hints", "no-divergence",
    "no-decode", "no-interval", "no-learning",
)  # fmt: skip
WORKING_SET_POLICY = "ours"  # whose memory pool sizes are measured by
