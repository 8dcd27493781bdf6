"""What a checkpoint's tensors have to be: shaped as the configuration says, all of use, and the
same where the model has one weight for several of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.layers.rope import inverse_frequencies
from megatron_hybrid.models.checkpoints.weight_source import WeightNames, WeightSource
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families.family import ROTARY_TABLE, Location


def check_shape(source: WeightSource, place: Location, shape: tuple[int, ...]) -> None:
    """`shape`: the role's. Raises WeightsError for another one."""
    expected = (shape[0] * place.parts, *shape[1:])
    if place.index is not None:
        expected = (place.stacked, *expected)
    stored = source.shape(place.name)
    if stored != expected:
        raise WeightsError(
            f"Weight {place.name!r} has shape {list(stored)}; the configuration makes it "
            f"{list(expected)}."
        )


def check_all_used(
    source: WeightSource, names: WeightNames, config: HybridModelConfig, used: Collection[str]
) -> None:
    """Raise WeightsError for a tensor that no part of the model is from."""
    for name in sorted(source.names.keys() - set(used)):
        if not names.ignores(config, name):
            raise WeightsError(
                f"Weight {source.names[name]!r} in {source.where} has no place in a "
                f"{config.model_type} model of this configuration."
            )


def check_same(
    source: WeightSource,
    names: WeightNames,
    config: HybridModelConfig,
    place: Location,
    copy: Location,
    read: Callable[[Location], Tensor],
) -> None:
    """Raise WeightsError unless a role has the same values in two places. `read`: of a place."""
    first, second = read(place), read(copy)
    if torch.equal(first, second.to(first.device, first.dtype)):
        return
    advice = ""
    if copy in names.places(config, None, "lm_head"):
        advice = ' A head of its own needs "tie_word_embeddings": false in config.json.'
    raise WeightsError(
        f"Weights {source.names[place.name]!r} and {source.names[copy.name]!r} in {source.where} "
        f"have different values, but a {config.model_type} model of this configuration has one "
        f"weight for both.{advice}"
    )


def check_rotary_tables(source: WeightSource, config: HybridModelConfig) -> None:
    """Old checkpoints hold the frequencies of the rotary embedding, which are made anew from the
    configuration. Raises WeightsError where that would give others. (Scaled ones can't be compared:
    some versions stored them before scaling.)"""
    if config.rope is None or config.rope.kind != "default":
        return
    expected = inverse_frequencies(config.rope)
    for name, own in source.names.items():
        if not re.search(ROTARY_TABLE, name):
            continue
        (size,) = expected.shape
        if source.shape(name) == (size,):
            table = source.read(name, (slice(0, size),)).cpu()
            # Rounded to what is stored, where the smallest ones are close to nothing.
            ours = expected.cpu().to(table.dtype)
            if torch.allclose(table.float(), ours.float(), rtol=1e-2, atol=1e-7):
                continue
        raise WeightsError(
            f"Weight {own!r} in {source.where} holds other frequencies than rope_theta "
            f"{config.rope.theta:g} and {config.rope.rotary_dim} rotated dimensions give, which "
            "config.json says."
        )
