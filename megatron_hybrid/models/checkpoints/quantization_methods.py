"""How each library says which weights it quantised, and how: a rule for each quant_method. Keys and
their meaning are those of the libraries' own configurations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.models.checkpoints.quantized_names import NamedModules


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """How the weight of one linear layer is stored in a checkpoint."""

    layout: str  # which tensors there are: fp8, modelopt, compressed_tensors, gptq, awq
    numbers: str  # float8_e4m3fn, int8, uint4, uint8, float4_e2m1
    scales: str  # tensor, channel, block, group
    block: tuple[int, int] | None = None  # rows, columns of a block
    group_size: int | None = None  # columns of a group; None with scales "group": a whole row
    symmetric: bool = True  # False: with zero points
    act_order: bool = False  # with g_idx
    # What inputs are rounded to. none: they stay in 16 bits; token: a scale for each, computed;
    # tensor: one, stored; tensor_dynamic: one, computed; group: for each token and block[1] columns
    activations: str = "none"
    version: str = ""  # of layout gptq: gptq (stores zero - 1) or gptq_v2


Rule = Callable[[str], StoredFormat | None]


@dataclass(frozen=True)
class Said:
    """An object of a quantisation's configuration, and where it is."""

    values: Mapping[str, Any]
    where: str
    part: str = ""  # for instance "config_groups.group_0."

    def get(self, name: str, default: Any = None) -> Any:
        """What is there and not null."""
        value = self.values.get(name)
        return default if value is None else value

    def only(self, name: str, *supported: Any, default: Any = None) -> Any:
        """The same; raises ConfigurationError for a value that is not among `supported`."""
        value = self.get(name, default)
        if value not in supported:
            wanted = " or ".join(repr(one) for one in supported if one)
            self.refuse(name, f"only {wanted} is" if wanted else "")
        return value

    def inner(self, name: str) -> Said:
        """The object inside this one; an empty one where there is none."""
        values = self.get(name, {})
        if not isinstance(values, Mapping):
            self.refuse(name, "it has to be an object")
        return Said(values, self.where, f"{self.part}{name}.")

    def inners(self, name: str) -> Iterator[tuple[str, Said]]:
        """The objects inside the object inside this one."""
        several = self.inner(name)
        return ((key, several.inner(key)) for key in several.values)

    def names(self, name: str) -> list[str]:
        """A list of names; an empty one where there is none."""
        listed = self.get(name, [])
        if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
            self.refuse(name, "it has to be a list of names")
        return listed

    def algo(self, name: str) -> str | None:
        """ModelOpt's name of an algorithm, without regard to how it is spelled."""
        value = self.get(name)
        return None if value is None else _ALIASES.get(str(value).upper(), str(value).upper())

    def refuse(self, name: str, why: str = "") -> NoReturn:
        """Raise ConfigurationError for a value."""
        shown = repr(self.get(name))
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise ConfigurationError(
            f"{self.where}: the quantisation's {self.part}{name} = {shown} is not supported"
            f"{', ' * bool(why)}{why}."
        )


def method_of(said: Said) -> str:
    """quant_method; ModelOpt's older files name only their producer."""
    method = said.get("quant_method")
    if method is None and said.inner("producer").get("name") == "modelopt":
        method = "modelopt"
    if method is None:
        raise ConfigurationError(
            f"{said.where} has a quantization_config without a quant_method; those that are read: "
            f"{', '.join(_RULES)}."
        )
    name = str(method).lower()
    return "modelopt" if name.startswith("modelopt") else name


def rule_of(method: str, said: Said) -> Rule:
    """What gives each module's format. Raises ConfigurationError for a method or anything in it
    that is not supported."""
    if method not in _RULES:
        raise ConfigurationError(
            f"{said.where} says that the weights were quantised with {method!r}, which is not "
            f"read; those that are: {', '.join(_RULES)}."
        )
    return _RULES[method](said)


def kv_cache_of(said: Said) -> str | None:
    """ "fp8_e4m3" where there is one scale for a layer's keys, and one for its values. Scales of
    other caches are of no use: keys and values then stay as they are computed."""
    scheme = said.get("kv_cache_scheme")
    if isinstance(scheme, str):
        return "fp8_e4m3" if scheme.upper() == "FP8" else None
    if not isinstance(scheme, Mapping) or scheme.get("dynamic"):
        return None
    kind = (scheme.get("type"), scheme.get("num_bits"), scheme.get("strategy") or "tensor")
    return "fp8_e4m3" if kind == ("float", 8, "tensor") else None


def _listed(said: Said, names: Iterable[str]) -> NamedModules[bool]:
    return NamedModules(((name, True) for name in names), said.where)


def _regex(name: str) -> str:
    """An entry, where a library takes names for regular expressions that end at a dot."""
    return name if re.fullmatch(r"[\w.-]+", name) else rf"re:(?:{name})(?:(?<=\.)|(?=\.|$))"


def _pair(said: Said, name: str) -> tuple[int, int]:
    """Rows and columns of a block, which may also stand there as "128x128"."""
    value = said.get(name)
    try:
        rows, columns = map(int, value.split("x") if isinstance(value, str) else value)
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        said.refuse(name, "it has to be [rows, columns]")
    return rows, columns


def _columns(said: Said) -> int | None:
    """Of a group; None for -1, a whole row."""
    size = said.get("group_size")
    if not isinstance(size, int) or (size <= 0 and size != -1):
        said.refuse("group_size", "it has to be the columns of a group, or -1")
    return None if size == -1 else size


# What these libraries never quantise and need not list: it is no linear layer there, or left out.
_NEVER = (
    "gate", "router", "router.layer", "shared_expert_gate", "embed_tokens", "embeddings", "conv1d",
)  # fmt: skip


# --- fp8: transformers' FineGrainedFP8Config


def _fp8(said: Said) -> Rule:
    said.only("fmt", "e4m3", default="e4m3")
    said.only("scale_fmt", "float", default="float")
    said.only("expert_dtype", "fp8", default="fp8")
    said.only("modules_to_convert", None, [])
    stored = StoredFormat("fp8", "float8_e4m3fn", "tensor", activations="token")
    if said.get("weight_block_size") is not None:
        said.only("activation_scheme", "dynamic", default="dynamic")
        block = _pair(said, "weight_block_size")
        stored = replace(stored, scales="block", block=block, activations="group")
    elif said.only("activation_scheme", "dynamic", "static", default="dynamic") == "static":
        stored = replace(stored, activations="tensor")
    names = said.names("modules_to_not_convert") + said.names("ignored_layers")
    kept = _listed(said, [*map(_regex, names), *_NEVER, "lm_head"])
    return lambda module: None if kept.find(module, False) else stored


# --- modelopt: NVIDIA's Model Optimizer

_OLD_NAMES = {"exclude_modules": "ignore", "kv_cache_quant_algo": "kv_cache_scheme"}
_ALIASES = {"FP8_BLOCK_SCALES": "FP8_PB_WO"}
_FP8 = StoredFormat("modelopt", "float8_e4m3fn", "tensor", activations="tensor")
_NVFP4 = StoredFormat("modelopt", "float4_e2m1", "group", group_size=16)
_ALGOS = {
    "FP8": _FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": replace(_FP8, scales="channel", activations="token"),
    # "Weight only" is how it was calibrated; other engines serve it with inputs in FP8 as well.
    "FP8_PB_WO": replace(_FP8, scales="block", block=(128, 128), activations="group"),
    # Hopper has no products of 4-bit floats, so inputs stay in 16 bits.
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
}


def modelopt_values(file: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What either of ModelOpt's files says, without nulls, by the names of the newer one."""
    values = Said(file, where).inner("quantization").values or file
    return {_OLD_NAMES.get(key, key): one for key, one in values.items() if one is not None}


def _modelopt(said: Said) -> Rule:
    algo, ignored = said.algo("quant_algo"), said.names("ignore")
    says_of_weights = said.get("config_groups") or said.get("quantized_layers")
    if algo is None and not says_of_weights and said.get("kv_cache_scheme") is not None:
        return lambda module: None  # only the cache is in FP8
    if algo == "MIXED_PRECISION":
        formats = [(name, _algo(layer)) for name, layer in said.inners("quantized_layers")]
        if not formats:
            said.refuse("quantized_layers", "with MIXED_PRECISION it has to name every layer")
        kept, named = _listed(said, ignored), NamedModules(formats, said.where)
        return lambda module: None if kept.find(module, False) else named.find(module, None)
    stored = _algo(said)
    for _, group in said.inners("config_groups"):
        weights = group.inner("weights")
        weights.only("num_bits", None, 4 if stored.numbers == "float4_e2m1" else 8)
        if stored.group_size is not None:
            weights.only("group_size", None, stored.group_size)
    # It leaves what predicts further tokens as it is, and lists it only where it saw it.
    kept = _listed(said, [*ignored, *_NEVER, "mtp"])
    return lambda module: None if kept.find(module, False) else stored


def _algo(said: Said) -> StoredFormat:
    stored = _ALGOS.get(said.algo("quant_algo") or "")
    if stored is None:
        said.refuse("quant_algo", f"only {', '.join(_ALGOS)} and MIXED_PRECISION are")
    if stored.group_size is not None:
        said.only("group_size", None, stored.group_size)
    return stored


# --- compressed-tensors: llm-compressor

_FLOAT, _INT = {("float", 8): "float8_e4m3fn"}, {("int", 8): "int8"}
_NUMBERS = {  # of each format, by type and bits
    "float-quantized": _FLOAT,
    "int-quantized": _INT,
    "naive-quantized": _FLOAT | _INT,
    "pack-quantized": {("int", 4): "uint4", ("int", 8): "uint8"},
    "nvfp4-pack-quantized": {("float", 4): "float4_e2m1"},
}
_WITH_G_IDX = ("group", "dynamic", True)


def _compressed_tensors(said: Said) -> Rule:
    said.only("quantization_status", None, "compressed", "frozen")
    said.inner("sparsity_config").only("format", None, "dense")
    said.only("transform_config", None, {})
    named: list[tuple[str, StoredFormat]] = []
    for name, group in said.inners("config_groups"):
        stored = _group(group, group if group.get("format") is not None else said)
        for target in group.names("targets"):
            if target != "Linear" and re.fullmatch(r"[A-Z]\w*", target):
                group.refuse("targets", "of the classes of modules only 'Linear' is")
            if target == "Linear" and any(other == target for other, _ in named):
                said.refuse("config_groups", f"{name} is the second for every 'Linear'")
            named.append((target, stored))
    if not named:
        said.refuse("config_groups", "they have to say what is quantised")
    linear, formats = dict(named).get("Linear"), NamedModules(named, said.where)
    ignored = _listed(said, said.names("ignore"))
    return lambda module: None if ignored.find(module, False) else formats.find(module, linear)


def _group(group: Said, has_format: Said) -> StoredFormat:
    """How the weights of a group are stored; `has_format`: it, or what is around it."""
    weights = group.inner("weights")
    group.only("output_activations", None)
    weights.only("dynamic", False, default=False)
    numbers = _NUMBERS[has_format.only("format", *_NUMBERS)]
    kind, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    if (kind, bits) not in numbers:
        wanted = " or ".join(f"{bits} of type {kind!r}" for kind, bits in numbers)
        weights.refuse("num_bits", f"in the format {has_format.get('format')!r} only {wanted} is")
    size = weights.get("group_size")
    guess = "tensor" if size is None else "channel" if size == -1 else "group"  # the library's
    kinds = ("tensor", "channel", "block", "group", "tensor_group")
    scales = weights.only("strategy", *kinds, default=guess).removeprefix("tensor_")
    symmetries = (True,) if kind == "float" else (True, False)
    actorder = weights.only("actorder", None, False, "static", "weight", *_WITH_G_IDX)
    stored = StoredFormat(
        "compressed_tensors",
        numbers[kind, bits],
        scales,
        block=_pair(weights, "block_structure") if scales == "block" else None,
        group_size=_columns(weights) if scales == "group" else None,
        symmetric=weights.only("symmetric", *symmetries, default=True),
        act_order=actorder in _WITH_G_IDX,
    )
    if stored.numbers == "float4_e2m1":
        weights.only("group_size", 16)
        return stored  # inputs stay in 16 bits, as with ModelOpt's NVFP4
    inputs = group.inner("input_activations")
    return replace(stored, activations=_inputs(inputs, stored, kind) if inputs.values else "none")


def _inputs(inputs: Said, stored: StoredFormat, kind: str) -> str:
    """What inputs are rounded to, before weights with numbers of that kind."""
    if stored.numbers in ("uint4", "uint8"):
        inputs.refuse("num_bits", "before packed weights inputs have to stay in 16 bits")
    inputs.only("type", kind, default="int")
    inputs.only("num_bits", 8, default=8)
    inputs.only("symmetric", True, default=True)
    size = inputs.get("group_size")
    if not inputs.only("dynamic", True, False, default=False):
        return str(inputs.only("strategy", "tensor", default="tensor"))
    guess = "tensor" if size is None else "group"
    strategy = str(inputs.only("strategy", "token", "tensor", "group", default=guess))
    if strategy == "group" and (stored.block is None or size != stored.block[1]):
        inputs.refuse("group_size", "it has to be the columns of the weights' blocks")
    return "tensor_dynamic" if strategy == "tensor" else strategy


# --- gptq, and what AutoRound packs in the same way


def _gptq(said: Said) -> Rule:
    version = said.only("checkpoint_format", "gptq", "gptq_v2", default="gptq")
    said.only("is_marlin_format", None, False)
    said.only("pack_dtype", None, "int32")
    stored = _packed(said, said, version)
    special: list[tuple[str, StoredFormat | None]] = []
    for pattern, other in said.inners("dynamic"):
        regex = "re:" + pattern.removeprefix("-:").removeprefix("+:")
        kept = pattern.startswith("-:")
        special.append((regex, None if kept else _packed(said, other, version)))
    formats = NamedModules(special, said.where)
    never = _NEVER if said.get("lm_head") else (*_NEVER, "lm_head")
    quantised = _in_blocks(said, said.get("modules_in_block_to_quantize"), never)
    return lambda module: formats.find(module, stored) if quantised(module) else None


def _auto_round(said: Said) -> Rule:
    packings = ("auto_round:auto_gptq", "auto_round:gptq")
    said.only("packing_format", *packings, default=packings[0])
    said.only("data_type", "int", default="int")
    said.only("act_bits", None, 16, 32)
    stored = _packed(said, said, "gptq")
    special: list[tuple[str, StoredFormat | None]] = []
    for name, other in said.inners("extra_config"):
        kept = other.get("bits") in (16, 32)
        special.append((_regex(name), None if kept else _packed(said, other, "gptq")))
    formats = NamedModules(special, said.where)
    blocks = said.get("block_name_to_quantize", said.get("to_quant_block_names"))
    quantised = _in_blocks(said, blocks, (*_NEVER, "lm_head"))
    return lambda module: formats.find(module, stored if quantised(module) else None)


def _packed(said: Said, other: Said, version: str) -> StoredFormat:
    """The format of what all layers have in common, and what is `other` for some."""
    both = Said({**said.values, **other.values}, said.where, other.part)
    return StoredFormat(
        "gptq",
        f"uint{both.only('bits', 4, 8)}",
        "group",
        group_size=_columns(both),
        symmetric=bool(both.get("sym", True)),
        act_order=bool(both.get("desc_act", False)),
        version=version,
    )


def _in_blocks(said: Said, blocks: Any, never: Iterable[str]) -> Callable[[str], bool]:
    """Whether a module is quantised at all. `blocks`: names, in a text or a list, which may be of
    lists; None: everything but what `never` is."""
    kept, named = _listed(said, never), _listed(said, _flat(blocks))
    return lambda module: named.find(module, blocks is None) and not kept.find(module, False)


def _flat(names: Any) -> list[str]:
    if isinstance(names, str):
        return [name.strip() for name in names.split(",")]
    return [name for one in names or () for name in _flat(one)]


# --- awq: AutoAWQ


def _awq(said: Said) -> Rule:
    said.only("bits", 4)
    if str(said.get("version", "gemm")).lower() != "gemm":
        said.refuse("version", "only 'gemm' is")
    symmetric = not said.get("zero_point", True)
    stored = StoredFormat("awq", "uint4", "group", group_size=_columns(said), symmetric=symmetric)
    names = said.names("modules_to_not_convert")
    kept = _listed(said, [*names, *_NEVER, "lm_head"])
    # Anywhere in a name, except that layer 1 is not layer 10.
    anywhere = [name + "." * name[-1:].isdigit() for name in names]

    def rule(module: str) -> StoredFormat | None:
        if kept.find(module, False) or any(name in f"{module}." for name in anywhere):
            return None
        return stored

    return rule


_RULES: dict[str, Callable[[Said], Rule]] = {
    "fp8": _fp8,
    "modelopt": _modelopt,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "awq": _awq,
}
