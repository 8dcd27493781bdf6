"""How positions are rotated, as config.json says it."""

from __future__ import annotations

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.rope import RopeConfig
from megatron_hybrid.models.families.model_settings import ModelSettings

_KINDS = ("default", "linear", "llama3", "proportional")


def rope_of(
    said: ModelSettings, head_dim: int, partial_rotary_factor: float | None, theta: float
) -> RopeConfig:
    """The rotation that `said`, the values of rope_parameters, describe. The factor and theta given
    are the family's defaults; factor None: a family whose heads are rotated whole, whatever is
    said. Raises ConfigurationError for what is not supported."""
    kind = said.get("rope_type", "type", default="default")
    if kind not in _KINDS:
        raise ConfigurationError(
            f"RoPE of type {kind!r} in {said.where} is not supported, only 'default', 'linear', "
            "'llama3' and 'proportional' are."
        )
    theta = said.number("rope_theta", default=theta)
    partial = said.number("partial_rotary_factor", default=partial_rotary_factor or 1.0)
    if kind == "proportional":  # of all dimensions, some by an angle of 0
        factor = said.number("factor", default=1.0)
        return RopeConfig(theta, _even(said, head_dim, head_dim), kind, factor, rotated=partial)
    rotary_dim = _even(said, head_dim, int(head_dim * partial))
    if partial_rotary_factor is None and rotary_dim != head_dim:
        raise ConfigurationError(
            f"partial_rotary_factor = {partial} in {said.where}, which is not supported, only 1.0 "
            f"is: heads of {said.get('model_type')} are rotated whole."
        )
    if kind == "default":
        return RopeConfig(theta, rotary_dim)
    factor = said.number("factor")
    if kind == "linear":
        return RopeConfig(theta, rotary_dim, kind, factor)
    return RopeConfig(
        theta,
        rotary_dim,
        kind,
        factor,
        low_freq_factor=said.number("low_freq_factor"),
        high_freq_factor=said.number("high_freq_factor"),
        original_max_position=said.whole("original_max_position_embeddings"),
    )


def _even(said: ModelSettings, head_dim: int, rotary_dim: int) -> int:
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigurationError(
            f"{said.where} has {rotary_dim} of the {head_dim} numbers of a head rotated; they must "
            "be an even number."
        )
    return rotary_dim
