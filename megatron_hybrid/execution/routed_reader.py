"""The experts of a request's tokens on their way to the host, beside the steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megatron_hybrid.execution.device import device_errors, record, upload
from megatron_hybrid.routed_experts import RoutedExperts


class RoutedReader:
    """Reads LayerCaches.routed."""

    def __init__(self, routed: Tensor, layers: Sequence[int], num_layers: int) -> None:
        """layers: which of the model's `num_layers` layers, by the numbers in its config.json,
        those in `routed` are."""
        self._routed, self.layers, self.num_layers = routed, list(layers), num_layers
        self._stream = torch.cuda.Stream(routed.device) if routed.is_cuda else None

    def read(self, blocks: Sequence[int], start: int) -> RoutedReading:
        """Begin to read what the steps so far leave in a request's blocks, from position `start`
        on; later steps may overwrite it."""
        block_size = self._routed.shape[1]
        first = start // block_size
        index = upload(np.asarray(blocks[first:], dtype=np.int64), self._routed.device)
        rows = self._routed.index_select(0, index).flatten(0, 1)
        return RoutedReading(self, rows, first * block_size, start, self._stream)


class RoutedReading:
    """Of one request."""

    def __init__(
        self,
        reader: RoutedReader,
        rows: Tensor,
        first: int,
        start: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        """rows [positions from `first` on, layers, chosen]: on the device. stream: for copies to
        the host, which no step waits for; None: `rows` are there already."""
        self._reader, self._first, self._start = reader, first, start
        self._rows, self._done = rows, None
        if stream is not None:
            self._done = torch.cuda.Event()
            self._rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            stream.wait_stream(torch.cuda.current_stream(rows.device))
            with torch.cuda.stream(stream):
                self._rows.copy_(rows, non_blocking=True)
                record(self._done, rows.device)
            rows.record_stream(stream)

    @property
    def is_here(self) -> bool:
        """Whether `result` waits for nothing in any case."""
        return self._done is None

    @device_errors
    def result(self, tokens: int) -> RoutedExperts:
        """Of the first so many tokens of prompt and answer, without the last of them. Waits for the
        steps that were launched before it was read."""
        if self._done is not None:
            self._done.synchronize()
        start, end = self._start, max(tokens - 1, self._start)
        ids = self._rows.numpy()[start - self._first : end - self._first]
        ids = ids if ids.dtype == np.uint8 else ids.view(np.uint16)
        if len(self._reader.layers) == self._reader.num_layers:
            return RoutedExperts.of(ids, start)
        shape = (len(ids), self._reader.num_layers, ids.shape[2])
        every = np.zeros(shape, dtype=ids.dtype)
        every[:, self._reader.layers] = ids
        return RoutedExperts.of(every, start)
