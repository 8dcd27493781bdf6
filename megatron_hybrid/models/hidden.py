"""What goes from one block of a model to the next."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Hidden(NamedTuple):
    """What goes from one block to the next. Its rows are the step's tokens, and past the last block
    in which tokens see each other those whose logits are wanted. With an MTPHead they see each
    other there."""

    residual: Tensor  # [rows, hidden]
    # [rows, hidden] of the last block, not added yet (this rank's part of it: see Mixer); None
    # before the first one
    mixed: Tensor | None
    embeddings: Tensor | None  # [rows, hidden], where a later block reads them
    # [rows, size] of the last CarriedRouter, where a later one reads it
    carried: Tensor | None = None
