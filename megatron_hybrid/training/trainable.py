"""A model to train whose log-probabilities are an engine's, to the last bit.

    llm = LLM(batch_invariant=True)
    model = TrainableModel(llm.config)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    outputs = llm.generate(prompts, SamplingParams(logprobs=0))   # what was sampled
    logprobs = model.logprobs(prompts, answers)                   # the same numbers, with gradients
    loss.backward(); optimizer.step(); llm.update_weights(model.weights)

It is a second copy of the weights in the engine's own modules, which run the engine's kernels as
they are: see kernels.py. What a trainer changes are weights by Hugging Face's names in float32;
both copies are loaded from these by the same code, which rounds them alike.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.choices import resolve_device
from megatron_hybrid.engine.sizing import replay_chunk_of
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.kernels.contract import FP8
from megatron_hybrid.layers.inputs import LayerCaches, StepInputs, allocate_caches
from megatron_hybrid.layers.linear import Linear
from megatron_hybrid.layers.parts import Part
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.updates import ModelUpdates
from megatron_hybrid.models.checkpoints.weight_source import open_folder
from megatron_hybrid.models.checkpoints.weights import load_model
from megatron_hybrid.models.config import IN_PLAIN_TORCH, INDEXED, resolve_dtype
from megatron_hybrid.models.families.family import Location
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import initialize
from megatron_hybrid.training.formulas import Sequences
from megatron_hybrid.training.kernels import under_autograd
from megatron_hybrid.training.nodes import recomputed
from megatron_hybrid.training.whole_sequences import WholeSequences, indices

# The model's calls without the inference mode that an engine runs them in.
_HIDDEN: Any = inspect.unwrap(HybridModel.hidden)
_LOGITS: Any = inspect.unwrap(HybridModel.logits)


class TrainableModel:
    """`weights`: by Hugging Face's names, float32 on the engine's device; whoever trains changes
    them in place. For one rank and a Hugging Face folder that is not quantised."""

    def __init__(self, config: EngineConfig) -> None:
        """`config`: the engine's, of which it takes model, device, types and mode. Raises
        ConfigurationError for a model that cannot be trained."""
        if max(config.parallel_sizes.numbers) > 1:
            raise ConfigurationError("A model that is split over ranks cannot be trained.")
        folder, self.device = ModelFolder.of(config), resolve_device(config)
        if folder.is_megatron or folder.quantization is not None or config.quantization:
            raise ConfigurationError(
                f"{folder.path}: what can be trained is a Hugging Face folder whose weights are "
                "not quantised."
            )
        if set(folder.config.pattern) & (IN_PLAIN_TORCH | INDEXED):
            raise ConfigurationError(
                f"{folder.path}: a model of type {folder.config.model_type} has recurrences or an "
                "index without formulas for their gradients; it can be served, not trained."
            )
        if folder.config.streams is not None:
            raise ConfigurationError(
                f"{folder.path}: a model of type {folder.config.model_type} has several residual "
                "streams, whose kernels have no gradients; it can be served, not trained."
            )
        parallel = initialize(config.parallel_sizes, device=self.device)
        self._kernels = kernel_set.select(
            config.kernels, self.device, batch_invariant=config.batch_invariant
        )
        self._ring_length = 0
        if self._kernels.replays is not None:
            self._ring_length = replay_chunk_of(folder.config.pattern, self._kernels.replays)
        self._block_size = config.inference_dynamic_batching_block_size
        dtype = resolve_dtype(config.dtype, folder.config.dtype)
        if config.dtype is None and self.device.type == "cpu":
            dtype = torch.float32  # as of an engine
        self._model = load_model(
            folder,
            device=self.device,
            dtype=dtype,
            parallel=parallel,
            conv_states_dtype=resolve_dtype(config.mamba_inference_conv_states_dtype, dtype),
            ssm_states_dtype=resolve_dtype(config.mamba_inference_ssm_states_dtype),
            kv_dtype=dtype if config.kv_cache_dtype == "auto" else FP8,
            progress=False,
            replay_chunk=self._ring_length or None,
        )
        self._updates = ModelUpdates(self._model)
        self.weights: dict[str, nn.Parameter] = {}
        leaves = _leaves(self._model)
        origins: dict[int, list[_Origin]] = defaultdict(list)
        with torch.no_grad(), open_folder(folder, folder.config) as source:
            for block, part in self._model.weight_parts():
                places = source.places(block, part.role)
                place = next(place for place in places if place.name in source.names)
                name = source.names[place.name]
                if name not in self.weights:
                    whole = tuple(slice(0, size) for size in source.shape(place.name))
                    values = source.read(place.name, whole).to(self.device, torch.float32)
                    # of a choice alone
                    has_gradient = not part.role.endswith(("router.bias", "balancing_biases"))
                    self.weights[name] = nn.Parameter(values, requires_grad=has_gradient)
                target = part.target
                assert isinstance(target, Tensor)
                storage = target.untyped_storage().data_ptr()
                if self.weights[name].requires_grad:
                    one = _Origin.of(self.weights[name], part, place, leaves[storage])
                    origins[storage].append(one)
        for storage, own in origins.items():
            leaf = leaves[storage].requires_grad_()
            leaf.register_post_accumulate_grad_hook(partial(_hand_on, own))
        self._loaded = self._versions()

    def parameters(self) -> Iterator[nn.Parameter]:
        """For an optimiser: without the biases by which routers choose experts, which have no
        gradient."""
        return (weight for weight in self.weights.values() if weight.requires_grad)

    def logprobs(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """The log-probability of each token of each answer behind its prompt, the model's own,
        before temperature: [tokens] float32 each, with gradients to `weights`."""
        self._load()
        rows = [len(prompt) - 1 for prompt in prompts]
        fed = [[*p, *a][:-1] for p, a in zip(prompts, answers, strict=True)]
        sequences = Sequences.of([len(tokens) for tokens in fed], self.device)
        starts = np.cumsum([0, *sequences.lengths])
        wanted = [
            np.arange(start + row, start + row + len(answer))
            for start, row, answer in zip(starts, rows, answers, strict=False)
        ]
        logits = self._logits(fed, np.concatenate(wanted), sequences)
        log_softmax = self._kernels.sampling.log_softmax
        every = recomputed(log_softmax, partial(torch.log_softmax, dim=-1), logits.float())
        targets = torch.tensor([t for answer in answers for t in answer], device=self.device)
        own: Tensor = every.gather(1, targets[:, None]).squeeze(1)
        return list(own.split([len(answer) for answer in answers]))

    def _logits(
        self, fed: list[list[int]], wanted: np.ndarray[Any, Any], sequences: Sequences
    ) -> Tensor:
        """[wanted, vocabulary]"""
        model, size = self._model, len(fed)
        with torch.enable_grad():  # a pass without gradients leaves those of others in peace
            for module in model.modules():  # what is made from weights
                prepare = getattr(module, "after_loading", None)
                if prepare is not None and module is not model:
                    prepare()
        inputs, blocks = self._inputs(fed, wanted, sequences)
        caches: LayerCaches = allocate_caches(
            model.kv_specs,
            model.state_specs,
            num_blocks=blocks,
            block_size=self._block_size,
            num_slots=1,
            device=self.device,
            num_rings=size if self._ring_length else 0,
            ring_length=self._ring_length,
        )
        model.kernels = under_autograd(self._kernels, sequences)
        plans = model.plan(inputs, caches)
        logits: Tensor = _LOGITS(model, _HIDDEN(model, inputs, plans), inputs, plans)
        return logits

    def _inputs(
        self, fed: list[list[int]], wanted: np.ndarray[Any, Any], sequences: Sequences
    ) -> tuple[StepInputs, int]:
        """A step of these prompts alone, from zeroed states, which leaves none; and of how many
        blocks its caches are."""
        step = WholeSequences.of(sequences, self._block_size, self._model.chunk_sizes)
        nothing = indices([], self.device)
        inputs = StepInputs(
            token_ids=indices([token for tokens in fed for token in tokens], self.device),
            positions=step.positions,
            num_decodes=0,
            paged=step.paged,
            decode=None,
            prefill=step.prefill,
            logits_index=indices(wanted, self.device),
            decode_rows=nothing,
            sampled_rows=nothing,
        )
        return inputs, step.num_blocks

    def _load(self) -> None:
        """The weights into the modules, if they have changed."""
        if (now := self._versions()) != self._loaded:
            with torch.no_grad():
                self._updates.update(self.weights)
            self._loaded = now

    def _versions(self) -> list[tuple[int, int]]:
        return [(weight._version, weight.data_ptr()) for weight in self.weights.values()]


def _leaves(model: HybridModel) -> dict[int, Tensor]:
    """The tensors that a model computes with, by their memory."""
    found: dict[int, Tensor] = {}
    for module in model.modules():
        own: list[Tensor] = list(module.parameters(recurse=False))
        if isinstance(module, Linear):  # whose parameters are other views of its weights
            own = [*module.plain_weights(), *([] if module.bias is None else [module.bias])]
        for tensor in own:
            found[tensor.untyped_storage().data_ptr()] = tensor
    return found


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where some of a leaf's numbers come from."""

    weight: nn.Parameter
    index: tuple[slice | int, ...]  # of the weight
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # in the leaf's memory
    multiplier: float

    @classmethod
    def of(cls, weight: nn.Parameter, part: Part, place: Location, leaf: Tensor) -> _Origin:
        """Of a part of the model."""
        target = part.target
        assert isinstance(target, Tensor)
        behind = place.part * part.shape[0]
        rows = slice(part.source[0].start + behind, part.source[0].stop + behind)
        index: tuple[slice | int, ...] = (rows, *part.source[1:])
        index = index if place.index is None else (place.index, *index)
        offset = int(target.storage_offset()) - int(leaf.storage_offset())
        return cls(weight, index, target.shape, target.stride(), offset, part.multiplier)


def _hand_on(origins: list[_Origin], leaf: Tensor) -> None:
    """A leaf's gradient to the weights that it was loaded from."""
    assert leaf.grad is not None
    grad = torch.empty_strided(leaf.shape, leaf.stride(), dtype=torch.float32, device=leaf.device)
    grad.copy_(leaf.grad)
    leaf.grad = None
    for origin in origins:
        own = grad.as_strided(origin.size, origin.stride, origin.offset)
        if origin.weight.grad is None:
            origin.weight.grad = torch.zeros_like(origin.weight)
        origin.weight.grad[origin.index] += origin.multiplier * own
