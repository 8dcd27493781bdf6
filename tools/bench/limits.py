"""What the hardware allows: the time of a workload if the bytes that it has to move were copied, or
the products that it has to compute were computed, as fast as the machine does these alone.

Between two tokens of a batch that decodes, bytes are moved:
    weights       each once, of the embedding a row a token, of the experts those that the batch is
                  expected to choose: E (1 - (1 - k/E)^B) of E experts, if each of B tokens chooses
                  k of them at random
    states        of the recurrent layers: read for every token, written for every n-th
    KV            of the text so far read, of the token written
Prompts are products:
    weights       2 FLOP a parameter and token; for the head, and for blocks past the last in which
                  tokens see each other, of a prompt's last token alone
    attention     4 FLOP a head, its size and pair of tokens of which one sees the other

What is left out (activations, logits, scans) makes the true limit higher. Vectors and convolutions
count as matrices, which is some tenth of a percent; texts whose experts are not chosen at random
may read fewer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bench.measurements import Figures
from bench.workloads import DECODES, LONG_PROMPTS, Workload
from megatron_hybrid import EngineConfig
from megatron_hybrid.engine.choices import resolve_device
from megatron_hybrid.kernels.contract import FP8
from megatron_hybrid.models.blocks import Block
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.weights import formats_of
from megatron_hybrid.models.config import resolve_dtype
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.weight_shares import WeightShare, weight_shares
from megatron_hybrid.parallel import initialize

# Those that have a limit here.
LIMITED = (*DECODES, "unique", *LONG_PROMPTS)
# Tokens from one write of a state to the next, for all models alike, whatever engines choose.
WRITE_INTERVAL = 4


class Rates(NamedTuple):
    """What one machine reaches; the defaults were measured on an H200."""

    copy: float = 4.295e12  # bytes a second, read and written
    product: float = 790e12  # FLOP a second


class Limit(NamedTuple):
    """Of one workload. `unit`: "ms" between tokens, or "s" of wall time."""

    value: float
    unit: str

    def measured(self, result: Figures) -> float:
        """What is held against it, in its unit."""
        if self.unit == "s":
            return float(result["wall_s"])
        return float(result["steady_itl_ms"].get("mean", math.nan))


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model its limits depend on."""

    parameters: int  # each counted once, with the embedding
    mixing: tuple[WeightShare, ...]  # of the blocks up to the last in which tokens see each other
    others: tuple[WeightShare, ...]  # of the blocks behind it
    head: WeightShare
    embedding_bytes: int  # of a token's row
    state_bytes: int  # of a sequence
    kv_bytes: int  # of a token
    attention_sizes: int  # heads x head_dim, of all attention layers together
    write_interval: int  # tokens from one write of a state to the next

    @classmethod
    def of(cls, model: HybridModel, write_interval: int) -> Shape:
        """Of a model on one GPU, whose weights need not be there."""
        mixing, others, sizes = list[WeightShare](), list[WeightShare](), 0
        for index, block in enumerate(model.blocks):
            assert isinstance(block, Block)
            behind = index > model.stages.last_mixing
            (others if behind else mixing).extend(weight_shares(block))
            if block.attention is not None:
                sizes += block.attention.pair_size
        assert model.embedding is not None
        embedding = model.embedding.weight
        head = WeightShare(embedding.numel(), embedding.nbytes)
        if model.lm_head is not None:
            (head,) = weight_shares(model.lm_head)
        return cls(
            sum(one.parameters for one in weight_shares(model)),
            tuple(mixing),
            tuple(others),
            head,
            embedding[0].nbytes,
            sum(spec.bytes_per_slot() for spec in model.state_specs.values()),
            sum(spec.bytes_per_token() for spec in model.kv_specs.values()),
            sizes,
            write_interval,
        )

    @property
    def a_tokens(self) -> float:
        """Parameters of the blocks that a token goes through."""
        return sum(one.a_tokens for one in (*self.mixing, *self.others))

    def decode_bytes(self, batch: int, length: float) -> float:
        """Moved between two tokens of `batch` sequences of `length` tokens, on the average."""
        weights = sum(one.read_by(batch) for one in (*self.mixing, *self.others, self.head))
        states = self.state_bytes * (1 + 1 / self.write_interval)
        return weights + batch * (self.embedding_bytes + states + self.kv_bytes * (length + 1))

    def prompt_flop(self, lengths: Sequence[int]) -> float:
        """Of the products for prompts of so many tokens that share nothing, up to the first token
        of each answer."""
        every = sum(one.a_tokens for one in self.mixing)
        last = sum(one.a_tokens for one in (*self.others, self.head))
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        return 2 * (every * sum(lengths) + last * len(lengths)) + 4 * self.attention_sizes * pairs

    def limit(self, workload: Workload, rates: Rates) -> Limit:
        """Of one of the LIMITED."""
        requests = list(workload.requests())
        prompts = [len(request.new_tokens) for request in requests]
        if workload.name in DECODES:
            length = prompts[0] + requests[0].max_tokens / 2
            return Limit(1e3 * self.decode_bytes(len(prompts), length) / rates.copy, "ms")
        return Limit(self.prompt_flop(prompts) / rates.product, "s")


def shape_of(config: EngineConfig) -> Shape:
    """Of the model that a configuration runs, as if all of it were on one GPU; reads no weights.
    Raises ConfigurationError for one that is not supported."""
    folder, device = ModelFolder.of(config), resolve_device(config)
    dtype = resolve_dtype(config.dtype, folder.config.dtype)
    parallel = initialize(device=device)
    with torch.device("meta"):
        model = HybridModel(
            folder.config,
            parallel,
            dtype,
            resolve_dtype(config.mamba_inference_conv_states_dtype, dtype),
            resolve_dtype(config.mamba_inference_ssm_states_dtype),
            None if config.kv_cache_dtype == "auto" else FP8,
            formats=formats_of(folder, config.quantization, config.load_format),
        )
    return Shape.of(model, config.mamba_inference_state_write_interval or WRITE_INTERVAL)


def over_limits(runs: Iterable[tuple[Figures, Workload]], shape: Shape, rates: Rates) -> str:
    """A table of what was measured over its limit; `runs`: of the LIMITED."""
    rows = [f"| {'workload':13} | measured | limit | measured / limit |", "|---|---|---|---|"]
    for result, workload in runs:
        limit = shape.limit(workload, rates)
        measured, unit = limit.measured(result), limit.unit
        rows.append(
            f"| {workload.name:13} | {_three(measured)} {unit} | {_three(limit.value)} {unit} "
            f"| {measured / limit.value:.2f} |"
        )
    return "\n".join(rows)


def limits_table(shapes: dict[str, Shape], workloads: Sequence[Workload], rates: Rates) -> str:
    """The limits of these shapes, by name, a row each and a column a workload."""
    names = [
        f"{workload.name}, {'ms' if workload.name in DECODES else 's'}" for workload in workloads
    ]
    head = f"| {'shape':23} | parameters, a token's | {' | '.join(names)} |"
    rows = [head, "|---" * (2 + len(names)) + "|"]
    for name, shape in shapes.items():
        sizes = f"{_three(shape.parameters / 1e9)} B, {_three(shape.a_tokens / 1e9)} B"
        values = (_three(shape.limit(workload, rates).value) for workload in workloads)
        rows.append(f"| {name:23} | {sizes} | {' | '.join(values)} |")
    return "\n".join(rows)


def _three(value: float) -> str:
    """With three digits at least, also where the last ones are zeros."""
    return f"{value:#.3g}".rstrip(".") if value < 1000 else f"{value:.0f}"
