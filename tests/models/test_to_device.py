"""Weights that go to a device in pieces, by several threads, are those that were read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.models.checkpoints import placing, to_device
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.to_device import Lane, on_lanes
from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import TinyModel, load

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_device, "PIECE_BYTES", 64)


NUMBERS = torch.arange(600)


@pytest.mark.parametrize(
    "values",
    [
        NUMBERS[:5].bfloat16(),
        NUMBERS.float(),  # longer than a piece
        NUMBERS.view(60, 10).to(torch.int16),  # several rows a piece
        NUMBERS.view(6, 100).double(),  # several pieces a row
        NUMBERS.view(20, 30)[3:17, 5:12].half(),
        NUMBERS.view(20, 30)[3:17, 5:12],  # a view
        NUMBERS.view(3, 20, 10).float()[1],
        NUMBERS[:96].view(2, 48).to(torch.float8_e4m3fn),
        NUMBERS.view(2, 3, 100)[:, :2],
        torch.tensor(7.0),
        NUMBERS[:0],
    ],
)
def test_values_arrive_as_they_are(values: Tensor) -> None:
    lane = Lane(CPU)
    for _ in range(2):
        found = lane.upload(values)
        assert found.dtype == values.dtype and found.is_contiguous()
        assert found.data_ptr() != values.data_ptr() or not values.numel()
        assert torch.equal(found.double(), values.double())


def test_every_item_has_its_turn_in_some_thread() -> None:
    threads, found = set(), [torch.zeros(0)] * 40

    def put(item: int, upload: Callable[[Tensor], Tensor]) -> None:
        threads.add(threading.current_thread())
        found[item] = upload(torch.full((50,), float(item)))

    before = torch.get_num_threads()
    assert len(list(on_lanes(put, range(40), CPU))) == 40
    assert threading.current_thread() not in threads
    assert [one.tolist() for one in found] == [[float(i)] * 50 for i in range(40)]
    assert torch.get_num_threads() == before


def test_what_fails_is_raised_and_the_rest_left() -> None:
    done = []

    def put(item: int, upload: Callable[[Tensor], Tensor]) -> None:
        if item == 3:
            raise WeightsError("Weight 3 cannot be read.")
        time.sleep(0.001)
        done.append(item)

    with pytest.raises(WeightsError, match="Weight 3"):
        list(on_lanes(put, range(3000), CPU))
    assert {0, 1, 2} <= set(done) and len(done) < 2000


@pytest.mark.parametrize("family", ["nemotron_h_moe", "qwen3_next"])
def test_a_folders_weights_by_threads_are_those_by_one(
    family: str, tmp_path: Path, parallel: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TinyModel(family, tmp_path, parallel)
    expected = {name: values.clone() for name, values in tiny.ours.named_parameters()}
    model = load(tmp_path, parallel, load_format="dummy")
    folder = ModelFolder.open(tmp_path)
    with placing.open_weights(folder, folder.config) as source:
        assert source.reads_side_by_side
        placed = placing.place_parts(model.weight_parts(), source)
        list(on_lanes(partial(placing.put_one, source), placed, CPU))
    model.after_loading()
    for name, values in model.named_parameters():
        assert torch.equal(values, expected[name]), name
