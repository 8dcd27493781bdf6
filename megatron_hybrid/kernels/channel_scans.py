"""What recurrences are called with that are in plain torch alone: Griffin's, RWKV's, xLSTM's."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class RGLRUTokens(NamedTuple):
    """A row a token; rows may be strided."""

    x: Tensor  # [T, channels], gated and scaled: what is added to the state
    gate: Tensor  # [T, channels], the recurrence gate before the sigmoid

    @property
    def like(self) -> Tensor:
        """The output's shape and dtype."""
        return self.x

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """What goes into the state, and a ring keeps of a token."""
        return self.x, self.gate


class RGLRUConstants(NamedTuple):
    """Of one layer, float32."""

    decay: Tensor  # [channels], negative: the log of a state's decay where the gate is wide open
    rounding_seed: int | None = None  # see RoundsStates


class WKVTokens(NamedTuple):
    """A row a token; rows may be strided."""

    k: Tensor  # [T, channels], the log of the token's weight
    v: Tensor  # [T, channels]

    @property
    def like(self) -> Tensor:
        """The output's shape and dtype."""
        return self.v

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """What goes into the state, and a ring keeps of a token."""
        return self.k, self.v


class WKVConstants(NamedTuple):
    """Of one layer, float32."""

    decay: Tensor  # [channels], negative: what a token's log weight loses with each later one
    bonus: Tensor  # [channels], of the log weight of the token itself
    rounding_seed: int | None = None  # see RoundsStates


class MLSTMTokens(NamedTuple):
    """A row a token; rows may be strided."""

    q: Tensor  # [T, heads, k_dim]
    k: Tensor  # [T, heads, k_dim]
    v: Tensor  # [T, heads, v_dim]
    i: Tensor  # [T, heads], the input gate: the log of a token's weight
    f: Tensor  # [T, heads], the forget gate before the sigmoid

    @property
    def like(self) -> Tensor:
        """The output's shape and dtype."""
        return self.v

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """What goes into the state, and a ring keeps of a token."""
        return self.k, self.v, self.i, self.f


class MLSTMConstants(NamedTuple):
    """Of one layer."""

    eps: float  # in the denominator
    rounding_seed: int | None = None  # see RoundsStates
