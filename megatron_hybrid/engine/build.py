"""EngineConfig -> a loaded engine. What can be refused is refused before weights load."""

from __future__ import annotations

import copy
import logging
import os
from dataclasses import dataclass, replace

import torch

from megatron_hybrid.cache.checkpoint_placement import CheckpointPlacement
from megatron_hybrid.cache.geometry import GIB, CacheGeometry
from megatron_hybrid.cache.hybrid_cache import HybridCache
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine import build_adapters, build_tables, build_weights
from megatron_hybrid.engine.adapters import Adapters
from megatron_hybrid.engine.build_host_memory import (
    begin_lower_tier,
    check_host_memory,
    host_transfers,
    staging_bytes,
)
from megatron_hybrid.engine.build_routed import (
    check_routed_experts,
    keep_routed,
    routed_reader,
    routed_spec,
)
from megatron_hybrid.engine.build_speculation import build_speculation
from megatron_hybrid.engine.checks import (
    check_batch_invariant,
    check_drafts,
    check_kv_dtype,
    check_libraries,
    check_products,
    check_quantized,
    check_transformer_engine,
)
from megatron_hybrid.engine.choices import (
    all_to_all_from,
    captures_at_start,
    dtypes_of,
    max_seq_length_of,
    prompt_room,
    resolve_device,
)
from megatron_hybrid.engine.context import DynamicInferenceContext
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.engine.head import drafts_from_head
from megatron_hybrid.engine.plain_torch import kernels_for
from megatron_hybrid.engine.profiling import had_to_compile, measure_activations
from megatron_hybrid.engine.sizing import (
    MAX_REQUESTS,
    StageLayers,
    cpu_cache_bytes,
    derive_geometry,
    describe,
    gpu_cache_bytes,
    packed_states_dtype,
    replay_chunk_of,
    ring_length,
    useless_budget,
    write_interval,
)
from megatron_hybrid.engine.sleep import arena_on, in_arena
from megatron_hybrid.engine.start import StartTimes
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.execution.cuda_graphs import GraphSize, graph_sizes
from megatron_hybrid.execution.lockstep import Lockstep
from megatron_hybrid.execution.runner import ModelRunner
from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.kernels.compiled import KERNELS
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.layers.inputs import RoutedSpec, allocate_caches
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.weights import formats_of, load_model, rounded_weights
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext, initialize
from megatron_hybrid.text.grammar import Grammars

logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    *,
    model: HybridModel | None = None,
    refuse_useless_budget: bool = False,
    serves: bool = False,
    start: StartTimes | None = None,
) -> DynamicInferenceEngine:
    """Join the process groups, load the model, divide the memory, capture CUDA graphs.

    `model`: from `load_weights` of a configuration with the same model, for several engines on the
    same weights. `refuse_useless_budget`: a budget for states that holds none is an error, which a
    command line wants, and not only a warning. `serves`: requests come when they like, and when
    there are none, `DynamicInferenceEngine.use_idle_time` is called. `start`: where this is part of
    a longer start, whose seconds before are the imports. Raises ConfigurationError for what the
    user can put right.
    """
    start = start or StartTimes()
    start.end_part("imports")
    plan = _Plan.of(config, model)
    device, parallel, model_config = plan.device, plan.parallel, plan.model_config
    replicas = parallel.experts.replicas
    given = config.inference_dynamic_batching_prefix_caching_mamba_gb
    if model is None:
        planned = _geometry(plan, plan.shapes)
        useless = useless_budget(config, planned)
        if refuse_useless_budget and given is not None and useless:
            raise ConfigurationError(useless)
        start.end_part("device and libraries")
        model = _load(plan, alone=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start.end_part("weights")
    else:
        # the weights are shared, what kernels keep is not
        model = copy.copy(model) if plan.mtp else model.without_head()
    model.kernels = plan.kernels
    model.adapters = build_adapters.adapter_slots(config, model, device)
    keep_routed(model, plan.routed)
    check_products(config, model, device)
    if config.transformer_impl == "transformer_engine":
        recipe = config.transformer_engine_recipe
        model.kernels = kernel_set.with_transformer_engine(
            plan.kernels, recipe, rounded_weights(model)
        )
    compiled_before = KERNELS.compiled
    geometry = _geometry(plan, model, start)
    if useless := useless_budget(config, geometry):
        logger.warning("%s", useless)
    context = DynamicInferenceContext(
        geometry,
        max_tokens=config.inference_dynamic_batching_max_tokens,
        max_seq_length=plan.max_seq_length,
        cache=_cache(config, geometry),
        write_interval=plan.write_interval,
    )
    keeps_logits = context.cache.enabled and geometry.bytes_per_logits > 0
    check_drafts(config, geometry)
    arena = arena_on(device) if config.enable_sleep_mode else None
    caches = allocate_caches(
        model.kv_specs,
        model.state_specs,
        num_blocks=geometry.num_blocks + 1,  # the dummy block
        block_size=geometry.block_size,
        num_slots=(geometry.num_full_slots or geometry.num_slots) + 1,  # the null slot
        device=device,
        end_logits_vocab=model_config.vocab_size if keeps_logits and model.is_last_stage else 0,
        num_rings=geometry.max_requests if plan.ring_length else 0,
        ring_length=plan.ring_length,
        num_packed=geometry.num_cached_slots if geometry.packs_states else 0,
        packed_dtype=packed_states_dtype(config) if geometry.packs_states else None,
        rounding_seed=config.seed if config.mamba_inference_stochastic_rounding else None,
        arena=arena,
        routed=plan.routed,
        num_window_blocks=geometry.num_window_blocks + 1,
    )
    context.routed = routed_reader(caches.routed, model_config)
    if parallel.is_first:
        logger.info("%s", describe(geometry, context))
        if parallel.pipeline.size > 1:
            stages = ", ".join(f"{blocks[0]} to {blocks[-1]}" for blocks in model.stages.blocks)
            logger.info("blocks of the pipeline stages: %s", stages)
    keeps_states = geometry.needs_state and context.cache.enabled
    if config.enable_chunked_prefill is False and keeps_states:
        logger.warning(
            "Chunked prefill stays on (--no-enable-chunked-prefill): caching states needs it."
        )
    runner = ModelRunner(
        model,
        caches,
        context.rows,
        geometry.block_size,
        device,
        parallel,
        max_tokens=config.inference_dynamic_batching_max_tokens,
        all_to_all_from=all_to_all_from(config, parallel, model_config),
        num_drafts=config.num_speculative_tokens,
        write_interval=plan.write_interval,
        window_quota=geometry.window_quota,
    )
    context.transfers = host_transfers(config, context.cache, caches, model, device)
    start.end_part("caches")
    sizes = _graph_sizes(plan, geometry.max_requests)
    if sizes:
        if had_to_compile(compiled_before, parallel):
            runner.compile_kernels(sizes)
            start.end_part("compiling")
        first = captures_at_start(config, serves)
        runner.capture_graphs(sizes, first, progress=parallel.is_first)
        start.end_part("graphs")
    engine = DynamicInferenceEngine(
        context,
        runner,
        vocab_size=model_config.vocab_size,
        eos_token_ids=model_config.eos_token_ids,
        seed=config.seed,
        chunked_prefill=config.enable_chunked_prefill is not False or keeps_states,
        break_at_checkpoints=config.prefill_checkpoint_mode == "break"
        or not plan.kernels.stores_checkpoints
        or not all(spec.writes_checkpoints for spec in model.stages.state_specs.values()),
        log_interval=config.inference_logging_step_interval if parallel.is_first else 0,
        grammars=Grammars(
            plan.folder.tokenizer, model_config.vocab_size, model_config.eos_token_ids
        ),
        lockstep=Lockstep(replicas) if replicas.size > 1 else None,
        is_alone=parallel.lockstep.size == 1,
        speculation=build_speculation(config, context, parallel, sizes, has_head=plan.mtp),
        adapters=Adapters(config.max_loras) if config.enable_lora else None,
    )
    if arena is not None:
        engine.sleeper.use(model, arena, parallel.lockstep.minimum)
    engine.statistics.weight_bytes = weights = model.weight_bytes()
    if copies := build_weights.bytes_of_copies(config, model):
        weights["float8_e4m3fn, copies of others"] = copies
    if parallel.is_first:
        logger.info("weights: %s", ", ".join(f"{n / GIB:.3f} GB {f}" for f, n in weights.items()))
    start.end_part("the rest")
    types = dtypes_of(config, model_config, device)._asdict()
    chosen = {**types, "write_interval": plan.write_interval}
    build_weights.complete(engine.weights, config, model, device, chosen)
    begin_lower_tier(config, engine, model, device)
    build_adapters.load_adapters(config, engine)
    start.end_part("fingerprint")
    engine.statistics.start_seconds = start.parts
    if parallel.is_first:
        compiled = f"; {KERNELS.describe()}" if device.type == "cuda" else ""
        logger.info("%s%s", start.describe(), compiled)
    return engine


def load_weights(config: EngineConfig) -> HybridModel:
    """The model alone, for `build_engine`."""
    plan = _Plan.of(config)
    weights = _bytes_to_load(plan)
    if plan.device.type == "cuda":
        # refuses what does not fit
        gpu_cache_bytes(plan.device, share=config.gpu_memory_utilization, weights=weights)
    else:
        _cpu_cache_bytes(weights)
    return _load(plan, alone=False)


def _cpu_cache_bytes(weights: int) -> int:
    """`weights`: bytes still to be loaded."""
    return cpu_cache_bytes(weights=weights, processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is known before anything large is read."""

    config: EngineConfig
    folder: ModelFolder
    max_seq_length: int
    device: torch.device
    parallel: ParallelContext
    shapes: HybridModel  # without weights
    kernels: KernelSet
    mtp: bool  # drafts come from the model's head
    replay_chunk: int | None  # of HybridModel

    @property
    def model_config(self) -> HybridModelConfig:
        return self.folder.config

    @property
    def routed(self) -> RoutedSpec | None:
        """What is kept of the routers' choices."""
        return routed_spec(self.config, self.model_config)

    @property
    def write_interval(self) -> int:
        """Tokens from one write of a decoding request's states to the next."""
        if self.config.batch_invariant:
            return self.replay_chunk or 1
        given = self.config.mamba_inference_state_write_interval
        if not self.shapes.stages.state_specs:
            return 1
        if given is not None:
            return given
        can_spare = self.device.type == "cuda" and self.kernels.has_runs
        return write_interval(self.model_config.pattern) if can_spare else 1

    @property
    def ring_length(self) -> int:
        if self.config.batch_invariant and self.shapes.stages.state_specs:
            return self.write_interval + 2 * self.config.num_speculative_tokens
        by_chance = self.config.mamba_inference_stochastic_rounding
        return ring_length(self.config.num_speculative_tokens, self.write_interval, by_chance)

    @classmethod
    def of(cls, config: EngineConfig, model: HybridModel | None = None) -> _Plan:
        """`model`: with the weights, where it is there already."""
        folder = ModelFolder.of(config)
        model_config = folder.config
        max_seq_length = max_seq_length_of(config, model_config)
        if config.parallel_sizes.expert > 1 and model_config.moe is None:
            raise ConfigurationError(
                f"--expert-model-parallel-size is {config.expert_model_parallel_size}, but the "
                f"model ({model_config.model_type}) has no experts."
            )
        device = resolve_device(config)
        parallel = initialize(
            config.parallel_sizes,
            device=device,
            symmetric_memory=config.symmetric_memory_all_reduce,
        )
        parallel.sum_in_order(config.batch_invariant)
        mtp = drafts_from_head(config, folder, parallel, model)
        dtypes = dtypes_of(config, model_config, device)
        name = kernels_for(config, model_config, device)
        kernels = kernel_set.select(name, device, batch_invariant=config.batch_invariant)
        replay_chunk = None
        if kernels.replays is not None:
            replay_chunk = replay_chunk_of(model_config.pattern, kernels.replays)
        tables = build_tables.on_host(config, device)
        with torch.device("meta"):  # so that memory is planned before anything large is read
            formats = formats_of(folder, config.quantization, config.load_format)
            shapes = HybridModel(
                model_config, parallel, *dtypes, mtp, formats, replay_chunk, tables
            )
        build_tables.check_tables(config, shapes)
        build_adapters.check_adapters(config, shapes, device)
        check_batch_invariant(config, shapes)
        check_host_memory(config, shapes)
        check_kv_dtype(config, shapes, device)
        check_quantized(config, shapes, device)
        check_routed_experts(config, model_config)
        check_transformer_engine(config, shapes, device)
        check_libraries(config, shapes, device)
        if device.type == "cuda":
            KERNELS.count()
        if config.transformer_engine_recipe in ("tensorwise", "delayed"):
            # A graph's padding, which may hold anything, would have a part in the inputs' scale.
            kernels = replace(kernels, captures=False)
        return cls(
            config, folder, max_seq_length, device, parallel, shapes, kernels, mtp, replay_chunk
        )


def _load(plan: _Plan, alone: bool) -> HybridModel:
    """`alone`: for one engine."""
    model = load_model(
        plan.folder,
        device=plan.device,
        parallel=plan.parallel,
        load_format=plan.config.load_format,
        seed=plan.config.seed,
        progress=plan.parallel.is_first,
        mtp=plan.mtp,
        quantization=plan.config.quantization,
        replay_chunk=plan.replay_chunk,
        tables_on_host=build_tables.on_host(plan.config, plan.device),
        **dtypes_of(plan.config, plan.model_config, plan.device)._asdict(),
    )
    if alone:
        build_adapters.make_room(plan.config, model, plan.device)
    return in_arena(model, plan.device) if plan.config.enable_sleep_mode else model


def _cache(config: EngineConfig, geometry: CacheGeometry) -> HybridCache:
    return HybridCache(
        geometry,
        enabled=config.inference_dynamic_batching_prefix_caching,
        policy=config.inference_dynamic_batching_prefix_caching_eviction_policy,
        checkpoints=CheckpointPlacement(
            geometry,
            exact_ends=config.inference_dynamic_batching_prefix_caching_exact_ends,
            interval=config.inference_dynamic_batching_prefix_caching_checkpoint_interval,
        ),
    )


def _geometry(plan: _Plan, model: HybridModel, start: StartTimes | None = None) -> CacheGeometry:
    """`start`: goes on with the weights there, so that what a step takes can be measured."""
    config, on_gpu = plan.config, plan.device.type == "cuda"
    weights = _bytes_to_load(plan) if start is None else 0
    if on_gpu:
        torch.cuda.empty_cache()
        max_tokens = config.inference_dynamic_batching_max_tokens
        given, activations = config.inference_dynamic_batching_max_requests, 0
        max_requests = min(MAX_REQUESTS, max_tokens) if given is None else given
        if start is not None:
            activations = measure_activations(
                model,
                plan.parallel,
                plan.device,
                block_size=config.inference_dynamic_batching_block_size,
                max_requests=max_requests,
                max_tokens=max_tokens,
                max_seq_length=plan.max_seq_length,
                ring_length=plan.ring_length if config.batch_invariant else 0,
                routed=plan.routed,
                when_compiled=lambda: start.end_part("compiling"),
            )
            start.end_part("largest step")
        limit = gpu_cache_bytes(
            plan.device,
            share=config.gpu_memory_utilization,
            weights=weights,
            held=0 if model.arena is None else model.arena.nbytes,
            activations=activations + staging_bytes(config, model.state_specs.values()),
            graph_sizes=[size.rows for size in _graph_sizes(plan, max_requests)],
            vocab_size=plan.model_config.vocab_size if model.is_last_stage else 0,
        )
    else:
        limit = _cpu_cache_bytes(weights)
    own = list(model.kv_specs.values()), list(model.state_specs.values())
    return derive_geometry(
        config,
        model.stages.kv_specs.values(),
        model.stages.state_specs.values(),
        model.config.vocab_size,
        limit,
        on_gpu=on_gpu,
        minimum=plan.parallel.lockstep.minimum,
        stage=StageLayers(*own, has_logits=model.is_last_stage, routed=plan.routed),
        ring_length=plan.ring_length,
        batch_invariant=plan.config.batch_invariant,
    )


def _graph_sizes(plan: _Plan, max_requests: int) -> tuple[GraphSize, ...]:
    """Of the steps that get a CUDA graph."""
    config = plan.config
    if plan.device.type != "cuda" or not plan.kernels.captures:
        return ()
    return graph_sizes(
        config.inference_dynamic_batching_num_cuda_graphs,
        config.inference_dynamic_batching_cuda_graph_mixed_prefill_count,
        max_requests,
        config.inference_dynamic_batching_max_tokens,
        config.num_speculative_tokens,
        prompt_room(config, plan.parallel, plan.shapes, plan.kernels),
        adapters=config.enable_lora,
    )


def _bytes_to_load(plan: _Plan) -> int:
    weights = sum(weight.nbytes for weight in plan.shapes.parameters())
    weights += build_adapters.adapter_bytes(plan.config, plan.shapes)
    return weights + build_weights.bytes_of_copies(plan.config, plan.shapes)
