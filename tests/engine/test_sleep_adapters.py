"""Adapters of an engine that sleeps: they stay on the device, and work on what wakes up."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.errors import SleepError
from tests.engine.test_lora import ANSWER, TWO, check, with_adapters
from tests.engine.test_sleep_models import model_of, small_ones_move_too  # noqa: F401
from tests.lora_adapters import Adapted, make_adapted
from tests.models.conftest import random_tokens
from tests.thorough import A_THIRD

PROMPTS = [random_tokens(37, seed=1), random_tokens(21, seed=2), random_tokens(30, seed=4)]
NAMES = ["", "wide", "narrow"]
LONG = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=["nemotron_h", "zamba2"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted(request.param, tmp_path_factory.mktemp(request.param), TWO)


def wake(llm: LLM, level: int, weights: Path) -> None:
    if level == 1:
        llm.wake_up()
        return
    llm.wake_up(["weights"])
    llm.update_weights(load_file(weights / "model.safetensors"))
    llm.wake_up(["kv_cache"])


def places(llm: LLM) -> list[int]:
    """Where CUDA graphs read the slots."""
    slots = model_of(llm).adapters
    assert slots is not None
    return [one.data_ptr() for own in slots._weights.values() for one in (own.a, own.b)]


@A_THIRD
@pytest.mark.parametrize("level", [1, 2])
def test_adapters_are_what_they_were_after_sleep(adapted: Adapted, level: int) -> None:
    """PEFT's answers, with nothing loaded again, and slots at the same addresses."""
    llm = with_adapters(adapted, enable_sleep_mode=True)
    check(adapted, llm, PROMPTS, NAMES)
    stays = places(llm)
    llm.sleep(level)
    assert llm.engine.adapters == NAMES[1:]
    with pytest.raises(SleepError):
        llm.generate(PROMPTS[:1], LONG, adapter="wide", progress=False)
    wake(llm, level, adapted.folder)
    assert places(llm) == stays
    check(adapted, llm, PROMPTS, NAMES)
    if level == 2:
        assert llm.engine.epoch == 1


@A_THIRD
@pytest.mark.parametrize("level", [1, 2])
def test_adapters_come_and_go_while_the_engine_sleeps(adapted: Adapted, level: int) -> None:
    """A trainer sends them before it gives the memory back; nothing of the weights is read."""
    llm = with_adapters(adapted, enable_sleep_mode=True, max_loras=2)
    llm.sleep(level)
    llm.unload_adapter("wide")
    llm.load_adapter("new", adapted.adapters["wide"])
    llm.load_adapter("narrow", adapted.adapters["narrow"])
    assert llm.engine.adapters == ["narrow", "new"] and llm.engine.sleeping
    wake(llm, level, adapted.folder)
    for name, known in (("new", "wide"), ("narrow", "narrow")):
        outputs = llm.generate(PROMPTS, LONG, adapter=name, progress=False)
        for output, prompt in zip(outputs, PROMPTS, strict=True):
            assert output.token_ids == adapted.answer(prompt, 12, known)


@A_THIRD
@pytest.mark.parametrize("level", [1, 2])
def test_a_stream_keeps_its_adapter_over_sleep(adapted: Adapted, level: int) -> None:
    """Its KV is computed again, with the slot that it began with, whose name is gone meanwhile."""
    llm = with_adapters(adapted, enable_sleep_mode=True)
    stream = llm.stream(PROMPTS[0], LONG, adapter="wide")
    for _ in range(ANSWER):
        next(stream)
    llm.sleep(level)
    llm.unload_adapter("wide")
    wake(llm, level, adapted.folder)
    (*_, output) = stream
    assert output.token_ids == adapted.answer(PROMPTS[0], 12, "wide")
    assert llm.stats()["lora_slots_used"] == 1
