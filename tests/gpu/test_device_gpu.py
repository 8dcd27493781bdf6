"""The way between host and device, on a GPU."""

from __future__ import annotations

import pytest
import torch

from megatron_hybrid.execution.device import record

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_an_event_is_behind_what_is_on_the_current_stream() -> None:
    device = torch.empty(0, device="cuda").device
    for stream in (torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()):
        torch.cuda.synchronize()
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            record(event, device)
        assert not event.query()
        event.synchronize()
        assert stream.query()
