"""A folder's weights by the names that transformers knows: read when they are asked for, and
quantised ones as the numbers that they mean."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_hybrid.kernels.linear.formats import NUMBERS
from megatron_hybrid.models.checkpoints.kv_scales import is_kv_scale
from megatron_hybrid.models.checkpoints.quantization import StoredFormat
from megatron_hybrid.models.checkpoints.quantized_weights import (
    StoredWeight,
    stored_format,
    weight_format,
)
from megatron_hybrid.models.checkpoints.weight_source import FolderSource
from megatron_hybrid.models.config import EXPERTS, HybridModelConfig
from megatron_hybrid.models.families.family import GATED, Location
from megatron_hybrid.models.families.registry import family_of
from megatron_hybrid.models.families.text_part import TextPart

# What the tensor with a weight's numbers is called behind the layer's name. Of stacked experts the
# tensor has the layer's name itself.
_CODES = re.compile(r"\.(?:weight|weight_packed|qweight)$|(?<=_proj)(?:_packed)?$")


@dataclass(frozen=True, slots=True)
class InputRounding:
    """How a product's inputs are rounded. `activations`, `columns`: as in WeightFormat. `scale`:
    the constant one, where there is one."""

    numbers: str
    activations: str
    columns: int | None = None
    scale: float | None = None


@dataclass(frozen=True)
class Weight:
    """A weight of `numel` numbers, read by `weight[...]`, as one in a file of safetensors is.
    `roundings`: of the inputs that it is multiplied with; of stacked experts one for each, else
    one, or none where inputs stay as they are."""

    name: str
    numel: int
    read: Callable[[], Tensor]
    roundings: Callable[[], list[InputRounding]] = list
    format: str = ""  # that it is stored in; empty: as numbers in 16 or 32 bits
    bits: int = 0  # of a number in that format

    def __getitem__(self, index: object) -> Tensor:
        return self.read()


def weights_of(source: FolderSource) -> dict[str, Weight]:
    """All weights of a folder, by the names that they have in it or, if it is quantised, would have
    without; of a text part those of the text alone. What the model's family has no use for (other
    heads, vision) is left out."""
    found, used = dict[str, Weight](), set[str]()
    is_text_part = isinstance(family_of(source.config.model_type), TextPart)
    for weight, names in _quantized(source):
        found[weight.name] = weight
        used |= names
    for name, own in source.names.items():
        if name not in used and not is_kv_scale(name) and not source.ignores(name):
            label = name if is_text_part else own
            found[label] = Weight(label, math.prod(source.shape(name)), _reader(source, name))
    for name, experts in _single_experts(source, found).items():
        for one in experts:
            del found[one.name]
        found[name] = _stacked(name, experts, source.config)
    return found


def formats_by_layer(weights: Iterable[Weight]) -> dict[str, dict[str, int]]:
    """How many weights are stored in which format, by their names without the layers' and experts'
    numbers. What is not quantised is left out."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for weight in weights:
        if weight.format:
            found[re.sub(r"\.\d+(?=\.)", ".*", weight.name)][weight.format] += 1
    return {name: dict(formats) for name, formats in sorted(found.items())}


def _reader(source: FolderSource, name: str) -> Callable[[], Tensor]:
    return lambda: source.read(name, tuple(slice(0, size) for size in source.shape(name)))


def _quantized(source: FolderSource) -> Iterator[tuple[Weight, set[str]]]:
    """Quantised weights, each with the names of its tensors."""
    for name, own in source.names.items():
        match = _CODES.search(name)
        if source.quantization is None or match is None or source.ignores(name):
            continue
        module, ending = name[: match.start()], match.group()
        place = module if ending in ("", "_packed") else f"{module}.weight"
        stored = stored_format(source.quantization, place, source.names)
        if stored is None or len(source.shape(name)) < 2:
            continue
        *experts, rows, columns = _whole_shape(source, module, name, stored)
        places = [Location(place)]
        if experts:
            places = [Location(place, index, experts[0]) for index in range(experts[0])]
        parts = [StoredWeight(source, one, stored, rows, columns) for one in places]
        if parts[0].names["codes"] != name:
            continue
        plain = own.removesuffix(ending) if ending else own  # whatever its author put in front
        numel = math.prod((*experts, rows, columns))
        read, roundings = _values(parts, bool(experts)), _roundings(source, parts, stored)
        shown = f"{stored.layout}, {weight_format(stored) or stored.numbers}"
        bits = NUMBERS[stored.numbers][1]
        weight = Weight(plain + place[len(module) :], numel, read, roundings, shown, bits)
        yield weight, parts[0].all_names


def _single_experts(source: FolderSource, found: Mapping[str, Weight]) -> dict[str, list[Weight]]:
    """The weights of experts, one after the other, that the folder has one by one though the
    family, and transformers with it, has them in one tensor: by its name."""
    single = defaultdict[str, list[Weight]](list)
    config = source.config
    for block in range(len(config.pattern)):
        if config.moe is None or config.letter(block) != EXPERTS:
            continue
        for expert in range(config.moe.num_experts):
            for projection in GATED:
                usual, *others = source.places(block, f"mixer.experts.{expert}.{projection}.weight")
                if usual.index is not None:
                    single[usual.name] += [found[one.name] for one in others if one.name in found]
    return {name: experts for name, experts in single.items() if experts}


def _stacked(name: str, parts: list[Weight], config: HybridModelConfig) -> Weight:
    """One weight of all experts, of the same number of parts of each."""
    assert config.moe is not None
    experts = config.moe.num_experts

    def read() -> Tensor:
        return torch.cat([part.read() for part in parts]).unflatten(0, (experts, -1))

    def roundings() -> list[InputRounding]:  # which all parts of an expert share
        return [one for part in parts[:: len(parts) // experts] for one in part.roundings()]

    numel = sum(part.numel for part in parts)
    return Weight(name, numel, read, roundings, parts[0].format, parts[0].bits)


def _whole_shape(
    source: FolderSource, module: str, name: str, stored: StoredFormat
) -> tuple[int, ...]:
    """Of a weight, from that of the tensor with its codes."""
    if f"{module}.weight_shape" in source.names:  # compressed-tensors
        return tuple(_reader(source, f"{module}.weight_shape")().tolist())
    *experts, rows, columns = source.shape(name)
    per_word = 32 // NUMBERS[stored.numbers][1]
    if stored.layout == "gptq":
        rows, columns = columns, rows * per_word
    elif stored.layout == "awq":
        rows, columns = columns * per_word, rows
    elif stored.numbers == "float4_e2m1":
        columns *= 2
    elif stored.numbers.startswith("uint"):
        columns *= per_word
    return (*experts, rows, columns)


def _values(parts: list[StoredWeight], stacked: bool) -> Callable[[], Tensor]:
    def read() -> Tensor:
        rows, columns = slice(0, parts[0].rows), slice(0, parts[0].columns)
        values = [part.values(rows, columns, torch.device("cpu")) for part in parts]
        return torch.stack(values) if stacked else values[0]

    return read


def _roundings(
    source: FolderSource, parts: list[StoredWeight], stored: StoredFormat
) -> Callable[[], list[InputRounding]]:
    def roundings() -> list[InputRounding]:
        if stored.activations == "none":
            return []
        scales: list[float | None] = [None] * len(parts)
        if stored.activations == "tensor":
            given = _reader(source, parts[0].names["input"])().float().flatten()
            scales = [float(one) for one in given.expand(len(parts))]
        columns = None if stored.block is None else stored.block[1]
        return [InputRounding(stored.numbers, stored.activations, columns, s) for s in scales]

    return roundings
