"""transformers' model of a folder: whole, or one decoder layer in memory at a time.

Its arithmetic is transformers'; what quantised weights mean is ours (models/checkpoints)."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from megatron_hybrid.verify.dequantized import Weight

Sequences = Sequence[tuple[int, ...]]
SHORT_CHUNK = 16  # of Mamba2: transformers' own code takes memory in proportion
_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks)\.(\d+)\.")


class OracleUnavailable(Exception):
    """Why there is nothing to compare with, in a sentence."""


class Oracle:
    """Next-token log-probabilities, by a full recompute without any cache.

    `folder`: with config.json. `by_layer`: the weights of one decoder layer are in memory at a
    time, and read again for each call of `logprobs`. Raises OracleUnavailable for a model that
    transformers does not have, or has another way.
    """

    def __init__(
        self,
        folder: str,
        weights: Mapping[str, Weight],
        *,
        device: torch.device,
        dtype: torch.dtype,
        by_layer: bool,
    ) -> None:
        self._device, self._dtype = device, dtype
        self._weights: dict[int | None, dict[str, Weight]] = defaultdict(dict)
        try:
            self.model = _empty_model(folder, dtype)
            self._layers: Sequence[nn.Module] = _decoder_layers(self.model)
        except Exception as error:  # whatever a library says about what it does not know
            raise OracleUnavailable(f"transformers can't make this model: {error}") from error
        _check_gated_norms(self.model)
        for name, weight in weights.items():
            found = _LAYER.search(name)
            self._weights[int(found[1]) if found and by_layer else None][name] = weight
        self._move_buffers()
        self._load(None)
        if by_layer:
            self._load_when_needed()
        self.model.eval()
        missing = [
            name
            for name, value in self.model.state_dict().items()
            if value.is_meta and not (by_layer and _LAYER.search(name))
        ]
        if missing:
            raise OracleUnavailable(f"transformers finds no weight for {missing[0]}.")

    @property
    def is_by_layer(self) -> bool:
        """Whether one layer is in memory at a time."""
        return len(self._weights) > 1

    @torch.no_grad()
    def logprobs(self, sequences: Sequences) -> Iterator[Tensor]:
        """Of each sequence [tokens, vocabulary], float32 on the CPU: row i is what follows token
        i."""
        # What comes after a sequence changes nothing in it: one pass reads each layer once.
        batches = [list(sequences)] if self.is_by_layer else [[one] for one in sequences]
        for batch in batches:
            longest = max(map(len, batch))
            padded = [[*tokens, *[0] * (longest - len(tokens))] for tokens in batch]
            tokens = torch.tensor(padded, device=self._device)
            with _plain_functions(self.model):
                logits = self.model(tokens, use_cache=False).logits
            for row, tokens_of_row in zip(logits, batch, strict=True):
                yield torch.log_softmax(row[: len(tokens_of_row)].float(), -1).cpu()

    def _load_when_needed(self) -> None:
        for index, layer in enumerate(self._layers):

            def load(module: nn.Module, args: Any, index: int = index) -> None:
                self._load(index)
                if any(value.is_meta for value in module.state_dict().values()):
                    raise OracleUnavailable(
                        f"transformers does not find all weights of layer {index}."
                    )

            layer.register_forward_pre_hook(load)
            layer.register_forward_hook(lambda module, args, output: _drop(module))

    def _load(self, group: int | None) -> None:
        """Read weights of one layer, or those outside of layers, by transformers' own rules for
        names and for what is stacked or joined."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        with _quiet():
            info, _ = convert_and_load_state_dict_in_model(
                self.model,
                self._weights[group],
                LoadStateDictConfig(
                    dtype=self._dtype,
                    dtype_plan=self.model._get_dtype_plan(self._dtype),
                    device_map={"": self._device},
                    weight_mapping=get_model_conversion_mapping(self.model),
                ),
            )
            if group is None:
                self.model.tie_weights()
        wrong = [*info.mismatched_keys, *info.conversion_errors]
        if wrong:
            raise OracleUnavailable(f"transformers has another shape for {wrong[0]}.")

    def _move_buffers(self) -> None:
        """Tables that no checkpoint has."""
        for module in self.model.modules():
            for name, value in module._buffers.items():
                if value is not None and not value.is_meta:
                    module._buffers[name] = value.to(self._device)


def numbers_in(weights: Mapping[str, Weight]) -> tuple[int, int]:
    """How many numbers a model has, and how many of them its largest layer and what is outside of
    layers have together."""
    layers: dict[int, int] = defaultdict(int)
    outside = 0
    for name, weight in weights.items():
        if found := _LAYER.search(name):
            layers[int(found[1])] += weight.numel
        else:
            outside += weight.numel
    return sum(layers.values()) + outside, max(layers.values(), default=0) + outside


def _empty_model(folder: str, dtype: torch.dtype) -> Any:
    """Parameters without memory; tables that are computed from the configuration with theirs."""
    from transformers import AutoModelForCausalLM

    with _quiet():
        config = _text_config(folder)
        for one in (config, config.get_text_config()):
            with contextlib.suppress(AttributeError):
                del one.quantization_config
            for name in ("chunk_size", "mamba_chunk_size"):
                if isinstance(getattr(one, name, None), int):
                    setattr(one, name, min(getattr(one, name), SHORT_CHUNK))
            if hasattr(one, "rescale_every"):  # of RWKV, which halves its weights when first asked
                one.rescale_every = 0
        with _parameters_without_memory():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        with contextlib.suppress(Exception):  # each expert by itself, where there are any
            model.set_experts_implementation("eager")
    return model


def _check_gated_norms(model: Any) -> None:
    """Raise OracleUnavailable for transformers before 5.23, which norms all groups of some models
    at once, where mamba-ssm and whoever trains with it norm each."""
    config = model.config.get_text_config()
    groups = getattr(config, "mamba_n_groups", None) or getattr(config, "n_groups", None) or 1
    for module in model.modules():
        is_gated_norm = type(module).__name__.endswith("RMSNormGated")
        if groups > 1 and is_gated_norm and not {"group_size", "n_groups"} & set(vars(module)):
            raise OracleUnavailable(
                f"transformers {version('transformers')} norms {groups} groups of "
                f"{config.model_type} at once, which is wrong; 5.23 is right."
            )


def _decoder_layers(model: Any) -> Sequence[nn.Module]:
    inner = getattr(model, model.base_model_prefix)
    layers: Sequence[nn.Module] = getattr(inner, "layers", None) or inner.blocks
    return layers


def ties_layers(folder: str) -> bool:
    """Whether layers of this model share weights, so that it must be whole."""
    return bool(_config(folder).model_type in ("zamba", "zamba2"))


def _config(folder: str) -> Any:
    from transformers import AutoConfig

    # Code that comes with a folder is not run, and nobody is asked whether it may be.
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _text_config(folder: str) -> Any:
    """Of a model that also sees or hears the text part's, which is a model of its own."""
    whole = _config(folder)
    text = whole.get_text_config()
    if text is not whole and hasattr(whole, "tie_word_embeddings"):
        text.tie_word_embeddings = whole.tie_word_embeddings
    return text


@contextlib.contextmanager
def _parameters_without_memory() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, value: nn.Parameter | None) -> None:
        register(module, name, value)
        if value is not None:
            _forget(module, name)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _forget(module: nn.Module, name: str) -> None:
    value = module._parameters[name]
    if value is not None:
        module._parameters[name] = nn.Parameter(value.detach().to("meta"), requires_grad=False)


def _drop(layer: nn.Module) -> None:
    for module in layer.modules():
        for name in list(module._parameters):
            _forget(module, name)


@contextlib.contextmanager
def _plain_functions(model: nn.Module) -> Iterator[None]:
    """transformers' own code, where it would call mamba-ssm's, causal-conv1d's or another package's
    functions: these round float32, and fail on a CPU."""
    replaced: list[tuple[ModuleType, str, Any]] = []
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        for name, function in vars(module).items():
            if inspect.isfunction(function) and hasattr(function, "__wrapped__"):
                replaced.append((module, name, function))
    try:
        for module, name, function in replaced:
            setattr(module, name, _with_known_arguments(function.__wrapped__))
        yield
    finally:
        for module, name, function in replaced:
            setattr(module, name, function)


def _with_known_arguments(function: Callable[..., Any]) -> Callable[..., Any]:
    """Which takes any others, too, and ignores them, as transformers' wrappers do."""
    known = inspect.signature(function).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in known.values()):
        return function

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{name: kwargs[name] for name in kwargs if name in known})

    return call


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
