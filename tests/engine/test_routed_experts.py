"""Which experts tokens were sent to: those of transformers' routers in a full recompute, in every
way that tokens can be computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_hybrid import LLM, InvalidRequestError, RequestOutput, SamplingParams
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.build_routed import check_routed_experts
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.execution.routed_reader import RoutedReading
from megatron_hybrid.growing_output import GrowingOutput
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.request import FinishReason, RequestEvent
from megatron_hybrid.routed_experts import RoutedExperts
from tests.knowing_drafter import Knowing, with_drafts
from tests.routers import OPTIONS, Ids, Routers
from tests.thorough import A_THIRD, usually
from tests.tiny_models import make_tiny_model

BUFFER = "inference_dynamic_batching_buffer_size_gb"
# Of these the first has experts in its last block, behind all that mixes tokens, and chooses by
# groups; the second has a dense layer among the others.
EVERY = [
    *("nemotron_h_moe", "qwen3_next", "granite_moe_hybrid", "jamba", "lfm2_moe", "qwen3_5_moe"),
    *("kimi_linear", "qwen4_exp", "zaya"),
]
FAMILIES = usually(EVERY[:2], EVERY)


def is_thorough(test: str, routers: str = "", **others: object) -> bool:
    """Whether CI leaves this case out: of two kinds one has a step in flight and small budgets."""
    last = FAMILIES.index(routers) % 2 if routers else 0
    chosen = {"asynchronous": bool(last), "budget": 3 if last else 19}
    return any(others.get(name, value) != value for name, value in chosen.items())


GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, return_routed_experts=True)


@pytest.fixture(scope="module", params=FAMILIES)
def routers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Routers:
    return Routers.of(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_cold_and_warm_they_are_those_of_transformers(routers: Routers, asynchronous: bool) -> None:
    llm = routers.llm()
    llm.engine.runner.asynchronous = asynchronous
    prompts = routers.prompts(1, 15, 16, 17, 31, 48, 70)
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY, progress=False)
        for output in outputs:
            routers.check(output)
    assert sum(output.cached_tokens for output in outputs) > 150


def test_a_conversation_goes_on_within_a_block(routers: Routers) -> None:
    """Keys, values and experts of the block's beginning are copied."""
    llm, (text,) = routers.llm(), routers.prompts(37)
    for turn in range(4):
        (output,) = llm.generate([text], GREEDY, progress=False)
        routers.check(output)
        assert output.cached_tokens == (len(text) - 4 if turn else 0)
        text = text + output.token_ids + routers.text[turn : turn + 3]


@pytest.mark.parametrize("budget", [3, 19])
def test_in_chunks(routers: Routers, budget: int) -> None:
    llm = routers.llm(
        inference_dynamic_batching_max_tokens=budget, inference_dynamic_batching_max_requests=3
    )
    for output in llm.generate(routers.prompts(40, 5, 33), GREEDY, progress=False):
        routers.check(output)


def test_several_samples_of_one_prompt(routers: Routers) -> None:
    params = SamplingParams(n=4, seed=3, max_tokens=20, ignore_eos=True, return_routed_experts=True)
    (output,) = routers.llm().generate(routers.prompts(45), params, progress=False)
    assert len({tuple(choice.token_ids) for choice in output.choices}) == 4
    for choice in output.choices:
        routers.check(choice)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_with_drafts_of_which_some_are_wrong(routers: Routers, asynchronous: bool) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=30, ignore_eos=True, return_routed_experts=True
    )
    prompts = routers.prompts(20, 35, 48)
    plain = routers.llm().generate(prompts, params, progress=False)
    texts = [output.prompt_token_ids + output.token_ids for output in plain]
    llm = with_drafts(
        routers.llm(num_speculative_tokens=3, drafter="prompt_lookup"), Knowing(texts)
    )
    llm.engine.runner.asynchronous = asynchronous
    for output, text in zip(llm.generate(prompts, params, progress=False), texts, strict=True):
        assert output.prompt_token_ids + output.token_ids == text
        routers.check(output)
    stats = llm.stats()
    assert 0 < stats["accepted_tokens"] < stats["draft_tokens"]


def small(routers: Routers, **options: Any) -> LLM:
    """With room for few blocks."""
    most = {"inference_dynamic_batching_max_requests": 4, "inference_max_seq_length": 160}
    roomy = routers.llm(**most, **options)
    geometry, spec = roomy.engine.cache_geometry, roomy.engine.runner._caches  # type: ignore[attr-defined]
    block = geometry.bytes_per_block + spec.routed[0].nbytes
    size = 4 * geometry.bytes_per_slot + 14 * block
    return routers.llm(**most, **options, **{BUFFER: (size + block // 2) / 2**30})


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preempted(routers: Routers, asynchronous: bool) -> None:
    llm = small(routers)
    assert llm.engine.cache_geometry.num_blocks <= 14
    llm.engine.runner.asynchronous = asynchronous
    params = SamplingParams(
        temperature=0.0, max_tokens=60, ignore_eos=True, return_routed_experts=True
    )
    for output in llm.generate(routers.prompts(40, 41, 42, 43), params, progress=False):
        routers.check(output)
    assert llm.stats()["preemptions"] > 0
    llm.engine.check_integrity()


def run_until(llm: LLM, done: Callable[[list[RequestEvent]], bool]) -> list[RequestEvent]:
    events: list[RequestEvent] = []
    while not done(events):
        events += llm.engine.step()
    return events


def experts_of(events: list[RequestEvent], name: str = "r") -> tuple[list[int], Ids | None]:
    """Tokens of its answer, and its experts."""
    own = [event for event in events if event.request_id == name]
    tokens = [token for event in own for token in event.token_ids]
    experts = own[-1].routed_experts
    return tokens, None if experts is None else experts.array()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_partial_rollout_goes_on(routers: Routers, asynchronous: bool) -> None:
    llm, (prompt,) = routers.llm(), routers.prompts(50)
    engine = llm.engine
    engine.runner.asynchronous = asynchronous
    params = SamplingParams(
        temperature=0.0, max_tokens=30, ignore_eos=True, return_routed_experts=True
    )
    engine.add_request("r", prompt, params)
    events = run_until(llm, lambda events: sum(len(e.token_ids) for e in events) >= 11)
    engine.abort("r")
    events += run_until(llm, lambda _: not engine.has_work())
    answer, experts = experts_of(events)
    assert len(answer) >= 11
    routers.check_ids(prompt + answer, experts)
    (output,) = llm.generate([prompt + answer], params, progress=False)
    assert output.cached_tokens == len(prompt) + len(answer) - 1
    routers.check(output)


def test_those_that_end_before_their_prompt_is_computed_have_none(routers: Routers) -> None:
    llm = routers.llm(
        inference_dynamic_batching_max_tokens=16, inference_dynamic_batching_max_requests=4
    )
    llm.engine.add_request("r", routers.text[:60], GREEDY)
    events = llm.engine.step()
    llm.engine.abort("r")
    llm.engine.add_request("s", routers.text[:30], GREEDY)
    llm.engine.abort("s")
    events += run_until(llm, lambda _: not llm.engine.has_work())
    assert experts_of(events) == experts_of(events, "s") == ([], None)


@pytest.mark.parametrize("steps", [0, 1])
def test_who_is_aborted_while_preempted_has_those_from_before(routers: Routers, steps: int) -> None:
    """Also where a part was computed again."""
    llm = routers.llm(
        inference_dynamic_batching_max_tokens=16, inference_dynamic_batching_max_requests=4
    )
    llm.engine.add_request("r", routers.text[:40], GREEDY)
    events = run_until(llm, lambda events: sum(len(e.token_ids) for e in events) >= 3)
    llm.engine.scheduler.preempt_all()
    llm.engine.reset()
    llm.engine.runner._caches.routed.zero_()  # type: ignore[attr-defined]
    for _ in range(steps):
        assert not llm.engine.step()
        llm.engine.scheduler.preempt_all()
    llm.engine.abort("r")
    events += run_until(llm, lambda _: not llm.engine.has_work())
    answer, experts = experts_of(events)
    routers.check_ids(routers.text[:40] + answer, experts)


@A_THIRD
@pytest.mark.parametrize("start", [0, 1, 15, 16, 39, 40])
def test_only_from_a_position_on(routers: Routers, start: int) -> None:
    llm = routers.llm()
    for most in (0, 1, 6):
        params = SamplingParams(
            temperature=0.0, max_tokens=most, ignore_eos=True, return_routed_experts=True,
            routed_experts_prompt_start=start,
        )  # fmt: skip
        (output,) = llm.generate([routers.text[:40]], params, progress=False)
        routers.check(output, start)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Routers:
    return Routers.of(EVERY[0], tmp_path_factory.mktemp("one"))


def test_an_answer_that_was_cut_here_has_those_of_its_own_tokens(one: Routers) -> None:
    """By a stop string: the engine has computed more by then."""
    (whole,) = one.llm().generate([one.text[:20]], GREEDY, progress=False)
    assert whole.routed_experts is not None
    event = RequestEvent("r", token_ids=whole.token_ids[:3], prompt_tokens=20)
    output = RequestOutput("r", whole.prompt_token_ids)
    growing = GrowingOutput(output, None, ())
    growing.advance(event)
    growing.finish_reason = FinishReason.STOP
    experts = RoutedExperts.of(whole.routed_experts, 0)
    growing.advance(RequestEvent("r", finish_reason=FinishReason.STOP, routed_experts=experts))
    assert output.token_ids == whole.token_ids[:3]
    one.check(output)


def test_they_come_from_memory_of_the_host(one: Routers) -> None:
    llm = small(one, prefix_caching_host_gb=0.01)
    texts = one.prompts(*[60] * 8)
    for _ in range(2):
        outputs = [llm.generate([text], GREEDY, progress=False)[0] for text in texts]
        for output in outputs:
            one.check(output)
    assert sum(llm.stats()["tier_fetches"].values()) > 0 and outputs[0].cached_tokens >= 48


def test_a_step_is_not_waited_for(one: Routers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device is behind, the last event comes a step later; until then there is work."""
    monkeypatch.setattr(RoutedReading, "is_here", False)
    llm = one.llm()
    engine = llm.engine
    engine.add_request("r", one.text[:20], GREEDY)
    engine.add_request("plain", one.text[30:50], SamplingParams(temperature=0.0, max_tokens=6))
    events = run_until(llm, lambda events: any(e.finish_reason for e in events))
    assert {e.request_id for e in events if e.finish_reason} == {"plain"}
    assert engine.has_work() and not engine.is_quiet
    events += engine.step() + engine.step()
    assert not engine.has_work()
    answer, experts = experts_of(events)
    assert len(answer) == 6
    one.check_ids(one.text[:20] + answer, experts)


def test_after_sleep(one: Routers) -> None:
    llm = one.llm(enable_sleep_mode=True)
    for _ in range(2):
        (output,) = llm.generate([one.text[:40]], GREEDY, progress=False)
        one.check(output)
        assert output.cached_tokens == 0
        llm.sleep()
        llm.wake_up()


def test_more_experts_than_a_byte_counts(tmp_path: Path) -> None:
    many = Routers.of("qwen3_next", tmp_path, num_experts=300)
    (output,) = many.llm().generate([many.text[:40]], GREEDY, progress=False)
    assert output.routed_experts is not None and output.routed_experts.dtype == np.uint16
    assert output.routed_experts.max() > 255
    expected = many.choices(output.prompt_token_ids + output.token_ids)[:-1]
    np.testing.assert_array_equal(np.sort(output.routed_experts, axis=-1), expected)


def test_without_the_flag_they_are_refused_by_its_name(one: Routers) -> None:
    llm = one.llm(enable_return_routed_experts=False)
    with pytest.raises(InvalidRequestError, match="--enable-return-routed-experts") as refused:
        llm.generate([one.text[:20]], GREEDY, progress=False)
    assert refused.value.field == "return_routed_experts"
    wherever = SamplingParams(temperature=0.0, max_tokens=3, return_routed_experts=None)
    assert llm.generate([one.text[:20]], wherever, progress=False)[0].routed_experts is None
    assert llm.engine.runner._caches.routed is None  # type: ignore[attr-defined]


def test_who_does_not_ask_gets_none_and_who_asks_wherever_gets_them(one: Routers) -> None:
    llm = one.llm()
    plain = SamplingParams(temperature=0.0, max_tokens=3)
    assert llm.generate([one.text[:20]], plain, progress=False)[0].routed_experts is None
    wherever = SamplingParams(temperature=0.0, max_tokens=3, return_routed_experts=None)
    one.check(llm.generate([one.text[:20]], wherever, progress=False)[0])


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"return_routed_experts": 1}, "return_routed_experts"),
        ({"routed_experts_prompt_start": -1}, "routed_experts_prompt_start"),
        ({"routed_experts_prompt_start": 21}, "routed_experts_prompt_start"),
        ({"routed_experts_prompt_start": None}, "routed_experts_prompt_start"),
    ],
)
def test_wrong_values(one: Routers, values: dict[str, Any], field: str) -> None:
    params = SamplingParams(**{"return_routed_experts": True, **values})
    with pytest.raises(InvalidRequestError) as refused:
        one.llm().generate([one.text[:20]], params, progress=False)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("family", "overrides", "options", "words"),
    [
        ("llama", {}, {}, "has no experts"),
        ("granite_moe_hybrid", {"layer_types": ["mamba"] * 4}, {}, "has no attention"),
        (
            "qwen3_next",
            {},
            {"pipeline_model_parallel_size": 2},
            "--pipeline-model-parallel-size 2",
        ),
        (
            "qwen3_next",
            {},
            {
                "role": "prefill",
                "disaggregation_listen": "127.0.0.1:0",
                "prefix_caching_host_gb": 0.01,
            },
            "--role prefill",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_the_start(
    tmp_path: Path,
    family: str,
    overrides: dict[str, Any],
    options: dict[str, Any],
    words: str,
) -> None:
    make_tiny_model(family, tmp_path, **overrides)
    config = EngineConfig(
        load=str(tmp_path), enable_return_routed_experts=True, **OPTIONS, **options
    )
    with pytest.raises(ConfigurationError, match=words) as refused:
        check_routed_experts(config, ModelFolder.of(config).config)
    assert str(refused.value).startswith("--enable-return-routed-experts")
