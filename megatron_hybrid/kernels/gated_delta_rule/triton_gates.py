"""What the Triton kernels of the gated delta rule know of a token's decay and beta: one decay of a
head, or, of Kimi delta attention, one of each channel of its keys."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from megatron_hybrid.kernels.gated_delta_rule.triton_keys import load_keys, store_keys
from megatron_hybrid.kernels.mamba2_scan.triton_decode import LOG2_E
from megatron_hybrid.kernels.protocols import DeltaRuleConstants, DeltaRuleTokens


class Gate(NamedTuple):
    """What the kernels are compiled for; see DeltaRuleConstants."""

    by_channel: bool
    lower_bound: float | None
    beta_scale: float

    @classmethod
    def of(cls, tokens: DeltaRuleTokens, constants: DeltaRuleConstants) -> Gate:
        """Of a layer."""
        return cls(tokens.a.ndim == 3, constants.lower_bound, constants.beta_scale)


@triton.jit
def load_decay(
    row_ptr, head, n, K_DIM: tl.constexpr, KEYS: tl.constexpr, GATE: tl.constexpr
):  # fmt: skip
    """What a row, of decays or of what is added to them, has of a head: of channels n, or one."""
    if GATE.by_channel:
        found = load_keys(row_ptr + head * K_DIM + n, n, K_DIM, KEYS)
    else:
        found = tl.load(row_ptr + head)
    return found


@triton.jit
def store_decay(
    row_ptr, a, head, n, K_DIM: tl.constexpr, KEYS: tl.constexpr, GATE: tl.constexpr
):  # fmt: skip
    """The same the other way round."""
    if GATE.by_channel:
        store_keys(row_ptr + head * K_DIM + n, a, n, K_DIM, KEYS)
    else:
        tl.store(row_ptr + head, a)


@triton.jit
def gates(a, b, rate, bias, GATE: tl.constexpr):
    """log2(e) * g of what was loaded, in a's shape, and beta."""
    moved = a.to(tl.float32) + bias
    if GATE.lower_bound is None:
        g = _softplus(moved) * rate
    else:
        g = (GATE.lower_bound * LOG2_E) * tl.sigmoid(-rate * moved)
    beta = tl.sigmoid(b.to(tl.float32))
    if GATE.beta_scale != 1.0:
        beta *= GATE.beta_scale
    return g, beta


@triton.jit
def _softplus(z):
    """log2(e) log(1 + e^z), which is log2(1 + e) with e = e^-|z|, and for z above 0 log2(e) z more.
    log2(1 + e) / e is a polynomial between 0 and 1, good to 4e-7, also where 1 + e has lost e's
    digits: the device's own logarithm takes twice the instructions."""
    e = tl.exp2(tl.abs(z) * -LOG2_E)
    ratio = 0.0637875944 - 0.0123706432 * e
    ratio = ratio * e - 0.1555999666
    ratio = ratio * e + 0.2561796904
    ratio = ratio * e - 0.3534546793
    ratio = ratio * e + 0.480073750
    ratio = ratio * e - 0.7213107347
    ratio = ratio * e + 1.4426947832
    return tl.maximum(z, 0.0) * LOG2_E + ratio * e


@triton.jit
def gates_at(
    a, b, rate_ptr, bias_ptr, head, n, K_DIM: tl.constexpr, KEYS: tl.constexpr, GATE: tl.constexpr
):  # fmt: skip
    """The same of a head's constants."""
    bias = load_decay(bias_ptr, head, n, K_DIM, KEYS, GATE)
    return gates(a, b, tl.load(rate_ptr + head), bias, GATE)


@triton.jit
def decayed(s, decay, GATE: tl.constexpr):
    """A state [rows, ...channels] times 2 to the power of its decay, of each channel or of all."""
    factor = tl.exp2(decay)
    if GATE.by_channel:
        factor = tl.expand_dims(factor, 0)
    return s * factor
