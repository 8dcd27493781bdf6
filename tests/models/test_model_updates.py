"""Updates that come in many pieces: what does not change between them is looked up once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_hybrid.errors import WeightsError
from megatron_hybrid.models.checkpoints.sent_tensors import GivenTensors, SentTensors
from megatron_hybrid.models.checkpoints.updates import ModelUpdates
from megatron_hybrid.models.checkpoints.weight_source import TensorSource
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import load
from tests.tiny_models import make_tiny_model

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=["nemotron_h_moe", "granite_moe_hybrid", "zamba2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    make_tiny_model(request.param, path)
    return path


def sent(tensors: Tensors) -> SentTensors:
    """As they come from a trainer."""
    return SentTensors(GivenTensors(tensors).infos, tensors.items)


def pieces(folder: Path, size: int = 5) -> list[Tensors]:
    found = list(load_file(folder / "model.safetensors").items())
    return [dict(found[start : start + size]) for start in range(0, len(found), size)]


def test_pieces_are_looked_up_by_their_own_names_alone(
    folder: Path, parallel: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder, parallel)
    names = {f"{part.role} of block {block}" for block, part in model.weight_parts()}
    calls = {"parts": 0, "places": 0}
    weight_parts, places = HybridModel.weight_parts, TensorSource.places

    def counted_parts(self):  # type: ignore[no-untyped-def]
        calls["parts"] += 1
        return weight_parts(self)

    def counted_places(self, block, role):  # type: ignore[no-untyped-def]
        calls["places"] += 1
        return places(self, block, role)

    monkeypatch.setattr(HybridModel, "weight_parts", counted_parts)
    monkeypatch.setattr(TensorSource, "places", counted_places)
    updates, left = ModelUpdates(model), []
    for piece in pieces(folder):
        left.append(updates.update(sent(piece)))
    assert calls["parts"] == 1
    written = [names - one for one in left]
    assert all(written) and set().union(*written) == names
    assert sum(map(len, written)) == len(names), "no part is from two pieces"
    assert len(names) <= calls["places"] < 2 * len(names)


def test_pieces_are_put_where_a_whole_folder_is(folder: Path, parallel: ParallelContext) -> None:
    model, fresh = load(folder, parallel), load(folder, parallel)
    for weight in model.parameters():
        weight.data.zero_()
    updates = ModelUpdates(model)
    for piece in pieces(folder):
        updates.update(sent(piece))
    ours, theirs = dict(model.named_parameters()), dict(fresh.named_parameters())
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_each_piece_is_checked_as_the_first_one(folder: Path, parallel: ParallelContext) -> None:
    """And nothing of one that is refused is put in place."""
    model = load(folder, parallel)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    updates = ModelUpdates(model)
    first, *_, last = pieces(folder)
    updates.update(sent(first))
    (name, tensor) = next(iter(last.items()))
    changed = {one: values + 1 for one, values in first.items()}
    with pytest.raises(WeightsError, match=r"'model\.unknown' in what was sent has no place"):
        updates.update(sent(changed | {"model.unknown": tensor}))
    with pytest.raises(WeightsError, match="has shape"):
        updates.update(sent(changed | {name: torch.zeros(*tensor.shape, 2)}))
    after = dict(model.named_parameters())
    assert all(torch.equal(after[one], values) for one, values in before.items())


def test_rows_past_the_vocabularys_end_are_zero_whatever_was_there(
    folder: Path, parallel: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last ranks' padding memory that comes back after sleep says nothing."""
    model = load(folder, parallel)
    rows = len(model.embedding.weight)
    monkeypatch.setattr(model, "_vocabulary_rows", lambda count: (0, count - 2))
    with torch.no_grad():
        model.embedding.weight.fill_(float("nan"))
    model.after_loading()
    assert not model.embedding.weight[rows - 2 :].any()
    assert model.embedding.weight[: rows - 2].isnan().all()


def test_what_is_there_can_be_taken_one_by_one_as_what_comes() -> None:
    """As tensors of an adapter are, by handles."""
    given = {"a": torch.ones(2), "b": torch.zeros(3)}
    for one in (GivenTensors(given), sent(given)):
        found = {}
        for name in one.arrivals():
            found[name] = one.held[name]
            one.drop(name)
        assert found.keys() == given.keys() and not one.held
