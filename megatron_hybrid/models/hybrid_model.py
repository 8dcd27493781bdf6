"""One model for all families: a stack of blocks read off a pattern."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from megatron_hybrid.kernels.contract import DecodeRuns
from megatron_hybrid.kernels.elementwise import soft_capped
from megatron_hybrid.kernels.kernel_set import REFERENCE
from megatron_hybrid.kernels.linear.reference import plain_rows
from megatron_hybrid.layers.adapters import AdaptedPart, AdapterSlots, of_logits
from megatron_hybrid.layers.cached_attention import CachedAttention
from megatron_hybrid.layers.inputs import KVSpec, LayerCaches, LockstepSize, StateSpec, StepInputs
from megatron_hybrid.layers.kernel_plans import Carried, KernelPlans
from megatron_hybrid.layers.linear import (
    ColumnParallelLinear,
    Linear,
    LinearPart,
    RowParallelLinear,
    allocate_linears,
)
from megatron_hybrid.layers.mixer import added_up
from megatron_hybrid.layers.norm import RMSNorm
from megatron_hybrid.layers.parts import Part, WeightPart, prefixed, section
from megatron_hybrid.layers.recurrent import RecurrentMixer
from megatron_hybrid.layers.rope import RopeConfig, inverse_frequencies
from megatron_hybrid.layers.streams import Connection, StreamsHead
from megatron_hybrid.memory.arena import Arena
from megatron_hybrid.models.blocks import (
    Block,
    BlockBuilder,
    ModelFormats,
    in_one_type,
    uses_of_shared,
)
from megatron_hybrid.models.config import SHARED_TRANSFORMER, HybridModelConfig
from megatron_hybrid.models.hidden import Hidden
from megatron_hybrid.models.mtp import MTPHead
from megatron_hybrid.models.stages import ModelStages
from megatron_hybrid.models.weight_bytes import weight_bytes
from megatron_hybrid.parallel import ParallelContext, VocabParallelEmbedding


class HybridModel(nn.Module):
    """One pipeline stage of a model, or the whole: `blocks`, of which the first stage has the
    embedding too, and the last one the final norm and the head.

    `kv_specs` and `state_specs` say, by the index of a block in the whole model, what this rank's
    caches have to hold; `stages` has those of all blocks.
    """

    def __init__(
        self,
        config: HybridModelConfig,
        parallel: ParallelContext,
        dtype: torch.dtype,
        conv_states_dtype: torch.dtype,
        ssm_states_dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        mtp: bool = False,
        formats: ModelFormats = in_one_type,
        replay_chunk: int | None = None,
        tables_on_host: bool = False,
    ) -> None:
        """`kv_dtype`: that keys and values are stored in; None: `dtype`. `mtp`: with the head that
        the configuration describes, for a model of one stage. `formats`: of the weights of linear
        layers. `replay_chunk`, `tables_on_host`: of LayerContext. Raises ConfigurationError for a
        model that is not supported."""
        super().__init__()
        self.config = config
        self.parallel = parallel
        self.dtype = dtype
        self.kernels = REFERENCE
        self.adapters: AdapterSlots | None = None  # of the engine that runs it
        self.arena: Arena | None = None  # that the weights were moved into
        pipeline, tensor = parallel.pipeline, parallel.tensor
        self.is_first_stage, self.is_last_stage = pipeline.is_first, pipeline.is_last
        padded_vocab = -(-config.vocab_size // tensor.size) * tensor.size

        def builder() -> BlockBuilder:
            return BlockBuilder(
                config,
                parallel,
                dtype,
                conv_states_dtype,
                ssm_states_dtype,
                kv_dtype or dtype,
                formats,
                replay_chunk,
                tables_on_host=tables_on_host,
            )

        vocabulary_bytes = padded_vocab // tensor.size * config.hidden_size * dtype.itemsize
        self.stages = ModelStages.of(builder(), vocabulary_bytes)
        self.stage = self.stages.blocks[pipeline.rank]
        build = builder()
        self.embedding: VocabParallelEmbedding | None = None
        if self.is_first_stage:
            self.embedding = VocabParallelEmbedding(
                padded_vocab, config.hidden_size, dtype=dtype, parallel=tensor
            )
        self.blocks = nn.ModuleList(build.block(index) for index in self.stage)
        self._shared = build.shared
        self.leaving = build.addend(len(config.pattern))  # of the last block
        self.final_norm: RMSNorm | StreamsHead | None = None
        self.lm_head: Linear | None = None
        if self.is_last_stage:
            self.final_norm = build.head_norm()
            if config.logits_divisor != 1.0:
                # Which becomes part of its weight (see weight_parts): in float32, so that nothing
                # is rounded once more.
                assert isinstance(self.final_norm, RMSNorm)
                weight = self.final_norm.weight
                self.final_norm.weight = nn.Parameter(weight.float(), requires_grad=False)
            if not (config.tie_word_embeddings and self.is_first_stage):
                rows = padded_vocab // tensor.size
                self.lm_head = Linear(config.hidden_size, rows, bias=False, dtype=dtype)
                allocate_linears([self._head_part(self.lm_head)], partial(formats, None))
        self.mtp: MTPHead | None = None
        if mtp:
            assert pipeline.size == 1 and config.logits_divisor == 1.0
            self.mtp = MTPHead(build)
            self.stages = self.stages.with_head(self.mtp.kv_specs, self.mtp.state_specs)
        self._note_layers()
        self.frequencies = nn.Module()  # of rotary embeddings, by kind of layer
        ropes: dict[str, RopeConfig | None] = {k: a.rope for k, a in self._attentions.items()}
        for kind, rope in (ropes | {k: r.rope for k, r in self._recurrent.items()}).items():
            if rope is not None:
                table = inverse_frequencies(rope)
                self.frequencies.register_buffer(kind, table, persistent=False)

    def _note_layers(self) -> None:
        """What caches have to hold, and one layer of each kind, for what all of them have in
        common."""
        stages, has_head = self.stages, self.mtp is not None
        self.kv_specs: dict[int, KVSpec] = {
            i: spec for i, spec in stages.kv_specs.items() if has_head or i in self.stage
        }
        self.state_specs: dict[int, StateSpec] = {
            i: spec for i, spec in stages.state_specs.items() if has_head or i in self.stage
        }
        attentions = [block.attention for _, block in self.own_blocks()]
        if self.mtp is not None:
            attentions.append(self.mtp.attention)
        self._attentions = {layer.kind: layer for layer in attentions if layer is not None}
        self._recurrent = {layer.kind: layer for layer in self._recurrent_layers()}

    def without_head(self) -> HybridModel:
        """A model on the same weights that has no MTPHead."""
        other = copy.copy(self)
        other._modules = dict(self._modules)  # torch's table of them, which a copy shares
        other.mtp = None
        other.stages = self.stages.without_head()
        other._note_layers()
        return other

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Kernel chunks whose bounds the model's kernels read (PrefillSegments)."""
        layers = self._recurrent.values()
        return tuple(sorted({x.spec.kernel_chunk for x in layers if x.takes_chunk_bounds}))

    @torch.no_grad()
    def after_loading(self) -> None:
        """To be called when the weights are in place: lets every layer prepare what it needs."""
        if self.embedding is not None:
            weight = self.embedding.weight
            weight[self._vocabulary_rows(weight.shape[0])[1] :].zero_()
        for module in self.modules():
            prepare = getattr(module, "after_loading", None)
            if prepare is not None and module is not self:
                prepare()

    @property
    def is_quantized(self) -> bool:
        """Whether any of this rank's weights is."""
        return any(
            format is not None
            for layer in self.modules()
            if isinstance(layer, Linear)
            for format, _ in layer.formats
        )

    def plain_weights(self) -> Iterator[tuple[Tensor, bool]]:
        """Of this rank's linear layers that are not quantised, without the experts', and of what
        connects residual streams; and whether they have a bias."""
        for layer in self.modules():
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear) or (
                isinstance(layer, Linear) and layer is self.lm_head
            ):
                for weight in layer.plain_weights():
                    yield weight, layer.bias is not None
                if layer.wide is not None:
                    yield layer.wide, False
            elif isinstance(layer, Connection | StreamsHead):
                yield from ((weight, False) for weight in layer.plain_weights())
        if self.lm_head is None and self.embedding is not None:
            yield self.embedding.weight, False

    def weight_bytes(self) -> dict[str, int]:
        """What this rank's weights take, by the format that they are kept in."""
        return weight_bytes(self)

    def own_blocks(self) -> Iterator[tuple[int, Block]]:
        """This stage's, with their indices in the whole model."""
        for index, block in zip(self.stage, self.blocks, strict=True):
            assert isinstance(block, Block)
            yield index, block

    def attentions(self) -> Iterator[tuple[int, str, CachedAttention]]:
        """(block, role, layer) for each attention of this rank: block and role of the projection to
        its keys, as in `weight_parts`."""
        layers = {index: block.attention for index, block in self.own_blocks()}
        layers |= {index: transformer.self_attn for index, transformer in self._shared.items()}
        if self.mtp is not None:
            layers[self.mtp.first] = self.mtp.attention
        for block, part in self.weight_parts():
            layer = None if block is None else layers.get(block)
            if block is not None and layer is not None and part.role.endswith(layer.key_role):
                yield block, part.role, layer

    def _recurrent_layers(self) -> Iterator[RecurrentMixer]:
        for _, block in self.own_blocks():
            if block.mixer.recurrent is not None:
                yield block.mixer.recurrent
        if self.mtp is not None:
            yield self.mtp.delay

    def weight_parts(self) -> Iterator[tuple[int | None, Part]]:
        """(block, part) for every weight of this rank; block None for those outside of blocks,
        whose roles are embedding, final_norm and lm_head. A transformer that blocks share counts
        to the first of them in the whole model; the blocks of an MTPHead come behind the last."""
        if self.embedding is not None:
            weight = self.embedding.weight
            start, real = self._vocabulary_rows(weight.shape[0])
            yield None, section("embedding", weight[:real], 0, start, self.config.vocab_size)
        for index, block in self.own_blocks():
            for part in block.weight_parts():
                yield index, part
        for index, transformer in self._shared.items():
            for part in prefixed("transformer", transformer.weight_parts()):
                yield index, part
        if self.mtp is not None:
            yield from self.mtp.weight_parts()
        if self.final_norm is not None:
            divisor = 1.0 if self._divides_in_head else self.config.logits_divisor
            for part in self.final_norm.weight_parts():
                assert isinstance(part, WeightPart)
                factor, offset = part.multiplier / divisor, part.offset / divisor
                role = f"final_norm.{part.role}".removesuffix(".weight")
                yield None, replace(part, role=role, multiplier=factor, offset=offset)
        if self.lm_head is not None:
            yield None, self._head_part(self.lm_head)

    def adapted_parts(self, experts: bool = False) -> Iterator[AdaptedPart]:
        """Of its linear layers that may have adapters: those in the model's own blocks, with or
        without `experts`."""
        for block, part in self.weight_parts():
            if block is None or block >= len(self.config.pattern):
                continue
            if not isinstance(part, LinearPart) or (".experts." in part.role and not experts):
                continue
            shared = part.role.startswith("transformer.")
            uses = len(uses_of_shared(self.config, block)) if shared else 1
            yield AdaptedPart(block, part, uses)

    def _head_part(self, head: Linear) -> LinearPart:
        vocab, columns = self.config.vocab_size, head.inputs
        start, real = self._vocabulary_rows(head.outputs)
        role = "embedding" if self.config.tie_word_embeddings else "lm_head"
        source = slice(start, start + real), slice(0, columns)
        part = LinearPart(role, (vocab, columns), source, head, 0)
        if self._divides_in_head:
            part = replace(part, multiplier=1 / self.config.logits_divisor)
        return part

    @property
    def _divides_in_head(self) -> bool:
        """Whether logits come divided from the head's weight: a quantised one's scales take the
        divisor as it is, while its inputs may have a scale that is meant for undivided ones."""
        head = self.lm_head
        return head is not None and any(format is not None for format, _ in head.formats)

    def _vocabulary_rows(self, rows: int) -> tuple[int, int]:
        """Where this rank's rows begin in the vocabulary, and how many they are; the last ranks'
        rows past its end are padding, set to zero."""
        vocab = self.config.vocab_size
        start = min(self.parallel.tensor.rank * rows, vocab)
        return start, min(rows, vocab - start)

    @torch.inference_mode()
    def forward(self, inputs: StepInputs, caches: LayerCaches) -> Tensor:
        """Run one step of a model of one stage; writes the caches. Returns logits
        [rows, vocab_size] of the tokens in `inputs.logits_index`, in the weights' dtype, the same
        on every rank."""
        plans = self.plan(inputs, caches)
        return self.logits(self.hidden(inputs, plans), inputs, plans)

    @torch.inference_mode()
    def hidden(
        self, inputs: StepInputs, plans: KernelPlans, entering: Hidden | None = None
    ) -> Hidden:
        """What leaves this stage's blocks; writes the caches. `entering`: what left those of the
        stage before (some of it is overwritten); None on the first stage. Like `logits` it can be
        captured in a CUDA graph; `plan` can't."""
        config = self.config
        plans = self._rotated(plans, inputs.positions)
        size = inputs.lockstep or LockstepSize(inputs.num_tokens, len(inputs.logits_index))
        last_mixing = self.stages.last_mixing
        most = size.tokens
        if self.stage.start > last_mixing:
            plans, most = replace(plans, kernels=of_logits(plans.kernels, inputs)), size.rows
        hidden = self._embed(inputs) if entering is None else entering
        residual, mixed, embeddings, carried = *hidden[:3], Carried(hidden.carried)
        kept: list[Tensor] | None = None if plans.caches.routed is None else []
        plans = replace(
            plans,
            embeddings=embeddings,
            most_tokens=most,
            all_to_all=size.all_to_all,
            carried=carried,
            chosen=kept,
            token_ids=inputs.token_ids,
        )
        for index, block in self.own_blocks():
            mixed, residual = block(mixed, residual, plans)
            if index == last_mixing:
                mixed = None if mixed is None else inputs.of_logits(added_up(mixed))
                residual = inputs.of_logits(residual)
                if carried.states is not None:
                    carried.states = inputs.of_logits(carried.states)
                kernels = of_logits(plans.kernels, inputs)
                plans = replace(plans, kernels=kernels, most_tokens=size.rows)
        if kept is not None:
            plans.caches.keep_routed(inputs.paged.kv_slot, kept)
        if SHARED_TRANSFORMER not in config.pattern[self.stage.stop :]:
            embeddings = None
        given = carried.states if config.carried_size(self.stage.stop) else None
        return Hidden(residual, None if mixed is None else added_up(mixed), embeddings, given)

    def _embed(self, inputs: StepInputs) -> Hidden:
        config = self.config
        embeddings = self._embeddings(inputs.token_ids)
        residual = embeddings.float() if config.residual_in_fp32 else embeddings
        if config.streams is not None:
            return Hidden(residual.repeat(1, config.streams.count), None, None)
        if config.shared_transformer is None:
            return Hidden(residual, None, None)
        if residual is embeddings:  # which blocks read again, and the residual is overwritten
            residual = embeddings.clone()
        return Hidden(residual, None, embeddings)

    def _embeddings(self, token_ids: Tensor) -> Tensor:
        """[tokens] -> [tokens, hidden]"""
        assert self.embedding is not None, "only the first stage has the embedding"
        embeddings: Tensor = self.embedding(token_ids)
        if self.config.embedding_multiplier != 1.0:
            embeddings = embeddings * self.config.embedding_multiplier
        return embeddings

    def _rotated(self, plans: KernelPlans, positions: Tensor) -> KernelPlans:
        """With the positions of tokens, and their rotation."""
        rotation = {
            kind: self.kernels.rope.plan(positions, table, self.dtype)
            for kind, table in self.frequencies.named_buffers()
        }
        return replace(plans, rotation=rotation, positions=positions)

    @torch.inference_mode()
    def logits(self, hidden: Hidden, inputs: StepInputs, plans: KernelPlans) -> Tensor:
        """[rows, vocab_size] of what leaves the last stage's blocks, the same on every rank of that
        stage; writes the caches of the MTPHead."""
        norm, (multiplier, ranks), kernels = self.final_norm, self.leaving, self.kernels
        assert norm is not None, "only the last stage has the head"
        if isinstance(norm, StreamsHead):
            return self._vocabulary_logits(norm(hidden.residual, kernels))
        assert hidden.mixed is not None
        last, _ = norm.after_adding(hidden.mixed, hidden.residual, multiplier, kernels, ranks)
        normed = plain_rows(last)
        if self.mtp is not None:
            plans = self._rotated(plans, inputs.positions)
            self.mtp.store(self._embeddings(inputs.token_ids), normed, plans)
            normed = inputs.of_logits(normed)
        return self._vocabulary_logits(normed)

    @torch.inference_mode()
    def predict(
        self, token_ids: Tensor, positions: Tensor, hidden: Tensor, plans: KernelPlans
    ) -> tuple[Tensor, Tensor]:
        """A pass of the MTPHead: tokens [rows] at these positions [rows] and the hidden states
        [rows, hidden] before them, which are the model's or an earlier pass's -> logits
        [rows, vocab_size] of the tokens behind them, and hidden states [rows, hidden]; writes their
        KV. Of `plans` the attention, by the head's `shape`, is planned for these tokens."""
        assert self.mtp is not None
        plans = replace(self._rotated(plans, positions), most_tokens=len(token_ids))
        hidden = self.mtp(self._embeddings(token_ids), hidden, plans)
        return self._vocabulary_logits(hidden), hidden

    def _vocabulary_logits(self, normed: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab_size], the same on every rank."""
        config = self.config
        if self.lm_head is not None:
            logits = self.lm_head(normed, self.kernels)
        else:
            assert self.embedding is not None
            logits = self.kernels.linear.multiply(normed, self.embedding.weight)
        logits = self.parallel.tensor.all_gather(logits)[:, : config.vocab_size]
        cap = config.logits_soft_cap
        return logits if cap is None else soft_capped(logits, cap)

    @torch.inference_mode()
    def fold(self, runs: DecodeRuns, caches: LayerCaches) -> None:
        """Have states take up their unfolded tokens, by sequences without tokens."""
        recurrent = {
            kind: layer.plan(1, runs, None, self.kernels, caches.ring_length)
            for kind, layer in self._recurrent.items()
        }
        padding = caches.end_logits.new_zeros((1,), dtype=torch.int64)  # of one token
        plans = KernelPlans(caches, self.kernels, recurrent=recurrent, token_ids=padding)
        for layer in self._recurrent_layers():
            layer(padding.new_zeros((1, layer.input_size), dtype=self.dtype), plans)

    @property
    def attention_kinds(self) -> Mapping[str, CachedAttention]:
        """One of this rank's attention layers of each kind."""
        return self._attentions

    def plan(self, inputs: StepInputs, caches: LayerCaches) -> KernelPlans:
        """What kernels work out on the host once a step, for all layers."""
        kernels = self.kernels
        attention = {
            kind: layer.plan(inputs, caches, kernels) for kind, layer in self._attentions.items()
        }
        recurrent = {
            kind: layer.plan(
                inputs.num_decode_tokens, inputs.decode, inputs.prefill, kernels, caches.ring_length
            )
            for kind, layer in self._recurrent.items()
        }
        if self.adapters is not None:
            kernels = self.adapters.kernels(kernels, inputs.adapters)
        return KernelPlans(caches, kernels, attention, recurrent=recurrent)
