"""Cached states of a smaller type: rounded once, when they are kept, never while a request runs.

The oracle is an exact engine whose cached states are rounded by the test, by the formula, between
two requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_hybrid import LLM, RequestOutput, SamplingParams
from megatron_hybrid.cache.geometry import STAGED_SLOTS
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.request import FinishReason
from tests.engine.symbolic import answer, expected_answer, make_engine, random_tokens, run
from tests.knowing_drafter import Knowing, with_drafts
from tests.thorough import A_THIRD, usually
from tests.tiny_models import make_tiny_model

GRID = 16
CACHED_TYPE = "mamba_inference_cached_states_dtype"
EXACT_ENDS = "inference_dynamic_batching_prefix_caching_exact_ends"
OPTIONS = {
    "inference_dynamic_batching_block_size": GRID,
    "inference_dynamic_batching_buffer_size_gb": 0.02,
    "inference_dynamic_batching_max_requests": 12,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.02,
}
# a scale a head and state column, a head and key channel, a channel; no recurrence but a window
FAMILIES = ("nemotron_h", "qwen3_next", "jamba", "lfm2")
WAYS = {
    "extract": {},
    "break": {"prefill_checkpoint_mode": "break"},
    "chunks": {"inference_dynamic_batching_max_tokens": 41},
    "on the grid": {EXACT_ENDS: False},
    "rings": {"mamba_inference_state_write_interval": 4},
    "drafts": {"num_speculative_tokens": 3},
}
# (family, way, with a step in flight)
CASES = usually(
    [
        *(("nemotron_h", way, way in ("rings", "drafts")) for way in WAYS),
        *((family, "extract", True) for family in FAMILIES[1:]),
    ],
    list(product(FAMILIES, WAYS, (False, True))),
)
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
Ask = Callable[..., RequestOutput]
TEXT = random_tokens(3, 400)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, path in made.items():
        make_tiny_model(family, path, chunk_size=GRID)
    return made


@pytest.fixture
def nemotron(folders: dict[str, Path]) -> Path:
    return folders["nemotron_h"]


def make(folder: Path, *, asynchronous: bool = False, **options: object) -> LLM:
    llm = LLM(str(folder), **(OPTIONS | options))  # type: ignore[arg-type]
    llm.engine.runner.asynchronous = asynchronous
    return llm


def int8(state: Tensor) -> Tensor:
    """[..., rows, columns]: a scale a column; [channels, states]: a scale a channel."""
    largest = state.abs().amax(-1 if state.dim() == 2 else -2, keepdim=True)
    step = torch.where(largest > 0, largest / 127, 1)
    return torch.round(state / step) * step


def bfloat16(state: Tensor) -> Tensor:
    return state.bfloat16().float()


class RoundedByHand:
    """An exact engine; between two requests, what it has newly cached is rounded."""

    def __init__(self, llm: LLM, formula: str) -> None:
        self.llm = llm
        self._round = {"int8": int8, "bfloat16": bfloat16}[formula]
        self._done: set[bytes] = set()

    def ask(
        self, prompt: list[int], params: SamplingParams = PARAMS, **named: object
    ) -> RequestOutput:
        output = self.llm.generate(prompt, params, progress=False, **named)  # type: ignore
        caches = self.llm.engine.runner._caches  # type: ignore[attr-defined]
        for state in self.llm.engine.context.cache.states.cached():
            if state.key not in self._done:
                self._done.add(state.key)
                for layer in caches.state.values():
                    if layer.ssm[state.slot].numel():
                        layer.ssm[state.slot] = self._round(layer.ssm[state.slot])
        return output[0] if isinstance(output, list) else output


def conversation(ask: Ask) -> Iterator[RequestOutput]:
    """Prompts that go on from all kinds of checkpoints, and from what such a request left. None
    comes again to a position that was kept: an exact engine goes on from what it has kept there."""
    first = ask(TEXT[:70], cache_checkpoints=(20, 48))
    yield first
    yield ask(TEXT[:70], SHORT)
    yield ask(TEXT[:48] + TEXT[200:230])
    yield ask(TEXT[:20] + TEXT[240:260])
    last = first
    for turn in range(3):
        said = list(last.prompt_token_ids) + list(last.token_ids)
        last = ask(said + TEXT[300 + 9 * turn :][:9])
        yield last


@A_THIRD
@pytest.mark.parametrize(("family", "way", "asynchronous"), CASES)
def test_answers_are_those_of_checkpoints_rounded_once_by_hand(
    folders: dict[str, Path], family: str, way: str, asynchronous: bool
) -> None:
    check_by_hand(folders[family], "int8", asynchronous=asynchronous, **WAYS[way])


def test_bfloat16_is_rounded_once_too(nemotron: Path) -> None:
    check_by_hand(nemotron, "bfloat16")


def asks(llm: LLM) -> Ask:
    def ask(prompt: list[int], params: SamplingParams = PARAMS, **named: object) -> RequestOutput:
        output = llm.generate(prompt, params, progress=False, **named)  # type: ignore
        llm.engine.check_integrity()
        return output[0] if isinstance(output, list) else output

    return ask


def check_by_hand(folder: Path, dtype: str, **options: object) -> None:
    packed = make(folder, **options, **{CACHED_TYPE: dtype})  # type: ignore[arg-type]
    by_hand = RoundedByHand(make(folder, **options), dtype)  # type: ignore[arg-type]
    assert packed.engine.context.geometry.packs_states
    assert not by_hand.llm.engine.context.geometry.packs_states
    if "num_speculative_tokens" in options:
        without = make(folder, **{CACHED_TYPE: dtype})
        said = [o.prompt_token_ids + o.token_ids for o in conversation(asks(without))]
        for llm in (packed, by_hand.llm):
            with_drafts(llm, Knowing(said))
    cached, ask = 0, asks(packed)
    for found, expected in zip(conversation(ask), conversation(by_hand.ask), strict=True):
        assert found.prompt_token_ids == expected.prompt_token_ids
        assert found.cached_tokens == expected.cached_tokens
        assert found.token_ids == expected.token_ids
        assert logprobs(found) == logprobs(expected), "to the bit"
        cached += found.cached_tokens
    assert cached > 200
    if "num_speculative_tokens" in options:
        assert packed.stats()["accepted_tokens"] > 20


def logprobs(output: RequestOutput) -> list[float]:
    return [entry.logprob for entry in output.logprobs or []]


def test_a_running_request_is_never_rounded(nemotron: Path) -> None:
    """Whatever it leaves on its way, inside its prompt, at its end and in its answer."""
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, logprobs=1)
    every_block = {"inference_dynamic_batching_prefix_caching_checkpoint_interval": GRID}
    found = []
    for dtype in (None, "int8"):
        llm = make(nemotron, **every_block, **{CACHED_TYPE: dtype})
        (output,) = llm.generate([TEXT[:90]], params, progress=False)
        assert sum(llm.stats()["checkpoints_published"].values()) >= 8
        found.append((output.token_ids, logprobs(output)))
    assert found[0] == found[1]


def test_rounding_changes_what_a_warm_request_computes(nemotron: Path) -> None:
    """Or the other tests would show nothing."""
    found = []
    for dtype in (None, "int8", "bfloat16"):
        llm = make(nemotron, **{CACHED_TYPE: dtype})
        llm.generate([TEXT[:70]], PARAMS, progress=False)
        (output,) = llm.generate([TEXT[:70] + TEXT[100:110]], PARAMS, progress=False)
        assert output.cached_tokens == 70
        found.append(logprobs(output))
    exact, *rounded = map(torch.tensor, found)
    for one in rounded:
        assert 0 < (one - exact).abs().max() < 0.05


def test_the_type_of_the_live_states_is_exact_and_needs_no_slots_of_its_own(
    nemotron: Path,
) -> None:
    plain, same = make(nemotron), make(nemotron, **{CACHED_TYPE: "float32"})
    assert same.engine.context.geometry == plain.engine.context.geometry
    assert not same.engine.runner._caches.packed  # type: ignore[attr-defined]


def test_a_model_without_states_has_none_to_pack(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    llm = make(tmp_path, **{CACHED_TYPE: "int8"})
    assert not llm.engine.context.geometry.packs_states
    for _ in range(2):
        (output,) = llm.generate([TEXT[:40]], PARAMS, progress=False)
    assert output.cached_tokens == 40


# ------------------------------------------------------------ without a model: whose state it is


def ask(engine: DynamicInferenceEngine, name: str, prompt: list[int], count: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    engine.add_request(name, prompt, params)
    found = answer(run(engine)[name])
    assert found == expected_answer(prompt, count)
    return prompt + found


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("exact_ends", [True, False])
def test_a_state_is_rounded_once_for_each_request_that_it_came_through(
    exact_ends: bool, drafts: int, asynchronous: bool
) -> None:
    engine = make_engine(
        packed=True, exact_ends=exact_ends, interval=8, cached_slots=40, num_blocks=200,
        drafts=drafts,
    )  # fmt: skip
    runner, cache = engine.runner, engine.context.cache
    text = random_tokens(5, 30)
    for turn in range(4):
        text = ask(engine, f"turn {turn}", text + random_tokens(turn, 7), 11)
        engine.add_request("x", random_tokens(99 + turn, 3), SamplingParams(max_tokens=1))
        run(engine)  # what was published last has been packed since
        known = {state.position: state for state in cache.states.cached() if state.position > 9}
        assert len(known) > 3
        counts = [runner.roundings[known[position].slot] for position in sorted(known)]
        assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == turn + 1


def test_what_a_step_can_store_in_the_middle_of_prompts_is_bounded(asynchronous: bool) -> None:
    engine = make_engine(
        packed=True, interval=4, max_requests=12, max_tokens=200, num_blocks=200, cached_slots=60
    )
    cache = engine.context.cache
    assert cache.packing.num_free == STAGED_SLOTS
    prompt = random_tokens(1, 150)
    ask(engine, "a", prompt, 1)
    (chunk,) = engine.runner.plans[0].prefills
    assert len(chunk.checkpoints) == STAGED_SLOTS
    assert cache.checkpoints_skipped == 150 // 4 - STAGED_SLOTS
    # a long prompt in chunks: each step has all of them again
    long = random_tokens(2, 240)
    engine = make_engine(
        packed=True, interval=8, max_requests=12, max_tokens=64, num_blocks=200, cached_slots=60
    )
    ask(engine, "b", long, 1)
    stored = [len(chunk.checkpoints) for plan in engine.runner.plans for chunk in plan.prefills]
    assert stored[:3] == [7, 7, 7] and engine.context.cache.checkpoints_skipped == 0


def test_a_step_that_fails_before_its_states_are_packed_empties_the_cache(
    asynchronous: bool,
) -> None:
    engine = make_engine(packed=True, exact_ends=True)
    prompt = random_tokens(4, 30)
    ask(engine, "a", prompt, 3)
    assert engine.context.cache.states.num_cached
    engine.runner.fail_next = True
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    engine.add_request("b", prompt, params)
    events = run(engine)["b"]
    assert events[-1].finish_reason is FinishReason.ERROR
    assert not engine.context.cache.states.num_cached
    ask(engine, "c", prompt, 3)


def test_an_aborted_answer_leaves_the_state_that_its_last_drafts_went_past() -> None:
    """It is folded and packed before the next step, in this order."""
    stored, params = 0, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for steps in range(2, 16):
        engine = make_engine(packed=True, drafts=3, right=1.0, num_blocks=200, asynchronous=False)
        prompt = random_tokens(6, 9)
        engine.add_request("a", prompt, params)
        said = [token for _ in range(steps) for e in engine.step() for token in e.token_ids]
        engine.abort("a")
        run(engine)
        text = prompt + said
        assert ask(engine, "b", text + [1, 2, 3], 5)[: len(text)] == text
        first, second = (chunk for plan in engine.runner.plans for chunk in plan.prefills)
        fed = len(text) - 1
        assert (first.start, second.start) == (0, fed // 4 * 4), "the newest position on the grid"
        catch_ups = [one for plan in engine.runner.plans for one in plan.catch_ups]
        stored += sum(one.checkpoint_slot > 0 for one in catch_ups)
    assert stored > 2
