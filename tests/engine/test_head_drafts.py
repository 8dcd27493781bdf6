"""Drafts from a model's head: they are those of transformers' layers put together by hand, and
answers with them are those without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hybrid import LLM, RequestOutput, SamplingParams
from megatron_hybrid.cache.geometry import GIB
from megatron_hybrid.execution.figures import StepFigures
from megatron_hybrid.execution.head_drafts import HeadDrafter
from megatron_hybrid.kernels.contract import PagedHost
from tests.mtp_models import MTP_FAMILIES, MTPOracle, make_mtp_model
from tests.thorough import usually

GRID = 16
OPTIONS = {
    "inference_dynamic_batching_block_size": GRID,
    "inference_dynamic_batching_buffer_size_gb": 0.03,
    "inference_dynamic_batching_max_requests": 12,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.01,
}
# Tokens from one write of a request's states to the next.
WRITE_INTERVALS = {"qwen3_next": 4, "qwen3_5": 1, "nemotron_h": 3}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@dataclass
class Watch:
    """Of every step with drafts of one engine: which, for whom, and what they were chosen from."""

    llm: LLM
    drafts: list[tuple[list[int], list[int], Tensor, tuple[int, ...]]] = field(default_factory=list)
    _logits: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        runner = self.llm.engine.runner
        head, model = runner._batch_builder._drafted._head, runner._model
        assert isinstance(head, HeadDrafter)
        self._draft, self._predict = head.draft, model.predict
        head.draft = self.draft  # type: ignore[method-assign]
        model.predict = self.predict  # type: ignore[method-assign]

    def predict(self, *args: Any) -> tuple[Tensor, Tensor]:
        logits, hidden = self._predict(*args)
        self._logits.append(logits)
        return logits, hidden

    def draft(
        self, step: StepFigures[Tensor], host: PagedHost, count: int, *args: Tensor
    ) -> Tensor:
        self._logits.clear()
        found = self._draft(step, host, count, *args)
        logits = torch.stack(self._logits, dim=1)
        own = (step.cu_seqlens[: len(found) + 1].diff() - 1).tolist()
        for i, row in enumerate(step.decode_rows.tolist()):
            request = self.llm.engine.context.running_in(row).request
            text = request.tokens(0, request.num_tokens).tolist()
            assert (text[-1], len(text) - 1) == (int(args[0][i]), int(args[1][i]))
            stop_ids = tuple(request.stop_ids)
            if own[i]:
                made = found[i, : own[i]].tolist()
                self.drafts.append((text, made, logits[i, : own[i]], stop_ids))
        return found

    def check(self, oracle: MTPOracle, least: int) -> None:
        """... of what was drafted since the last check, of some all if there are many."""
        assert len(self.drafts) >= least
        for text, drafts, logits, stop_ids in self.drafts[
            :: usually(1 + len(self.drafts) // 20, 1)
        ]:
            expected, truth = oracle.chain(text, len(drafts), stop_ids)
            assert drafts == expected
            difference = torch.log_softmax(logits, -1) - torch.log_softmax(truth, -1)
            assert difference.abs().max() < oracle.tolerance
        self.drafts.clear()


@pytest.fixture(scope="module", params=MTP_FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MTPOracle:
    folder = tmp_path_factory.mktemp(request.param)
    made = make_mtp_model(request.param, folder, agrees=True, chunk_size=GRID)
    return made


def llm(oracle: MTPOracle, **options: Any) -> LLM:
    interval = {"mamba_inference_state_write_interval": WRITE_INTERVALS[oracle.family]}
    return LLM(str(oracle.folder), **(OPTIONS | interval | oracle.options | options))


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Some begin alike."""
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(0, 160, (200,), generator=generator).tolist()
    other = torch.randint(0, 160, (200,), generator=generator).tolist()
    return [text[: n - n % 7] + other[n : n + n % 7] for n in lengths]


PROMPTS = random_prompts((1, 2, 3, 16, 17, 30, 33, 47))


def generate(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, progress=False)
    llm.engine.check_integrity()
    return outputs


def what_counts(outputs: Sequence[RequestOutput]) -> list[Any]:
    return [
        (choice.token_ids, choice.finish_reason, choice.cached_tokens)
        for output in outputs
        for choice in output.choices
    ]


@pytest.mark.parametrize("budget", [2048, 25])
def test_drafts_are_those_that_the_oracle_makes(oracle: MTPOracle, budget: int) -> None:
    """Behind prompts computed at once or in chunks, prefixes that were found in the cache, whole
    prompts that were, ends of answers, and runs of drafts that hold."""
    engine = llm(oracle, num_speculative_tokens=4, inference_dynamic_batching_max_tokens=budget)
    watch = Watch(engine)
    outputs = generate(engine, PROMPTS)
    watch.check(oracle, 20)
    generate(engine, PROMPTS)
    watch.check(oracle, 20)
    turns = [o.prompt_token_ids + o.token_ids + [7, 8] for o in outputs[::2]]
    found = generate(engine, turns)
    assert all(output.cached_tokens for output in found)
    watch.check(oracle, 10)
    stats = engine.stats()
    assert stats["accepted_tokens"] > 20 and stats["accepted_by_position"]["1"] > 2


def batches(engine: LLM) -> Iterator[list[Any]]:
    """What comes of the same requests, one batch after the other."""
    yield what_counts(first := generate(engine, PROMPTS))
    yield what_counts(generate(engine, PROMPTS))
    yield what_counts(generate(engine, [prompt for prompt in PROMPTS[::3] for _ in (0, 1)]))
    for output in first[::3]:
        (turn,) = generate(engine, [output.prompt_token_ids + output.token_ids + [5, 6]])
        yield what_counts([turn])
    for options in ({"temperature": 1.0}, {"temperature": 2.0, "top_p": 0.8, "top_k": 40}):
        params = SamplingParams(max_tokens=12, ignore_eos=True, seed=3, n=2, **options)
        yield what_counts(generate(engine, PROMPTS[-3:], params))
    stop_ids = tuple(sorted({token for output in first for token in output.token_ids[9::7]}))[:8]
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=stop_ids)
    stopped = what_counts(generate(engine, PROMPTS, params))
    assert any(tokens[-1] in stop_ids for tokens, _, _ in stopped)
    yield stopped


# Which numbers of drafts, with a step in flight or without; TESTS=all: every family with all.
ASYNCHRONOUS = {"qwen3_next": [False], "qwen3_5": [False], "nemotron_h": [True]}
NUMBERS = {"qwen3_next": (8,), "qwen3_5": (1,), "nemotron_h": (2,)}
PREEMPTED = ("qwen3_next",)
STOPPED = ("qwen3_next",)  # by ids that are never drafted
COMPARED = ("nemotron_h",)  # with answers without drafts


# Prompts computed at once or in chunks; TESTS=all: every family's both.
BUDGETS = {"qwen3_next": [25], "qwen3_5": [25], "nemotron_h": [2048]}


def is_thorough(
    test: str,
    oracle: str,
    asynchronous: bool | None = None,
    budget: int | None = None,
    **others: object,
) -> bool:
    """Whether CI leaves this case out."""
    if test == "test_preempted_answers_are_those_without_drafts" and oracle not in PREEMPTED:
        return True
    if test == "test_answers_are_those_without_drafts" and oracle not in COMPARED:
        return True
    if test == "test_a_token_that_ends_the_answer_is_never_drafted" and oracle not in STOPPED:
        return True
    if budget is not None and budget not in BUDGETS[oracle]:
        return True
    return asynchronous is not None and asynchronous not in ASYNCHRONOUS[oracle]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_answers_are_those_without_drafts(oracle: MTPOracle, asynchronous: bool) -> None:
    plain = llm(oracle)
    plain.engine.runner.asynchronous = asynchronous
    expected = list(batches(plain))
    for number in usually(NUMBERS[oracle.family], (1, 2, 4, 8)):
        engine = llm(oracle, num_speculative_tokens=number)
        engine.engine.runner.asynchronous = asynchronous
        for found, right in zip(batches(engine), expected, strict=True):
            assert found == right, number
        assert engine.stats()["accepted_tokens"] > 30


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_preempted_answers_are_those_without_drafts(oracle: MTPOracle, asynchronous: bool) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = [output.token_ids for output in generate(llm(oracle), PROMPTS, params)]
    for number in usually(NUMBERS[oracle.family][-1:], (2, 4, 8)):
        roomy = llm(oracle, num_speculative_tokens=number).engine
        geometry, caches = roomy.context.geometry, roomy.runner._caches
        live = 3 * geometry.bytes_per_slot
        for rings in caches.rings.values():
            live += 3 * sum(ring[0].nbytes for ring in (rings.conv, *rings.inputs))
        kept = 2 * geometry.bytes_per_slot
        engine = llm(
            oracle,
            num_speculative_tokens=number,
            inference_dynamic_batching_max_requests=3,
            inference_dynamic_batching_buffer_size_gb=(
                (9 * geometry.bytes_per_block + live + 1) / GIB
            ),
            inference_dynamic_batching_prefix_caching_mamba_gb=(kept + 1) / GIB,
        )
        engine.engine.runner.asynchronous = asynchronous
        watch = None if asynchronous else Watch(engine)
        for prompts, right in ((PROMPTS, expected), (PROMPTS[::-1], expected[::-1])):
            assert [o.token_ids for o in generate(engine, prompts, params)] == right
        if watch is not None:
            watch.check(oracle, 20)
        stats = engine.stats()
        assert stats["preemptions"] > 2 and stats["kv_evictions"] > 5
        assert stats["accepted_tokens"] > 30


def test_a_token_that_ends_the_answer_is_never_drafted(oracle: MTPOracle) -> None:
    engine = llm(oracle, num_speculative_tokens=4)
    watch = Watch(engine)
    generate(engine, PROMPTS)
    drafted = [token for _, drafts, _, _ in watch.drafts for token in drafts]
    common = tuple(sorted(set(drafted), key=drafted.count)[-16:])
    watch.drafts.clear()
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=common[:3])
    generate(engine, PROMPTS, params)
    assert not {token for _, drafts, _, _ in watch.drafts for token in drafts} & set(common[:3])
    watch.check(oracle, 10)
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=(*common, 0))
    generate(engine, PROMPTS, params)  # more of them than the device is told
    assert not watch.drafts
