"""Engines on the same weights that compute the same requests in other ways."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from megatron_hybrid.cache.geometry import GIB, CacheGeometry
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.build import build_engine
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.models.hybrid_model import HybridModel

_DYNAMIC = "inference_dynamic_batching_"
CACHING = _DYNAMIC + "prefix_caching"
TOKENS, REQUESTS = _DYNAMIC + "max_tokens", _DYNAMIC + "max_requests"
BLOCK, BUFFER = _DYNAMIC + "block_size", _DYNAMIC + "buffer_size_gb"
STATES, GRAPHS = CACHING + "_mamba_gb", _DYNAMIC + "num_cuda_graphs"
POLICY, EXACT_ENDS = CACHING + "_eviction_policy", CACHING + "_exact_ends"
INTERVAL = CACHING + "_checkpoint_interval"
DRAFTS = "num_speculative_tokens"
# What shows in an engine's figures whether it was in the way that it is meant for.
FIGURES = ("steps", "computed_tokens", "skipped_tokens", "preemptions", "draft_tokens",
           "accepted_tokens")  # fmt: skip


T = TypeVar("T")


@dataclass(frozen=True)
class Pools:
    """Memory of caches, from the sizes of one engine's."""

    geometry: CacheGeometry
    ring_place_bytes: int
    logits_bytes: int  # that a state slot has besides
    longest: int  # tokens of any request
    usual: float  # of one of them

    @classmethod
    def of(cls, engine: DynamicInferenceEngine, model: HybridModel, tokens: list[int]) -> Pools:
        """Of the model that an engine runs, for requests of so many tokens."""
        places = sum(spec.bytes_per_ring_place() for spec in model.state_specs.values())
        usual = sum(tokens) / len(tokens)
        return cls(engine.cache_geometry, places, 4 * engine.vocab_size, max(tokens), usual)

    @property
    def small_block(self) -> int:
        """Tokens of a block of which answers need several, so that decodes run out of them."""
        return 16 if self.longest >= 1024 else 4  # groups of an index are whole in a block

    def small(
        self, requests: int, block: int, share: float, states: int, drafts: int
    ) -> dict[str, Any]:
        """Options of an engine that holds so many requests, `share` of the KV that they usually
        need, but the longest one's at least, and so many cached states."""
        geometry = self.geometry
        places = geometry.kernel_chunk + 2 * drafts + 1
        slot = geometry.bytes_per_state + self.logits_bytes
        live = requests * (slot + places * self.ring_place_bytes)
        own, usual = -(-(self.longest + 1) // block), self.usual / block + 0.5
        blocks = max(own + 2, math.ceil(share * requests * usual)) + 1  # the dummy
        per_block = geometry.bytes_per_block * block / geometry.block_size
        found = {REQUESTS: requests, BLOCK: block, BUFFER: (live + blocks * per_block + 1) / GIB}
        return found | ({STATES: (states * slot + 1) / GIB} if geometry.has_recurrent else {})


@dataclass(frozen=True)
class Way:
    """asynchronous: None: as the device has it. options: of an engine with pools of these sizes,
    which only those that make their pools smaller read."""

    name: str
    options: Callable[[Any], dict[str, Any]]
    asynchronous: bool | None = None

    def config(self, base: EngineConfig, pools: Pools | None) -> EngineConfig:
        """Of its engine; no more requests at a time than the user has allowed, or a step has room
        for."""
        options = self.options(pools)
        limits = [options.get(TOKENS, getattr(base, TOKENS)), getattr(base, REQUESTS)]
        most = [limit for limit in (options.get(REQUESTS), *limits) if limit is not None]
        return replace(base, **options | {REQUESTS: min(most)})


def ways(base: EngineConfig) -> list[Way]:
    """All of them. Drafts come from the request's own text, unless the user has another wish."""
    lookup = "prompt_lookup" if base.drafter == "auto" else base.drafter
    number = base.num_speculative_tokens or 3
    drafts: dict[str, Any] = {DRAFTS: number, "drafter": lookup}
    shared = drafts | {"prompt_lookup_shares_texts": lookup == "prompt_lookup"}
    none = {DRAFTS: 0}
    return [
        Way("many at once", lambda _: none | {REQUESTS: 96}),
        Way("drafts from all texts", lambda _: shared | {REQUESTS: 64}, asynchronous=True),
        Way("small chunks", lambda _: none | {TOKENS: 53, REQUESTS: 24}, asynchronous=False),
        Way("no cache", lambda _: none | {CACHING: False, TOKENS: 700, REQUESTS: 64}),
        Way(
            "few blocks, drafts from all texts",
            lambda pools: shared
            | pools.small(requests=16, block=pools.small_block, share=0.15, states=4, drafts=number)
            | {TOKENS: 301},
            asynchronous=True,
        ),
        Way(
            "one at a time, warm",
            lambda _: none | {REQUESTS: 1, TOKENS: 37, INTERVAL: 64},
        ),
        Way(
            "no CUDA graphs, lru, chunks that break",
            lambda _: none
            | {GRAPHS: 0, REQUESTS: 40, TOKENS: 1009, POLICY: "lru", EXACT_ENDS: False,
               "prefill_checkpoint_mode": "break"},
            asynchronous=False,
        ),
        Way(
            "few states, drafts",
            lambda pools: drafts
            | pools.small(requests=16, block=128, share=0.8, states=8, drafts=number)
            | {TOKENS: 2048, INTERVAL: 128},
            asynchronous=False,
        ),
    ]  # fmt: skip


# What all others are compared with.
ALONE = Way("alone", lambda _: {CACHING: False, REQUESTS: 1, DRAFTS: 0})


@dataclass
class Engines:
    """One after the other, on one model."""

    base: EngineConfig
    model: HybridModel
    pools: Pools | None = None
    figures: dict[str, dict[str, int]] = field(default_factory=dict)  # by way

    def use(
        self, way: Way, work: Callable[[DynamicInferenceEngine], T], *, eager: bool = False
    ) -> T:
        """What `work` makes of a new engine, whose memory is free afterwards. eager: without CUDA
        graphs."""
        config = way.config(self.base, self.pools)
        if eager:
            without: dict[str, Any] = {GRAPHS: 0}
            config = replace(config, **without)
        engine = build_engine(config, model=self.model)
        if way.asynchronous is not None:
            engine.runner.asynchronous = way.asynchronous
        try:
            found = work(engine)
            if not eager:
                self.figures[way.name] = _figures(engine)
            return found
        finally:
            del engine
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
                torch.cuda.empty_cache()


def _figures(engine: DynamicInferenceEngine) -> dict[str, int]:
    stats = engine.stats()
    found = {name: int(stats[name]) for name in FIGURES if name in stats}
    cache = engine.context.cache
    found["evicted_blocks"] = int(cache.kv.evictions)
    found["evicted_states"] = int(cache.states.evictions)
    for kind, steps in getattr(engine.runner, "replayed", {}).items():
        found[f"{kind}_graph_steps"] = int(steps)
    return found
