"""What sampling kernels are called with."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Filters(NamedTuple):
    """What tokens may be drawn, by row: [rows] each."""

    temperature: Tensor  # float32, above 0
    top_k: Tensor  # int32; 0 or less: off
    top_p: Tensor  # float32; 1: off
    min_p: Tensor  # float32; 0: off
    # False when no row uses the filter; a row's token does not depend on these.
    uses_top_k: bool = True
    uses_top_p: bool = True
    uses_min_p: bool = True


class Sampling(Protocol):
    """Logits to tokens."""

    def draw(self, logits: Tensor, filters: Filters, point: Tensor) -> Tensor:
        """logits [rows, vocabulary] in any float type, point [rows] float64 in [0, 1) -> token ids
        [rows] int64.

        top-k first, then top-p and min-p of what is left; the most likely token always stays.
        """

    def penalise(
        self, logits: Tensor, counts: Tensor, in_prompt: Tensor, repetition: Tensor,
        frequency: Tensor, presence: Tensor, /,
    ) -> Tensor:  # fmt: skip
        """logits float32, counts int16 (of the answer), in_prompt bool, all [rows, vocabulary]; the
        penalties float32 [rows] -> logits [rows, vocabulary], as in SamplingParams: repetition
        first, then the other two, of which a row without them (1, 0, 0) notices nothing."""

    def log_softmax(self, logits: Tensor) -> Tensor:
        """logits [rows, vocabulary] in any float type -> the same in float32."""

    def argmax(self, logits: Tensor) -> Tensor:
        """logits [rows, vocabulary] in any float type -> the most likely tokens [rows] int64; of
        equal logits the lowest id. NaNs give some token of the vocabulary."""
