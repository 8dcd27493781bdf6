"""The way between host and device, on a GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from megatron_hybrid.execution.device import record, upload, upload_together

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


@pytest.mark.parametrize("shape", [(0,), (1,), (3,), (5, 7), (3, 0), (90, 1000), ()])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float64, np.float32, np.uint8, np.bool_])
def test_arrays_of_all_types_and_sizes_come_as_they_are(
    dtype: type[np.generic], shape: tuple[int, ...]
) -> None:
    device = torch.empty(0, device="cuda").device
    values = (100 * np.random.default_rng(0).random(shape)).astype(dtype)
    for one in (values, values.T, values[..., ::2] if shape else values):
        found = upload(one, device)
        assert found.cpu().numpy().dtype == values.dtype and found.is_contiguous()
        np.testing.assert_array_equal(found.cpu().numpy(), one)


def test_what_is_on_its_way_is_not_written_over() -> None:
    """More than there is memory for waits for the GPU; threads and streams have their own."""

    def send(seed: int) -> None:
        random, device = np.random.default_rng(seed), torch.empty(0, device="cuda").device
        with torch.cuda.stream(torch.cuda.Stream() if seed % 2 else torch.cuda.default_stream()):
            torch.cuda._sleep(200_000_000)
            values = [random.integers(0, 2**62, random.integers(1, 9000)) for _ in range(200)]
            found = [upload(one, device) for one in values]
            found += upload_together(values[:40], device)
            for one, there in zip(values + values[:40], found, strict=True):
                np.testing.assert_array_equal(there.cpu().numpy(), one)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send, range(4)))
