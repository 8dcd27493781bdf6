"""EngineConfig -> what a server that computes prompts hands over, or one that decodes is handed."""

from __future__ import annotations

import json
import logging
import os
import socket
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import asdict
from hashlib import sha256
from itertools import chain

from megatron_hybrid.cache.geometry import CacheGeometry
from megatron_hybrid.cache.lower_tier import LowerTier
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.disaggregation import messages as wire
from megatron_hybrid.disaggregation.desk import Desk
from megatron_hybrid.disaggregation.desk_server import FLAG as LISTEN
from megatron_hybrid.disaggregation.desk_server import DeskServer
from megatron_hybrid.disaggregation.page_layout import layout_of
from megatron_hybrid.disaggregation.peer_memory import PeerMemory
from megatron_hybrid.disaggregation.peer_prefixes import PeerPrefixes
from megatron_hybrid.disaggregation.peers import addresses_of
from megatron_hybrid.disaggregation.remote_memory import FLAG as PEERS
from megatron_hybrid.disaggregation.remote_memory import NixlMemory
from megatron_hybrid.engine.agreement import Agreement
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.engine.fingerprint import Fingerprint
from megatron_hybrid.engine.handovers import Handovers
from megatron_hybrid.engine.lower_transfers import MOST_LOOKS, THREADS, LowerTransfers
from megatron_hybrid.engine.transfers import HostTransfers
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.execution.host_copies import HostCopier
from megatron_hybrid.models.hybrid_model import HybridModel

logger = logging.getLogger(__name__)

PREFILL, DECODE = "prefill", "decode"
# Of the fingerprint's mode what cached bytes depend on.
OF_CACHES = """
    batch_invariant dtype conv_states_dtype ssm_states_dtype kv_dtype quantization
    inference_dynamic_batching_block_size mamba_inference_cached_states_dtype
""".split()


def check_disaggregation(config: EngineConfig) -> None:
    """Raises ConfigurationError for flags that don't go together."""
    listen, peers, role = config.disaggregation_listen, config.disaggregation_peers, config.role
    for flag, value, owner in ((LISTEN, listen, PREFILL), (PEERS, peers, DECODE)):
        if (value is not None) != (role == owner):
            raise ConfigurationError(
                f"--role is {role}, and {flag} is {value or 'not given'}: a server with --role "
                f"{owner} needs it, and no other one has it."
            )
        if value is not None:
            addresses_of(value, flag)
    if role == "both":
        return
    if not config.prefix_caching_host_gb:
        raise ConfigurationError(
            f"--role is {role}, but what is handed over passes through memory of the host, and "
            "--prefix-caching-host-gb is 0."
        )
    below = {
        "--prefix-caching-disk": config.prefix_caching_disk,
        "--prefix-caching-store": config.prefix_caching_store,
    }
    for flag, value in below.items():
        if value is not None:
            raise ConfigurationError(
                f"--role is {role}, and {flag} is {value}: other servers' memory or a store can be "
                "below that of the host, not both."
            )


def begin_disaggregation(
    config: EngineConfig,
    transfers: HostTransfers,
    model: HybridModel,
    engine: DynamicInferenceEngine,
) -> None:
    """As `check_disaggregation` allows. All ranks call it. Raises ConfigurationError."""
    tier, copier, fingerprint = transfers.tier, transfers.copier, engine.weights.fingerprint
    assert isinstance(copier, HostCopier)
    geometry, parallel = tier.host.geometry, model.parallel
    sizes = config.parallel_sizes.numbers
    layout = layout_of(
        model,
        copier.caches,
        page_bytes=copier.page_bytes,
        pages_per_state=tier.host.pages_per_state,
        block_size=geometry.block_size,
    )

    caches = _digest(model, fingerprint, geometry)

    def identity() -> wire.Identity:
        weights = fingerprint.parts["model"].get("weights", "")
        return wire.Identity(caches, weights, sizes, engine.epoch)

    agreement = Agreement(parallel.replica)
    if config.role == PREFILL:
        assert config.disaggregation_listen is not None
        host, _, port = config.disaggregation_listen.rpartition(":")
        address = f"{host}:{int(port) + parallel.layout.replica}"
        memory = NixlMemory(f"{address} rank {parallel.replica.rank}", copier.region)
        own = wire.RankMemory(memory.metadata(), copier.region[0], layout.dump())
        ranks = parallel.replica.gather_objects(own)
        desk = Desk(most_pages=tier.host.kv.num_blocks // 2)
        close = memory.close
        if agreement.is_first:
            server = DeskServer(address, desk, ranks, identity)
            logger.info("what is computed here is handed over at %s", address)

            def close() -> None:
                server.close()
                memory.close()

        is_open = engine.scheduler.knows
        transfers.add_lower(Handovers(LowerTier(tier), desk, agreement, close, is_open))
        transfers.handover_address = address
        return
    assert config.disaggregation_peers is not None
    name = f"{socket.gethostname()} process {os.getpid()}"
    reader = PeerMemory(name, copier.region, layout, parallel.replica.rank)
    addresses = addresses_of(config.disaggregation_peers)
    peers = PeerPrefixes(addresses, identity, geometry, reader, is_first=agreement.is_first)
    transfers.peers = peers.addresses
    transfers.add_lower(
        LowerTransfers(
            LowerTier(tier),
            peers,
            copier.views,
            lambda: "peers",
            0.0,
            agreement=agreement,
            executor=_threads,
        )
    )


def _threads(name: str) -> Executor:
    """All questions at once: their answers wait for what is still written."""
    return ThreadPoolExecutor(MOST_LOOKS if name == THREADS[0] else 1, name)


def _digest(model: HybridModel, fingerprint: Fingerprint, geometry: CacheGeometry) -> str:
    """Of the model and of what it caches, however it is split. All ranks call it."""
    own = [(block, one.k_scale, one.v_scale) for block, _, one in model.attentions()]
    scales = set(chain.from_iterable(model.parallel.replica.gather_objects(own)))
    mode = fingerprint.parts["mode"]
    known = {
        "model": asdict(model.config),
        "scales": sorted(scales),
        **{name: mode.get(name) for name in OF_CACHES},
        "logits": geometry.bytes_per_logits,
        "stored_as": geometry.stored_as,
        "granule": geometry.granule,
    }
    return sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()
