"""Heads of the gated delta rule whose keys may have any multiple of 8 dimensions: programs have
KEYS columns of a state, a power of two, of which the first K_DIM are there. Where all of them are,
these functions leave nothing behind."""

from __future__ import annotations

import triton
import triton.language as tl

from megatron_hybrid.kernels.launching import next_power_of_2

_MOST_KEYS = 128  # dimensions of a key


def check_dims(k_dim: int, v_dim: int) -> int:
    """Columns of a program's state, KEYS: a power of two from k_dim on. Raises ValueError for
    dimensions that the kernels do not take."""
    if k_dim % 8 or v_dim % 16 or k_dim > _MOST_KEYS:
        raise ValueError(
            f"Heads of the gated delta rule have {k_dim} key and {v_dim} value dimensions; the "
            f"Triton kernels take multiples of 8 for keys, up to {_MOST_KEYS}, and of 16 for "
            "values."
        )
    return max(next_power_of_2(k_dim), 16)


def rows_of(v_dim: int, most: int) -> int:
    """The largest power of two that divides v_dim, up to `most`."""
    return min(v_dim & -v_dim, most)


@triton.jit
def of_keys(mask, n, K_DIM: tl.constexpr, KEYS: tl.constexpr):
    """A mask of columns n of KEYS, without those that no key has."""
    if KEYS != K_DIM:
        mask = mask & (n < K_DIM)
    return mask


@triton.jit
def load_keys(ptrs, n, K_DIM: tl.constexpr, KEYS: tl.constexpr):
    """Columns n of KEYS; zeros where no key has any."""
    if KEYS == K_DIM:
        found = tl.load(ptrs)
    else:
        found = tl.load(ptrs, mask=n < K_DIM, other=0.0)
    return found


@triton.jit
def store_keys(ptrs, values, n, K_DIM: tl.constexpr, KEYS: tl.constexpr):
    """Columns n of KEYS that keys have."""
    if KEYS == K_DIM:
        tl.store(ptrs, values)
    else:
        tl.store(ptrs, values, mask=n < K_DIM)
