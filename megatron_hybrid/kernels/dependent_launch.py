"""Programmatic dependent launch: a kernel that starts while the one before it ends.

A kernel that was launched with OPTIONS may start as soon as all programs of the kernel before it
have called `let_next_start` or ended, and waits in `wait_for_inputs` until all that this one wrote
can be read. Before that it may read weights alone, and write nothing: what it is going to write may
still be read. With `let_next_start` behind `wait_for_inputs` in every kernel, all kernels but the
one right before are done when a kernel starts, so what they wrote may be read, too.

Weights that are overwritten are safe: that is done by kernels which know nothing of this, and
others, the lookup of embeddings among them, come between those and a layer's.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs


def _is_supported() -> bool:
    if knobs.runtime.interpret or not torch.cuda.is_available() or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


ENABLED = tl.constexpr(_is_supported())
OPTIONS: dict[str, Any] = {"launch_pdl": True} if ENABLED.value else {}


@triton.jit
def wait_for_inputs():
    """Until the kernel before this one is done."""
    if ENABLED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start():
    """The kernel behind this one may start when all programs have called this."""
    if ENABLED:
        tl.extra.cuda.gdc_launch_dependents()
