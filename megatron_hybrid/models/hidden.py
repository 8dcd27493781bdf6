"""What goes from one block to the next, and from one pipeline stage to the next."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Hidden(NamedTuple):
    """Its rows are the step's tokens, and past the last block in which tokens see each other those
    whose logits are wanted. With an MTPHead they see each other there."""

    residual: Tensor  # [rows, hidden]; of several streams [rows, streams * hidden]
    # [rows, hidden] of the last block, not added yet (this rank's part of it: see Mixer); None
    # before the first one, and of several streams
    mixed: Tensor | None
    embeddings: Tensor | None  # [rows, hidden], where a later block reads them
    carried: Tensor | None = None  # [rows, size] of the last CarriedRouter, where another reads it
