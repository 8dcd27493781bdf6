"""Digests of what each operation of a model gives for each token, while an engine computes.

Operations are those of a KernelSet, whose parts are wrapped, all-reduces, blocks, and what is in
front of the first and behind the last. A row of an operation's result is a token's; which one, the
step's plan says. Watched are the tokens of one text, in whatever request they are computed:
another one may leave them in the cache. CUDA graphs can't be watched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.execution.plan import StepDemand, StepPlan
from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.kernels.kernel_set import KernelSet
from megatron_hybrid.kernels.protocols import QuantizedRows
from megatron_hybrid.layers.inputs import StepInputs
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import RankGroup

# Of each part of a KernelSet, what gives a row a token.
OPERATIONS: dict[str, tuple[str, ...]] = {
    "attention": ("attend",),
    "latent_attention": ("prepare", "attend"),
    "indexed_attention": ("turn", "attend", "attend_latents"),
    "convolved_heads": ("mix",),
    "streams": ("gated_mean", "weighted", "injected", "mixed", "keyed", "balanced"),
    "conv": ("prefill", "decode", "decode_runs", "run"),
    "mamba1_scan": ("prefill", "decode", "decode_runs", "run"),
    "mamba2_scan": ("prefill", "decode", "decode_runs", "run"),
    "gated_delta_rule": ("prefill", "decode", "decode_runs", "run"),
    "norm": ("rms_norm", "rms_norm_parts", "add_rms_norm", "add_rms_norm_over_ranks",
             "gated_rms_norm"),
    "activation": ("activate", "gate"),
    "linear": ("quantize_rows", "multiply", "multiply_activated"),
    "experts": ("route", "add_norm_route", "mix", "mix_parts", "add_shared"),
    "rope": ("prepare",),
}  # fmt: skip
IN_PARTS = ("conv", "mamba1_scan", "mamba2_scan", "gated_delta_rule")  # decodes, then prompts
FRONT, HEAD = "embedding", "head"
DIGEST_BYTES = 64 << 20  # of 8-byte numbers at once
LONGEST_WORDS = 60
MOST_SHAPES = 6

_LANES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Key = tuple[str, str, int]  # where in the model, operation, which of several there
Rows = dict[int, int]  # of a step's rows those that are watched -> position in the text


def digests(rows: Tensor) -> list[int]:
    """A number for the bytes of each row: one that changes with any bit, whatever the device."""
    if rows.numel() == 0:
        return [0] * len(rows)
    rows = rows.reshape(len(rows), -1).contiguous()
    lanes = rows.view(_LANES[rows.element_size()])
    count = lanes.shape[1]
    factors = torch.arange(count, dtype=torch.int64, device=rows.device)
    factors = (factors * 0x5851F42D4C957F2D + 0x14057B7EF767814F).bitwise_or_(1)
    factors = (factors ^ (factors >> 29)) * 0x369DEA0F31A53F85 | 1
    found: list[int] = []
    for part in lanes.split(max(1, DIGEST_BYTES // (8 * count))):
        found += (part.long() * factors).sum(1).tolist()
    return found


@dataclass
class Call:
    """One call's row for a token."""

    row: Tensor  # on the host
    shapes: list[str]  # of what was passed
    step: str  # what else was in it


@dataclass
class Recorder:
    """Of the watched text's first tokens. `common`: of each request how many of its tokens are
    those. `only`: values of this operation at this position are kept, and no digests made."""

    text: list[int]
    common: Mapping[tuple[str, int], int]
    only: tuple[Key, int] | None = None
    found: dict[Key, dict[int, set[int]]] = field(default_factory=dict)  # in the model's order
    calls: list[Call] = field(default_factory=list)
    plan: StepPlan | None = None
    _watches: bool = False  # anything of the step
    _place: str = ""
    _rows: Rows = field(default_factory=dict)  # of the operations that come now
    _total: int = 0  # rows of these operations
    _of_logits: tuple[Rows, int] = field(default_factory=lambda: ({}, 0))
    _seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    _done: Counter[tuple[str, str]] = field(default_factory=Counter)  # rows of a part
    _of_digests: dict[int, set[int]] = field(default_factory=dict)  # of logits: positions

    def begin(self, inputs: StepInputs) -> None:
        """A step of the last plan is computed."""
        self._place, self._rows, self._total = "", {}, inputs.num_tokens
        self._seen.clear()
        self._done.clear()
        self._of_digests.clear()
        self._watches, self._of_logits = False, ({}, 0)
        if self.plan is None:
            return
        bounds = inputs.paged.cu_seqlens.tolist()
        positions, tokens = inputs.positions.tolist(), inputs.token_ids.tolist()
        owners = {i: owner for i, owner in enumerate(self.plan.decode_owners)}
        owners |= {inputs.num_decodes + i: c.owner for i, c in enumerate(self.plan.prefills)}
        for sequence, owner in owners.items():
            common = self.common.get(owner.key, 0)
            for row in range(bounds[sequence], bounds[sequence + 1]):
                position = positions[row]
                # A draft may be wrong, and then so is what is behind it.
                if position >= common or tokens[row] != self.text[position]:
                    break
                self._rows[row] = position
        self._watches = bool(self._rows)
        places = {row: i for i, row in enumerate(inputs.logits_index.tolist())}
        of_logits = {places[row]: at for row, at in self._rows.items() if row in places}
        self._of_logits = of_logits, len(inputs.logits_index)

    def enter(self, place: str, *, of_logits: bool = False) -> None:
        """Operations of this place come; `of_logits`: on rows of logits."""
        self._place = place
        if of_logits:
            self._rows, self._total = self._of_logits

    def note(self, operation: str, result: Any, arguments: tuple[Any, ...]) -> None:
        """An operation gave this."""
        if not self._place or not self._watches:
            return
        values = list(_tensors(result))
        if not values:
            return
        count, part = len(values[0]), operation.partition(".")[0]
        here = self._place, operation
        offset, ends = 0, True
        if part in IN_PARTS and count < self._total:
            offset = self._done[here]
            self._done[here] += count
            ends = self._done[here] >= self._total
            if ends:
                del self._done[here]
        elif count != self._total:  # of other tokens: of other ranks, or of some
            return
        number = self._seen[here]
        self._seen[here] += ends
        rows = {
            row - offset: at for row, at in self._rows.items() if offset <= row < offset + count
        }
        for i, value in enumerate(values):
            name = operation if len(values) == 1 else f"{operation}[{i}]"
            self._keep((self._place, name, number), value, rows, arguments)

    def _keep(self, key: Key, value: Tensor, rows: Rows, arguments: tuple[Any, ...]) -> None:
        if self.only is not None:
            wanted, position = self.only
            if key == wanted:
                for row in (row for row, at in rows.items() if at == position):
                    self.calls.append(Call(value[row].cpu(), _shapes(arguments), self._step()))
            return
        by_position = self.found.setdefault(key, {})
        if rows:
            index = torch.tensor(list(rows), device=value.device)
            for at, digest in zip(
                rows.values(), digests(value.index_select(0, index)), strict=True
            ):
                by_position.setdefault(at, set()).add(digest)

    def note_logits(self, logits: Tensor) -> None:
        """[rows, vocabulary] of the step."""
        self._rows, self._total = self._of_logits
        self.enter(HEAD)
        self.note("logits", logits, ())
        rows, _ = self._of_logits
        if rows:
            index = torch.tensor(list(rows), device=logits.device)
            each = digests(logits.index_select(0, index).float())
            for at, digest in zip(rows.values(), each, strict=True):
                self._of_digests.setdefault(digest, set()).add(at)

    def note_log_softmax(self, logits: Tensor, result: Tensor) -> None:
        """Rows are known by what they are of: their order is the sampler's."""
        rows: Rows = {}
        for row, digest in enumerate(digests(logits.float())):
            for at in self._of_digests.get(digest, ()):
                rows[row] = at
        self._keep((HEAD, "sampling.log_softmax", 0), result, rows, (logits,))

    def _step(self) -> str:
        assert self.plan is not None
        chunks = [f"{chunk.start} to {chunk.end}" for chunk in self.plan.prefills]
        words = ", ".join(chunks)[:LONGEST_WORDS]
        prompts = f", {len(chunks)} chunks of prompts ({words})" if chunks else ""
        drafts = f" with {self.plan.num_drafts} drafts" if self.plan.num_drafts else ""
        return f"{len(self.plan.decode_rows)} decodes{drafts}{prompts}"


class _Watched:
    """A part of a KernelSet."""

    def __init__(self, name: str, part: Any, recorder: Recorder, names: dict[int, str]) -> None:
        self._name, self._part, self._recorder, self._names = name, part, recorder, names

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._part, attribute)
        if attribute not in OPERATIONS[self._name] or value is None:
            return value
        operation = f"{self._name}.{attribute}"

        def call(*arguments: Any, **named: Any) -> Any:
            result = value(*arguments, **named)
            given = (*arguments, *named.values())
            whose = [self._names[p] for p in map(_pointer, given) if p in self._names]
            label = f"{operation} ({whose[0]})" if whose else operation
            self._recorder.note(label, result, given)
            return result

        return call


class _WatchedSampling:
    def __init__(self, part: Any, recorder: Recorder) -> None:
        self._part, self._recorder = part, recorder

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._part, attribute)

    def log_softmax(self, logits: Tensor) -> Tensor:
        found: Tensor = self._part.log_softmax(logits)
        self._recorder.note_log_softmax(logits, found)
        return found


def _watched(kernels: KernelSet, recorder: Recorder, names: dict[int, str]) -> KernelSet:
    def part(name: str, value: Any) -> Any:
        return _Watched(name, value, recorder, names)

    parts = {name: part(name, getattr(kernels, name)) for name in OPERATIONS}
    replays = kernels.replays
    if replays is not None:
        scans = {name: part(name, getattr(replays, name)) for name in IN_PARTS}
        replays = replays._replace(**scans)
    sampling: Any = _WatchedSampling(kernels.sampling, recorder)
    return replace(kernels, **parts, replays=replays, sampling=sampling)


@contextmanager
def watched_kernels(model: HybridModel, recorder: Recorder) -> Iterator[None]:
    """Engines that are built meanwhile, on this model, are watched."""
    names = {p: name for name, weight in model.named_parameters() if (p := _pointer(weight))}
    select, hidden, logits = kernel_set.select, HybridModel.hidden, HybridModel.logits
    all_reduce = RankGroup.all_reduce

    def watched_select(*arguments: Any, **named: Any) -> KernelSet:
        return _watched(select(*arguments, **named), recorder, names)

    def watched_hidden(self: HybridModel, inputs: StepInputs, *others: Any) -> Any:
        recorder.begin(inputs)
        recorder.enter(FRONT)
        found = hidden(self, inputs, *others)
        recorder.enter("")
        return found

    def watched_logits(self: HybridModel, *arguments: Any) -> Tensor:
        if self.mtp is None:
            recorder.enter(HEAD, of_logits=True)
        found = logits(self, *arguments)
        recorder.note_logits(found)
        recorder.enter("")
        return found

    def watched_all_reduce(self: RankGroup, tensor: Tensor) -> Tensor:
        found = all_reduce(self, tensor)
        if self.size > 1 and found.dim() > 1:
            recorder.note("all_reduce", found, (tensor,))
        return found

    with ExitStack() as stack:
        for owner, name, value in (
            (kernel_set, "select", watched_select),
            (HybridModel, "hidden", watched_hidden),
            (HybridModel, "logits", watched_logits),
            (RankGroup, "all_reduce", watched_all_reduce),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        last_mixing = model.stages.last_mixing
        for index, block in model.own_blocks():
            mixer = getattr(block.mixer, "recurrent", None) or block.mixer
            place = f"block {index} ({type(mixer).__name__})"
            hooks = _hooks(recorder, place, of_logits=index > last_mixing)
            for handle in (
                block.register_forward_pre_hook(hooks[0]),
                block.register_forward_hook(hooks[1]),
            ):
                stack.callback(handle.remove)
        yield


def _hooks(recorder: Recorder, place: str, *, of_logits: bool) -> tuple[Callable[..., None], ...]:
    def before(*_: Any) -> None:
        recorder.enter(place, of_logits=of_logits)

    def after(_block: Any, arguments: tuple[Any, ...], result: Any) -> None:
        mixed, residual = result
        recorder.note("residual stream before it", residual, arguments)
        recorder.note("what the mixer gives", mixed, arguments)

    return before, after


@contextmanager
def watched_steps(engine: DynamicInferenceEngine, recorder: Recorder) -> Iterator[None]:
    """The recorder knows the plans of an engine's steps."""
    launch = engine.runner.launch

    def watched(plan: StepPlan, agreed: StepDemand | None = None) -> Any:
        recorder.plan = plan
        return launch(plan, agreed)

    with mock.patch.object(engine.runner, "launch", watched):
        yield


def common_tokens(one: list[int], other: list[int]) -> int:
    """How many of the first tokens are the same."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def _tensors(result: Any) -> Iterator[Tensor]:
    """Of an operation's result: what has a row a token."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, QuantizedRows):
        yield result.values
        if result.scale.dim() and len(result.scale) == len(result.values):
            yield result.scale
    elif isinstance(result, tuple):
        for one in result:
            yield from _tensors(one)
    elif callable(total := getattr(result, "sum", None)):  # Unsummed
        yield total()


def _pointer(value: Any) -> int:
    """Where a weight lies; 0 for what is none."""
    if isinstance(value, Tensor):
        return 0 if value.is_meta else value.data_ptr()
    tensors = getattr(value, "tensors", None)  # of a QuantizedWeight
    first = next(iter(tensors().values()), None) if callable(tensors) else None
    return 0 if first is None or first.is_meta else first.data_ptr()


def _shapes(arguments: tuple[Any, ...]) -> list[str]:
    """Of the tensors that an operation was called with."""
    found = []
    for value in arguments:
        if isinstance(value, Tensor):
            found.append(f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}")
        elif isinstance(value, tuple) and any(isinstance(one, Tensor) for one in value):
            found += _shapes(value)
    return found if len(found) <= MOST_SHAPES else [*found[:MOST_SHAPES], "..."]
