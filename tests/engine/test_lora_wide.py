"""Adapters whose A lies behind the layers' own weights, as on a GPU: PEFT's answers, and the same
after sleep and after new weights."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from megatron_hybrid import SamplingParams
from megatron_hybrid.engine import build_adapters
from megatron_hybrid.engine.build import load_weights
from megatron_hybrid.layers.linear import Linear
from megatron_hybrid.models.hybrid_model import HybridModel
from tests.engine.test_lora import ANSWER, TARGETS, TWO, check, with_adapters
from tests.engine.test_sleep_adapters import wake
from tests.engine.test_sleep_models import model_of, small_ones_move_too  # noqa: F401
from tests.lora_adapters import Adapted, make_adapted
from tests.models.conftest import random_tokens
from tests.thorough import usually

PROMPTS = [random_tokens(n, seed=n) for n in (37, 21, 30, 34)]
NAMES = ["", "wide", "narrow", "wide"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)


# Of each kind of layer one, as in test_lora.py; with and without batch-invariant mode in turn.
FEW = ("nemotron_h", "qwen3_next", "zamba2", "bailing_hybrid")  # falcon_h1's are nemotron_h's
FAMILIES = usually(FEW, TARGETS)


def is_thorough(
    test: str, adapted: str = "", batch_invariant: bool = False, **others: object
) -> bool:
    """Whether CI leaves this case out."""
    return adapted in FEW and batch_invariant != bool(FEW.index(adapted) % 2)


@pytest.fixture(autouse=True)
def saves_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_adapters, "saves_launches", lambda device: True)


@pytest.fixture(scope="module", params=FAMILIES)
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted(request.param, tmp_path_factory.mktemp(request.param), TWO)


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted("nemotron_h", tmp_path_factory.mktemp("nemotron_h"), TWO)


def wide_layers(model: HybridModel) -> list[Linear]:
    return [own for own in model.modules() if isinstance(own, Linear) and own.wide is not None]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_answers_are_pefts(adapted: Adapted, batch_invariant: bool) -> None:
    """Cold, in chunks, warm; mixed in a batch."""
    options = {"inference_dynamic_batching_max_tokens": 48, "batch_invariant": batch_invariant}
    llm = with_adapters(adapted, **options)
    assert wide_layers(model_of(llm))
    assert check(adapted, llm, PROMPTS, NAMES) == [0, 0, 0, 0]
    assert all(check(adapted, llm, PROMPTS, NAMES))
    longer = [[*prompt, 5, 6, 7] for prompt in PROMPTS]
    assert all(check(adapted, llm, longer, NAMES))


@pytest.mark.parametrize("level", [1, 2])
def test_after_sleep_and_while_asleep(nemotron: Adapted, level: int) -> None:
    llm = with_adapters(nemotron, enable_sleep_mode=True)
    check(nemotron, llm, PROMPTS, NAMES)
    layers = wide_layers(model_of(llm))
    places = [layer.wide.data_ptr() for layer in layers if layer.wide is not None]
    llm.sleep(level)
    # While there is no memory behind the weights.
    llm.load_adapter("third", nemotron.adapters["narrow"])
    wake(llm, level, nemotron.folder)
    assert [layer.wide.data_ptr() for layer in layers if layer.wide is not None] == places
    check(nemotron, llm, PROMPTS, NAMES)
    (output,) = llm.generate(PROMPTS[1:2], PARAMS, adapter="third", progress=False)
    assert output.token_ids == nemotron.answer(PROMPTS[1], ANSWER, "narrow")


def test_new_weights_of_the_model_leave_adapters_alone(nemotron: Adapted) -> None:
    llm = with_adapters(nemotron)
    tensors = load_file(nemotron.folder / "model.safetensors")
    changed = {name: tensor + 0.1 for name, tensor in tensors.items() if "mixer" in name}
    llm.update_weights(tensors | changed)
    answers = llm.generate(PROMPTS, PARAMS, adapter=NAMES, progress=False)
    assert answers[1].token_ids != nemotron.answer(PROMPTS[1], ANSWER, "wide")
    llm.update_weights(tensors)
    check(nemotron, llm, PROMPTS, NAMES)


def test_slots_that_adapters_leave_add_nothing(nemotron: Adapted) -> None:
    llm = with_adapters(nemotron, max_loras=2)
    check(nemotron, llm, PROMPTS, NAMES)
    llm.unload_adapter("wide")
    llm.load_adapter("again", nemotron.adapters["narrow"])  # where "wide" was
    names = ["", "again", "narrow", "again"]
    outputs = llm.generate(PROMPTS, PARAMS, adapter=names, progress=False)
    for output, prompt, name in zip(outputs, PROMPTS, ["", *["narrow"] * 3], strict=True):
        assert output.token_ids == nemotron.answer(prompt, ANSWER, name)


def test_engines_that_share_weights_have_their_own_adapters(nemotron: Adapted) -> None:
    """So nothing lies behind weights of `load_weights`."""
    llm = with_adapters(nemotron)
    assert not wide_layers(load_weights(llm.config))
    for layer in wide_layers(model_of(llm)):
        assert isinstance(layer.weight, torch.Tensor)
        assert layer.weight.shape == (layer.outputs, layer.inputs)
