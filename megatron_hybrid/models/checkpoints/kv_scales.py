"""The scales that checkpoints bring for keys and values in FP8: one number each for a layer."""

from __future__ import annotations

import logging
import math
import re
from typing import TYPE_CHECKING

from megatron_hybrid.errors import WeightsError

if TYPE_CHECKING:
    from megatron_hybrid.models.checkpoints.weight_source import WeightSource
    from megatron_hybrid.models.hybrid_model import HybridModel

logger = logging.getLogger(__name__)


def is_kv_scale(name: str) -> bool:
    """Whether a tensor is one, or another of attention in FP8. Who stores keys and values in
    another type has no use for it."""
    return re.search(r"\.(?:[kvq]|kv|prob_output)_scale$", name) is not None


def scale_names(projection: str, letter: str) -> list[str]:
    """Where a checkpoint may have the scale of keys ("k") or values ("v"). `projection`: the name
    of the attention's weight that makes its keys."""
    attention = projection.rsplit(".", 2)[0]
    layer, scale = attention.rpartition(".")[0], f"{letter}_scale"
    return [
        f"{attention}.{letter}_proj.{scale}",  # ModelOpt
        f"{attention}.{scale}",  # compressed-tensors
        f"{attention}.attn.{scale}",
        f"{layer}.attn.{scale}",
    ]


def read_kv_scales(model: HybridModel, source: WeightSource) -> None:
    """Give each attention of this rank the scales that `source` has for it; the others keep 1.
    Raises WeightsError for one that is no positive number, or is there with different values."""
    layers = list(model.attentions())
    found = 0
    for block, role, attention in layers:
        projection = source.places(block, role)[0].name
        k_scale, v_scale = (_read(source, scale_names(projection, letter)) for letter in "kv")
        found += k_scale is not None or v_scale is not None
        attention.scale_by(1.0 if k_scale is None else k_scale, 1.0 if v_scale is None else v_scale)
    if model.parallel.is_first and layers:
        logger.info(
            "keys and values in FP8: the checkpoint has scales for %d of %d layers; others have 1",
            found,
            len(layers),
        )


def _read(source: WeightSource, names: list[str]) -> float | None:
    """The number that these names stand for; None where none of them is there."""
    known: dict[str, float] = {}
    for name in names:
        if name not in source.names:
            continue
        shape = source.shape(name)
        if math.prod(shape) != 1:
            raise WeightsError(
                f"Weight {source.names[name]!r} in {source.where} has shape {list(shape)}; a scale "
                "of keys or values is one number for a whole layer."
            )
        value = float(source.read(name, ()).float())
        if not 0.0 < value < math.inf:
            raise WeightsError(
                f"Weight {source.names[name]!r} in {source.where} is {value}; a scale must be a "
                "positive number."
            )
        known[source.names[name]] = value
    if len(set(known.values())) > 1:
        raise WeightsError(f"{known} in {source.where} are scales of the same keys or values.")
    return next(iter(known.values()), None)
