"""New weights under a running engine: the same storage, the tokens of a fresh engine, nothing of
the old ones in the cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_hybrid import LLM, FinishReason, SamplingParams
from megatron_hybrid.errors import InvalidRequestError, WeightsError, WeightsLostError
from megatron_hybrid.layers.parts import WeightPart
from megatron_hybrid.models.hybrid_model import HybridModel
from tests.thorough import A_THIRD, usually
from tests.tiny_models import FAMILIES, make_tiny_model

OPTIONS = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_buffer_size_gb": 0.02,
    "inference_dynamic_batching_max_requests": 4,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [list(range(3 + i, 60 + 7 * i)) for i in range(3)]
Folders = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Two checkpoints of a family's tiny model, A and B; made once."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(family: str) -> tuple[Path, Path]:
        if family not in made:
            a, b = tmp_path_factory.mktemp(f"{family}_a"), tmp_path_factory.mktemp(f"{family}_b")
            make_tiny_model(family, a, seed=1)
            make_tiny_model(family, b, seed=2)
            made[family] = a, b
        return made[family]

    return get


def tokens(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, GREEDY, progress=False)]


def model_of(llm: LLM) -> HybridModel:
    return llm.engine.runner._model  # type: ignore[attr-defined, no-any-return]


def storage(model: HybridModel) -> dict[str, int]:
    """Where every tensor lies that a step reads."""
    found = {}
    for path, module in model.named_modules():
        for name, value in {**module.__dict__, **module._parameters, **module._buffers}.items():
            if isinstance(value, Tensor):
                found[f"{path}.{name}"] = value.data_ptr()
    return found


def values(model: HybridModel) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


@A_THIRD
@pytest.mark.parametrize(
    "family", usually(["nemotron_h_moe", "jamba", "qwen3_5", "zamba2", "lfm2", "llama"], FAMILIES)
)
def test_after_an_update_answers_are_those_of_a_fresh_engine(family: str, folders: Folders):
    a, b = folders(family)
    llm, fresh = LLM(str(a), **OPTIONS), LLM(str(b), **OPTIONS)
    old, expected = tokens(llm), tokens(fresh)
    assert old != expected
    places = storage(model_of(llm))
    assert any(name.endswith(".A") for name in places) or family not in ("bamba", "jamba")
    assert llm.update_weights(str(b)) == 1
    assert storage(model_of(llm)) == places, "CUDA graphs read the weights where they were"
    (first,) = llm.generate(PROMPTS[:1], GREEDY)
    assert first.cached_tokens == 0 and first.token_ids == expected[0]
    assert tokens(llm) == expected
    again = llm.generate(PROMPTS, GREEDY, progress=False)
    assert [output.token_ids for output in again] == expected
    assert [output.cached_tokens for output in again] == [
        output.cached_tokens for output in fresh.generate(PROMPTS, GREEDY, progress=False)
    ]
    assert all(output.cached_tokens for output in again)
    tensors = load_file(a / "model.safetensors")
    assert llm.update_weights(tensors) == 2 and tokens(llm) == old, "and back again"


@A_THIRD
@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next", "zamba2"])
def test_some_tensors_alone_may_be_updated(family: str, folders: Folders):
    """Constants that are part of the weights (multipliers, the one of a zero-centred norm) are put
    into what is new, and not once more into what stays."""
    a, b = folders(family)
    llm, fresh = LLM(str(a), **OPTIONS), LLM(str(b), **OPTIONS)
    tensors = load_file(b / "model.safetensors")
    llm.pause()
    for name, tensor in tensors.items():
        llm.update_weights([(name, tensor)])
    llm.resume()
    ours, theirs = values(model_of(llm)), values(model_of(fresh))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert tokens(llm) == tokens(fresh) and llm.engine.epoch == len(tensors)


def streams(llm: LLM, count: int = 2, steps: int = 4) -> list[Iterator]:  # type: ignore[type-arg]
    opened = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:count]]
    for stream in opened:
        for _ in range(steps):
            next(stream)
    return opened


@pytest.mark.parametrize("asynchronous", [False, True])
def test_finish_computes_open_streams_to_their_end_with_the_old_weights(
    folders: Folders, asynchronous: bool
):
    a, b = folders("bamba")
    llm = LLM(str(a), **OPTIONS)
    llm.engine.runner.asynchronous = asynchronous
    expected = tokens(LLM(str(a), **OPTIONS))
    opened = streams(llm)
    llm.update_weights(b)
    for stream, old in zip(opened, expected, strict=False):
        *_, last = stream
        assert last.token_ids == old and last.finish_reason is FinishReason.LENGTH
    assert tokens(llm) == tokens(LLM(str(b), **OPTIONS))


def test_abort_ends_open_streams(folders: Folders):
    a, b = folders("bamba")
    llm = LLM(str(a), **OPTIONS)
    opened = streams(llm)
    llm.update_weights(b, mode="abort")
    for stream in opened:
        *_, last = stream
        assert last.finish_reason is FinishReason.ABORT and len(last.token_ids) < 12


@A_THIRD
@pytest.mark.parametrize("family", ["bamba", "llama"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_keep_goes_on_with_the_new_weights_and_leaves_nothing_in_the_cache(
    folders: Folders, family: str, asynchronous: bool
):
    a, b = folders(family)
    llm = LLM(str(a), **OPTIONS, inference_dynamic_batching_prefix_caching_checkpoint_interval=16)
    llm.engine.runner.asynchronous = asynchronous
    opened = streams(llm)
    before = [list(next(stream).token_ids) for stream in opened]
    llm.update_weights(b, mode="keep")
    outputs = [list(stream)[-1] for stream in opened]
    for output, start in zip(outputs, before, strict=True):
        assert output.token_ids[: len(start)] == start and len(output.token_ids) == 12
        assert output.finish_reason is FinishReason.LENGTH
    occupancy = llm.engine.context.cache.occupancy()
    assert (occupancy.kv_cached, occupancy.state_cached) == (0, 0)
    llm.engine.check_integrity()
    history = [*PROMPTS[0], *outputs[0].token_ids]
    (after,) = llm.generate([history], GREEDY)
    assert after.cached_tokens == 0
    assert after.token_ids == tokens(LLM(str(b), **OPTIONS), [history])[0]


def test_a_paused_llm_says_so_and_stays_paused_over_an_update(folders: Folders):
    a, b = folders("llama")
    llm = LLM(str(a), **OPTIONS)
    llm.pause()
    with pytest.raises(RuntimeError, match=r"paused; call LLM\.resume"):
        tokens(llm)
    assert not llm.engine.scheduler.num_waiting
    llm.update_weights(b)
    assert llm.stats()["paused"] and llm.stats()["epoch"] == 1
    llm.resume()
    assert tokens(llm) == tokens(LLM(str(b), **OPTIONS))
    with pytest.raises(InvalidRequestError, match="mode is 'later'"):
        llm.update_weights(a, mode="later")


def changed(folder: Path, target: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of the folder whose tensors were changed."""
    target.mkdir()
    shutil.copy(folder / "config.json", target)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_weights_that_do_not_fit_are_named_and_change_nothing(folders: Folders, tmp_path: Path):
    a, b = folders("bamba")
    llm = LLM(str(a), **OPTIONS)
    answers, weights = tokens(llm), values(model_of(llm))
    name = "model.layers.3.mamba.in_proj.weight"

    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:-1].contiguous()

    other = tmp_path / "other"
    shutil.copytree(b, other)
    config = json.loads((b / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    broken = changed(b, tmp_path / "broken", lambda tensors: None)
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    unreadable = tmp_path / "unreadable"
    shutil.copytree(b, unreadable)
    (unreadable / "generation_config.json").write_text("{")
    cases: list[tuple[object, str]] = [
        (changed(b, tmp_path / "cut", cut), rf"'{name}' has shape \[\d+, 64\]; .* makes it"),
        (changed(b, tmp_path / "gone", lambda t: t.__delitem__(name)), f"'{name}' is missing"),
        (changed(b, tmp_path / "more", lambda t: t.update(x=t[name].clone())), "'x' .* no place"),
        (broken, "model.safetensors in .* cannot be read"),
        (tmp_path / "nowhere", "is no folder"),
        (tmp_path, "neither model.safetensors nor"),
        (other, "describes another model .*: norm_eps is 0.5"),
        (folders("llama")[0], "describes another model"),
        ({name: torch.zeros(2, 2)}, rf"'{name}' has shape \[2, 2\]"),
        ({"x": torch.zeros(2)}, "'x' in the tensors given has no place"),
        ([(name, [1.0])], "pairs of a name and a torch tensor, not of str and list"),
        (None, "TypeError: 'NoneType' object is not iterable"),
        ([name], "ValueError: too many values to unpack"),
        ((1 / 0 for _ in "x"), "ZeroDivisionError"),
        (unreadable, "generation_config.json is not valid JSON"),
    ]
    for source, message in cases:
        with pytest.raises(WeightsError, match=message):
            llm.update_weights(source)  # type: ignore[arg-type]
        assert all(torch.equal(weights[n], w) for n, w in values(model_of(llm)).items())
    assert llm.engine.epoch == 0 and not llm.engine.is_paused
    warm = llm.generate(PROMPTS, GREEDY, progress=False)
    assert [output.token_ids for output in warm] == answers
    assert all(output.cached_tokens for output in warm), "the cache was kept"


def test_a_copy_that_fails_half_way_says_that_the_engine_must_be_restarted(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
):
    a, b = folders("llama")
    llm = LLM(str(a), **OPTIONS)
    puts = 0

    def put(part: WeightPart, new: Tensor) -> None:
        nonlocal puts
        puts += 1
        if puts == 5:
            raise OSError("the disk is gone")
        part.target.copy_(new)

    monkeypatch.setattr(WeightPart, "put", put)
    with pytest.raises(WeightsLostError, match=r"OSError: the disk is gone.* must be restarted"):
        llm.update_weights(b)
    monkeypatch.undo()
    for call in (lambda: tokens(llm), lambda: llm.update_weights(b)):
        with pytest.raises(WeightsLostError, match="must be restarted"):
            call()


@pytest.mark.parametrize("came", [0, 1])
def test_pieces_that_stop_coming_are_lost_if_one_is_in_place(folders: Folders, came: int) -> None:
    a, b = folders("llama")
    llm = LLM(str(a), **OPTIONS)
    first = tokens(llm)

    def pieces() -> Iterator[dict[str, Tensor]]:
        new = load_file(next(b.glob("*.safetensors")))
        yield from [new][:came]
        raise OSError("the trainer is gone")

    llm.pause()
    error = WeightsLostError if came else OSError
    with pytest.raises(error, match="the trainer is gone"):
        llm.engine.weights.update_from(pieces())
    assert not llm.engine.weights.is_open
    llm.resume()
    if came:
        with pytest.raises(WeightsLostError, match="1 pieces are in place"):
            tokens(llm)
    else:
        assert tokens(llm) == first
