"""Adapters come, change and go while requests run; and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.errors import ConfigurationError, InvalidRequestError, WeightsError
from megatron_hybrid.models.adapters.peft_adapter import CONFIG, WEIGHTS
from tests.engine.symbolic import make_engine
from tests.engine.test_lora import ANSWER, OPTIONS, PARAMS, TWO, check, with_adapters
from tests.lora_adapters import ATTENTION, Adapted, make_adapted
from tests.models.conftest import random_tokens

PROMPT = random_tokens(40, seed=3)
ANSWERS_LONG = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
THREE = TWO | {"other": {"r": 8, "target_modules": [*ATTENTION, "in_proj"]}}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted("nemotron_h", tmp_path_factory.mktemp("nemotron_h"), THREE)


@pytest.fixture
def llm(adapted: Adapted) -> LLM:
    return LLM(str(adapted.folder), **OPTIONS | {"max_loras": 2})


def answer(llm: LLM, adapter: str = "a", prompt: list[int] = PROMPT) -> tuple[list[int], int]:
    (output,) = llm.generate([prompt], PARAMS, adapter=adapter, progress=False)
    return output.token_ids, output.cached_tokens


def test_other_weights_under_a_name_find_nothing_that_the_old_ones_left(
    adapted: Adapted, llm: LLM
) -> None:
    for name, expected in (("wide", False), ("narrow", False), ("wide", True)):
        llm.load_adapter("a", adapted.adapters[name])
        tokens, cached = answer(llm)
        assert tokens == adapted.answer(PROMPT, ANSWER, name)
        assert bool(cached) is expected, "the first weights' prompts are theirs again"
    assert llm.engine.adapters == ["a"]


def test_a_stream_keeps_the_adapter_that_it_began_with(adapted: Adapted, llm: LLM) -> None:
    llm.load_adapter("a", adapted.adapters["wide"])
    stream = llm.stream(PROMPT, ANSWERS_LONG, adapter="a")
    next(stream)
    llm.load_adapter("a", adapted.adapters["narrow"])
    with pytest.raises(InvalidRequestError, match="2 that --max-loras|allows, 2,.*--max-loras"):
        llm.load_adapter("b", adapted.adapters["other"])
    assert llm.engine.adapters == ["a"]
    assert answer(llm)[0] == adapted.answer(PROMPT, ANSWER, "narrow")
    llm.unload_adapter("a")
    with pytest.raises(InvalidRequestError, match="'a' is not loaded; there are: none") as refused:
        answer(llm)
    assert refused.value.field == "adapter" and refused.value.status == 404
    (*_, output) = stream
    assert output.token_ids == adapted.answer(PROMPT, 12, "wide")
    for name in ("wide", "other"):  # there is room again
        llm.load_adapter(name, adapted.adapters[name])
        assert answer(llm, name)[0] == adapted.answer(PROMPT, ANSWER, name)


def test_what_is_refused_leaves_the_old_one_where_it_was(adapted: Adapted, llm: LLM) -> None:
    """Also where the new one would have taken its slot."""
    for name, folder in list(adapted.adapters.items())[:2]:
        llm.load_adapter(name, folder)
    with pytest.raises(WeightsError, match="is not a folder"):
        llm.load_adapter("wide", "nowhere")
    assert answer(llm, "wide")[0] == adapted.answer(PROMPT, ANSWER, "wide")


def test_what_is_loaded_again_takes_no_room_of_its_own(adapted: Adapted, llm: LLM) -> None:
    for _ in range(2):
        for name, folder in list(adapted.adapters.items())[:2]:
            llm.load_adapter(name, folder)
            assert answer(llm, name)[0] == adapted.answer(PROMPT, ANSWER, name)


def test_tensors_in_memory_are_what_a_folder_holds(adapted: Adapted, llm: LLM) -> None:
    """With other spellings of the names; and what the folder left in the cache is theirs."""
    folder = adapted.adapters["wide"]
    llm.load_adapter("a", folder)
    wanted, _ = answer(llm)
    config = json.loads((folder / CONFIG).read_text())
    tensors = load_file(folder / WEIGHTS)
    llm.load_adapter("a", tensors, config)
    tokens, cached = answer(llm)
    assert tokens == wanted and cached
    short = {name.removeprefix("base_model.model."): values for name, values in tensors.items()}
    llm.load_adapter("b", [(name, values.double()) for name, values in short.items()], config)
    assert answer(llm, "b")[0] == wanted


def test_figures_of_adapters(adapted: Adapted, llm: LLM) -> None:
    """By names that requests may have, or still have."""
    llm.load_adapter("a", adapted.adapters["wide"])
    llm.load_adapter("b", adapted.adapters["narrow"])
    stream = llm.stream(PROMPT, ANSWERS_LONG, adapter="a")
    next(stream)
    params = SamplingParams(temperature=0.0, max_tokens=2, n=2)
    llm.engine.add_request("two", PROMPT, params, adapter="b")
    llm.engine.add_request("plain", PROMPT, params)
    assert figures(llm) == ((2, 2, 2), {"a": 1, "b": 2}, {"a": 1}, {"b": 2})
    llm.unload_adapter("a")
    assert figures(llm) == ((2, 2, 1), {"b": 2}, {"a": 1}, {"b": 2})
    for _ in stream:
        pass
    assert figures(llm) == ((2, 1, 1), {"b": 2}, {}, {})
    llm.load_adapter("b", adapted.adapters["wide"])  # its count goes on
    llm.load_adapter("a", adapted.adapters["wide"])
    assert figures(llm) == ((2, 2, 2), {"a": 0, "b": 2}, {}, {})


def figures(llm: LLM) -> tuple[Any, ...]:
    stats = llm.stats()
    sizes = tuple(stats[name] for name in ("lora_slots", "lora_slots_used", "lora_adapters"))
    return sizes, *(stats[f"lora_requests{state}"] for state in ("", "_running", "_waiting"))


def test_adapters_outlive_new_weights_of_the_model(adapted: Adapted, llm: LLM) -> None:
    llm.load_adapter("a", adapted.adapters["wide"])
    wanted, _ = answer(llm)
    llm.update_weights(adapted.folder)
    assert answer(llm) == (wanted, 0)


def test_weights_are_the_same_whatever_adapters_there_are(adapted: Adapted, llm: LLM) -> None:
    plain = LLM(str(adapted.folder), **OPTIONS | {"enable_lora": False})
    llm.load_adapter("a", adapted.adapters["wide"])
    assert llm.stats()["weight_bytes"] == plain.stats()["weight_bytes"]
    assert answer(llm, "")[0] == answer(plain, "")[0]
    with pytest.raises(InvalidRequestError, match="without --enable-lora"):
        plain.load_adapter("a", adapted.adapters["wide"])
    with pytest.raises(InvalidRequestError, match="without --enable-lora"):
        answer(plain)


def test_at_the_start(adapted: Adapted, tmp_path: Path) -> None:
    modules = tuple(f"{name}={adapted.adapters[name]}" for name in TWO)
    llm = LLM(str(adapted.folder), **OPTIONS, lora_modules=modules)
    assert llm.engine.adapters == list(TWO)
    check(adapted, llm, [PROMPT] * 2, list(TWO))
    with pytest.raises(ConfigurationError, match=f"--lora-modules a={tmp_path}: .*adapter_config"):
        LLM(str(adapted.folder), **OPTIONS, lora_modules=(f"a={tmp_path}",))
    for bad in (("a",), ("=x",), ("a=x", "a=y")):
        with pytest.raises(ConfigurationError, match="NAME=DIR"):
            LLM(str(adapted.folder), **OPTIONS, lora_modules=bad)
    with pytest.raises(ConfigurationError, match="need --enable-lora"):
        LLM(str(adapted.folder), lora_modules=("a=x",))


def test_one_adapter_for_each_prompt_or_one_for_all(adapted: Adapted) -> None:
    llm = with_adapters(adapted)
    with pytest.raises(InvalidRequestError, match="2 prompts but 1 adapters"):
        llm.generate([[1], [2]], PARAMS, adapter=["wide"], progress=False)
    with pytest.raises(InvalidRequestError, match="'nobody' is not loaded"):
        llm.generate([[1], [2]], PARAMS, adapter=["wide", "nobody"], progress=False)
    assert not llm.engine.num_waiting and not llm.engine.scheduler.num_running


def test_slots_of_those_who_wait_are_not_given_away() -> None:
    """Of the engine alone: a request that has not begun has its adapter, too."""
    engine = make_engine(max_requests=1)
    engine.add_request("runs", [1, 2, 3], SamplingParams(max_tokens=4))
    engine.add_request("waits", [1, 2, 3], SamplingParams(max_tokens=4), adapter="a")
    engine.step()
    engine.unload_adapter("a")
    with pytest.raises(InvalidRequestError, match="--max-loras allows, 3"):
        engine.load_adapter("new", "")
    while engine.has_work():
        engine.step()
    engine.load_adapter("new", "")
    engine.unload_adapter("new")
    with pytest.raises(InvalidRequestError, match="'new' is not loaded; there are: 'b', 'tuned'"):
        engine.unload_adapter("new")


# ---------------------------------------------------------------------- what is refused

Change = Callable[[Path, dict[str, Any], dict[str, torch.Tensor]], None]
LAYER = "base_model.model.model.layers.2.mixer"


def says(**options: Any) -> Change:
    return lambda folder, config, tensors: config.update(options)


def has(name: str, *shape: int) -> Change:
    return lambda folder, config, tensors: tensors.update({name: torch.zeros(shape)})


def without(name: str) -> Change:
    return lambda folder, config, tensors: (folder / name).unlink()


def pickled(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


def cut_short(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:500])


def both(module: str, rank: int, inputs: int, outputs: int) -> Change:
    def change(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.zeros(rank, inputs)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.zeros(outputs, rank)

    return change


BAD: dict[str, tuple[Change, str]] = {
    "no configuration": (without(CONFIG), "has no adapter_config.json"),
    "no weights": (without(WEIGHTS), "has no adapter_model.safetensors"),
    "a pickle": (pickled, "adapter_model.bin is not read.*safe_serialization"),
    "half a file": (cut_short, "adapter_model.safetensors cannot be read"),
    "another method": (says(peft_type="LOHA"), "peft_type 'LOHA', which is not supported"),
    "DoRA": (says(use_dora=True), "use_dora True"),
    "biases": (says(bias="all"), "bias 'all'"),
    "whole modules": (says(modules_to_save=["lm_head"]), r"modules_to_save \['lm_head'\]"),
    "PiSSA": (says(init_lora_weights="pissa_niter_4"), "changes the model's own weights"),
    "no alpha": (says(lora_alpha=None), "lora_alpha .* is None"),
    "another rank": (says(r=4), "of rank 8; its configuration says 4"),
    "a bias": (has(f"{LAYER}.q_proj.lora_B.bias", 64), "lora_B.bias' in .* is a bias"),
    "a magnitude": (has(f"{LAYER}.q_proj.lora_magnitude_vector", 64), "is of DoRA"),
    "an embedding": (
        has("base_model.model.model.embeddings.lora_embedding_A", 8, 160), "adapts an embedding",
    ),
    "a head": (both("lm_head", 8, 64, 160), "'lm_head' in .* is of the vocabulary"),
    "half a module": (has(f"{LAYER}.x.lora_A.weight", 8, 64), "has a lora_A alone"),
    "no such module": (both("model.layers.9.mixer.q_proj", 8, 64, 64), "layers.9.* no linear"),
    "a convolution": (
        has(f"{LAYER}.q_proj.lora_A.weight", 8, 64, 1), "3 and 2 dimensions",
    ),
    "another shape": (
        both("model.layers.2.mixer.q_proj", 8, 32, 64), r"lora_A \[8, 32\].* is \[64, 64\]",
    ),
    "too large a rank": (
        both("model.layers.2.mixer.q_proj", 9, 64, 64), "has rank 9; --max-lora-rank is 8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_folders_are_refused_and_change_nothing(
    adapted: Adapted, with_one: LLM, tmp_path: Path, what: str
) -> None:
    change, message = BAD[what]
    folder = shutil.copytree(adapted.adapters["wide"], tmp_path / "bad")
    config = json.loads((folder / CONFIG).read_text())
    tensors = load_file(folder / WEIGHTS)
    old = json.dumps(config), dict(tensors)
    change(folder, config, tensors)
    if json.dumps(config) != old[0]:
        (folder / CONFIG).write_text(json.dumps(config))
    if tensors.keys() != old[1].keys() or any(tensors[n] is not old[1][n] for n in tensors):
        save_file(tensors, folder / WEIGHTS)
    with pytest.raises(WeightsError, match=message):
        with_one.load_adapter("a", folder)
    assert answer(with_one)[0] == adapted.answer(PROMPT, ANSWER, "wide")
    with pytest.raises(InvalidRequestError, match="'b' is not loaded"):
        answer(with_one, "b")


@pytest.fixture(scope="module")
def with_one(adapted: Adapted) -> LLM:
    llm = LLM(str(adapted.folder), **OPTIONS)
    llm.load_adapter("a", adapted.adapters["wide"])
    return llm


def test_tensors_without_a_configuration(adapted: Adapted, with_one: LLM) -> None:
    tensors = load_file(adapted.adapters["wide"] / WEIGHTS)
    for config in (None, {}, {"r": True, "lora_alpha": 1}, {"r": 8, "lora_alpha": "8"}):
        with pytest.raises(WeightsError, match="adapter_config.json|must be a number above 0"):
            with_one.load_adapter("b", tensors, config)
    with pytest.raises(WeightsError, match="no tensor in it"):
        with_one.load_adapter("b", {}, {"r": 8, "lora_alpha": 8})
    with pytest.raises(WeightsError, match="RuntimeError: gone"):
        with_one.load_adapter("b", broken(), {"r": 8, "lora_alpha": 8})
    assert with_one.engine.adapters == ["a"]


def broken():  # type: ignore[no-untyped-def]
    yield f"{LAYER}.q_proj.lora_A.weight", torch.zeros(8, 64)
    raise RuntimeError("gone")
