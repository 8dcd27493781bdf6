"""A hybrid's requests with adapters, in every way that they may be computed: PEFT's answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_hybrid import SamplingParams
from megatron_hybrid.cache.geometry import GIB
from tests.engine.test_lora import ANSWER, PARAMS, TWO, check, with_adapters
from tests.knowing_drafter import Knowing, with_drafts
from tests.lora_adapters import Adapted, adapt, make_adapted
from tests.models.conftest import random_tokens
from tests.mtp_models import make_mtp_model
from tests.thorough import A_THIRD, usually

ADAPTERS = ["", "wide", "narrow", "narrow", "wide", ""]
MAX_TOKENS = "inference_dynamic_batching_max_tokens"
BUFFER = "inference_dynamic_batching_buffer_size_gb"
REQUESTS = "inference_dynamic_batching_max_requests"


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return make_adapted("nemotron_h", tmp_path_factory.mktemp("nemotron_h"), TWO)


def prompts() -> list[list[int]]:
    """With much in common."""
    return [random_tokens(37, seed=1)[: 37 - i] + [i] for i in range(len(ADAPTERS))]


WAYS: dict[str, dict[str, Any]] = {
    "chunked": {MAX_TOKENS: 23},
    "with a step in flight": {"asynchronous": True},
    "states written now and then": {"mamba_inference_state_write_interval": 3},
    "one after the other": {REQUESTS: 1},
    "without a cache": {"inference_dynamic_batching_prefix_caching": False},
    "batch-invariant": {"batch_invariant": True},
    "through memory of the host": {
        "inference_dynamic_batching_prefix_caching_mamba_gb": 0.0005,
        "prefix_caching_host_gb": 0.01,
        BUFFER: 0.001,
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_however_they_are_computed(adapted: Adapted, way: str) -> None:
    options = dict(WAYS[way])
    asynchronous = bool(options.pop("asynchronous", False))
    llm = with_adapters(adapted, **options)
    llm.engine.runner.asynchronous = asynchronous
    for _ in range(usually(1, 2)):
        check(adapted, llm, prompts(), ADAPTERS)
        check(adapted, llm, prompts()[::-1], ADAPTERS)


def test_preempted_requests_go_on_with_their_adapters(adapted: Adapted) -> None:
    geometry = with_adapters(adapted).engine.cache_geometry
    live = 3 * geometry.bytes_per_slot
    llm = with_adapters(
        adapted,
        **{REQUESTS: 3, BUFFER: (12 * geometry.bytes_per_block + live + 1) / GIB},
        inference_dynamic_batching_prefix_caching_mamba_gb=(2 * geometry.bytes_per_slot + 1) / GIB,
    )
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate(prompts(), params, adapter=ADAPTERS, progress=False)
    assert llm.stats()["preemptions"] > 0
    for output, prompt, adapter in zip(outputs, prompts(), ADAPTERS, strict=True):
        assert output.token_ids == adapted.answer(prompt, 40, adapter)


@A_THIRD
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_drafts_change_no_answer(adapted: Adapted, batch_invariant: bool) -> None:
    texts = [
        prompt + adapted.answer(prompt, 24, adapter)
        for prompt, adapter in zip(prompts(), ADAPTERS, strict=True)
    ]
    llm = with_adapters(adapted, num_speculative_tokens=3, batch_invariant=batch_invariant)
    with_drafts(llm, Knowing(texts))
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    for _ in range(2):
        outputs = llm.generate(prompts(), params, adapter=ADAPTERS, progress=False)
        found = [output.prompt_token_ids + output.token_ids for output in outputs]
        assert found == texts
    assert llm.stats()["accepted_tokens"] > 20


def test_bits_are_those_of_a_request_alone(adapted: Adapted) -> None:
    """In batch-invariant mode."""
    llm = with_adapters(adapted, batch_invariant=True)

    def bits(prompts: list[list[int]], adapters: list[str]) -> list[list[float]]:
        outputs = llm.generate(prompts, PARAMS, adapter=adapters, progress=False)
        return [[one.logprob for one in output.logprobs] for output in outputs]

    together = bits(prompts(), ADAPTERS)
    assert bits(prompts(), ADAPTERS) == together  # from the cache
    for prompt, adapter, wanted in zip(prompts(), ADAPTERS, together, strict=True):
        llm.engine.reset()
        assert bits([prompt], [adapter]) == [wanted]


def test_log_probabilities_of_prompts_and_of_given_answers(adapted: Adapted) -> None:
    llm = with_adapters(adapted)
    prompt = prompts()[0]
    answer = adapted.answer(prompt, ANSWER, "wide")
    logits = adapted.logits([*prompt, *answer], "wide").log_softmax(-1)
    ((score,),) = llm.score([prompt], [answer], adapter="wide", progress=False)
    wanted = logits[range(len(prompt) - 1, len(prompt) + ANSWER - 1), answer].sum()
    assert abs(score.total - float(wanted)) < 5e-3
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([prompt], params, adapter="narrow", progress=False)
    logits = adapted.logits(prompt, "narrow").log_softmax(-1)
    for i, one in enumerate(output.prompt_logprobs[1:]):
        assert abs(one.logprob - float(logits[i, prompt[i + 1]])) < 2e-3


def test_quantised_layers_hand_adapters_what_inputs_were(adapted: Adapted) -> None:
    """Before they were rounded to 8 bits, as the base product takes them."""
    llm = with_adapters(adapted, quantization="fp8")
    prompt = prompts()[0]
    answer = adapted.answer(prompt, ANSWER, "wide")
    scores = {}
    for adapter in ("wide", "narrow", ""):
        ((score,),) = llm.score([prompt], [answer], adapter=adapter, progress=False)
        logits = adapted.logits([*prompt, *answer], adapter).log_softmax(-1)
        wanted = logits[range(len(prompt) - 1, len(prompt) + ANSWER - 1), answer].sum()
        scores[adapter] = score.total
        assert abs(score.total - float(wanted)) < 0.2, adapter
    assert scores["wide"] > scores["narrow"] + 1 and scores["wide"] > scores[""] + 1


def test_drafts_of_the_models_own_head(tmp_path: Path) -> None:
    """The head has no adapters: its drafts may be wrong, and answers are not."""
    model = make_mtp_model("qwen3_next", tmp_path / "model", agrees=True).model
    adapted = adapt("qwen3_next", tmp_path, model, TWO, strength=0.1)
    llm = with_adapters(adapted, num_speculative_tokens=2, drafter="heads")
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for _ in range(2):
        outputs = llm.generate(prompts(), params, adapter=ADAPTERS, progress=False)
        for output, prompt, adapter in zip(outputs, prompts(), ADAPTERS, strict=True):
            assert output.token_ids == adapted.answer(prompt, 12, adapter)
    assert llm.stats()["draft_tokens"] > 0
