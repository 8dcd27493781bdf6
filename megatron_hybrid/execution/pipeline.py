"""This rank's stage of the model, between the stages before and behind it.

What one stage hands on travels as one message, between ranks of the same tensor-parallel number.
Messages lie in static memory: a CUDA graph reads the one that was received and writes the one that
is sent, and sending and receiving are enqueued on the stream before and after it.

message  residual [rows, hidden] | mixed [rows, hidden]
         | embeddings [rows, hidden], if a later block reads them
         | what routers carry [rows, size], if a later one reads it
  or     streams [rows, streams * hidden], with nothing that is still to be added
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_hybrid.layers.inputs import StepInputs
from megatron_hybrid.layers.kernel_plans import KernelPlans
from megatron_hybrid.models.config import SHARED_TRANSFORMER
from megatron_hybrid.models.hidden import Hidden
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import RankGroup


class PipelineStage:
    """A step is `receive`, `compute`, `send`, on every stage; the first has nothing to receive and
    the last nothing to send."""

    def __init__(self, model: HybridModel, device: torch.device, max_rows: int) -> None:
        """`max_rows`: the most tokens of a step, or rows of its logits."""
        self._model = model
        self._ranks: RankGroup = model.parallel.pipeline
        self._received = self._sent = None
        if not model.is_first_stage:
            self._received = _Message(model, model.stage.start, max_rows, device)
        if not model.is_last_stage:
            self._sent = _Message(model, model.stage.stop, max_rows, device)

    def receive(self, inputs: StepInputs) -> None:
        """Have the message of the stage before in place for `compute`."""
        if self._received is not None:
            message = self._received.of_step(inputs)
            if message.numel():  # past the last mixing block none of a step's rows may be left
                self._ranks.receive(message, self._ranks.rank - 1)

    def compute(self, inputs: StepInputs, plans: KernelPlans) -> Tensor:
        """Logits [rows, vocabulary] on the last stage; on the others [rows, 0], and the message to
        the next stage is in place. The part of a step that can be captured."""
        entering = None if self._received is None else self._received.values(inputs)
        leaving = self._model.hidden(inputs, plans, entering)
        if self._sent is None:
            return self._model.logits(leaving, inputs, plans)
        for place, value in zip(self._sent.values(inputs), leaving, strict=True):
            if place is not None:
                assert value is not None and place.dtype == value.dtype, (place.dtype, value)
                place.copy_(value)
        return leaving.residual.new_empty((len(inputs.logits_index), 0))

    def send(self, inputs: StepInputs) -> None:
        """Hand on what `compute` left."""
        if self._sent is not None:
            message = self._sent.of_step(inputs)
            if message.numel():
                self._ranks.send(message, self._ranks.rank + 1)


class _Message:
    """What passes from the blocks before `boundary` to those from there on."""

    def __init__(
        self, model: HybridModel, boundary: int, max_rows: int, device: torch.device
    ) -> None:
        config = model.config
        self._is_behind_mixing = boundary > model.stages.last_mixing
        hidden, dtype = config.hidden_size, model.dtype
        residual = torch.float32 if config.residual_in_fp32 else dtype
        reads = SHARED_TRANSFORMER in config.pattern[boundary:]
        # By Hidden's fields: numbers in a row, of which there may be none, and their type.
        self._parts = (
            (config.residual_size, residual),
            (hidden * (config.streams is None), dtype),
            (hidden * reads, dtype),
            (config.carried_size(boundary), dtype),
        )
        self._row_bytes = sum(size * dtype.itemsize for size, dtype in self._parts)
        self._bytes = torch.zeros(max_rows * self._row_bytes, dtype=torch.uint8, device=device)

    def _rows(self, inputs: StepInputs) -> int:
        return len(inputs.logits_index) if self._is_behind_mixing else inputs.num_tokens

    def of_step(self, inputs: StepInputs) -> Tensor:
        """The message of a step, [bytes]."""
        return self._bytes[: self._rows(inputs) * self._row_bytes]

    def values(self, inputs: StepInputs) -> Hidden:
        """Views of the message."""
        rows = self._rows(inputs)
        sizes = [rows * size * dtype.itemsize for size, dtype in self._parts]
        found = [
            part.view(dtype).view(rows, size) if size else None
            for part, (size, dtype) in zip(
                self.of_step(inputs).split(sizes), self._parts, strict=True
            )
        ]
        residual, *others = found
        assert residual is not None
        return Hidden(residual, *others)
