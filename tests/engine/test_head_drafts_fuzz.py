"""Random traffic with drafts of a head: the tokens of an engine without drafts, and the drafts that
the oracle makes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.cache.geometry import GIB
from megatron_hybrid.request import ThinkingBudget
from tests.engine.test_head_drafts import OPTIONS, Watch
from tests.mtp_models import MTP_FAMILIES, MTPOracle, make_mtp_model
from tests.thorough import usually

REQUESTS = 12
CLOSE = (3, 5)  # what thoughts that have used their budget up are ended with
Request = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> list[MTPOracle]:
    made = [(family, tmp_path_factory.mktemp(family)) for family in MTP_FAMILIES]
    return [make_mtp_model(*one, agrees=True, chunk_size=16) for one in made]


def tight_options(pick: np.random.Generator, plain: LLM) -> dict[str, Any]:
    """Of an engine with drafts that has room for little."""
    geometry = plain.engine.context.geometry
    blocks = int(pick.integers(30, 60)) * geometry.bytes_per_block
    live = 3 * geometry.bytes_per_slot + (1 << 20)  # with the rings
    states = int(pick.integers(2, 9)) * geometry.bytes_per_slot
    return {
        "num_speculative_tokens": int(pick.integers(1, 9)),
        "mamba_inference_state_write_interval": int(pick.integers(1, 6)),
        "inference_dynamic_batching_max_requests": int(pick.integers(2, 5)),
        "inference_dynamic_batching_max_tokens": int(pick.integers(12, 60)),
        "inference_dynamic_batching_buffer_size_gb": (blocks + live) / GIB,
        "inference_dynamic_batching_prefix_caching_mamba_gb": states / GIB,
    }


def random_request(pick: np.random.Generator, texts: list[list[int]]) -> Request:
    """Most begin as an earlier text does."""
    earlier = texts[int(pick.integers(len(texts)))]
    prompt = earlier[: int(pick.integers(1, min(len(earlier), 100)))]
    prompt = prompt + pick.integers(0, 160, int(pick.integers(5))).tolist()
    stop_ids = tuple(pick.integers(0, 160, int(pick.integers(4))).tolist())
    drawn = {"temperature": 1.0, "seed": int(pick.integers(1000))}
    options: dict[str, Any] = {"temperature": 0.0} if pick.random() < 0.6 else drawn
    length = int(pick.integers(1, 40))
    if pick.random() < 0.4:
        tokens, opened = int(pick.integers(12)), bool(pick.random() < 0.7)
        ends = text_of(CLOSE), text_of([int(pick.integers(160))])  # which may come by itself
        options["thinking_token_budget"] = ThinkingBudget(
            tokens, tuple(text_of(range(80))), ends, CLOSE, opened
        )
    return prompt, SamplingParams(max_tokens=length, stop_token_ids=stop_ids, **options)


def text_of(token_ids: Iterable[int]) -> str:
    """A letter for each."""
    return "".join(chr(0x4E00 + token) for token in token_ids)


class Reading:
    """Stands for a tokenizer."""

    def reader(self) -> Any:
        return text_of


def check_thoughts(budget: ThinkingBudget, answer: list[int]) -> None:
    """That they ended by themselves, or as they had to."""
    begin = 0 if budget.opened else 1
    if begin and answer[:1] and text_of(answer[:1]) not in budget.begin:
        return
    thoughts = text_of(answer[begin : begin + budget.tokens])
    if not any(mark in thoughts for mark in budget.end):
        forced = answer[begin + budget.tokens :][: len(CLOSE)]
        assert forced == list(CLOSE[: len(forced)])


@pytest.mark.parametrize("seed", range(60)[:: usually(58, 1)])  # of 3 families, in both ways
def test_random_traffic(oracles: list[MTPOracle], seed: int) -> None:
    pick = np.random.default_rng(seed)
    oracle, asynchronous = oracles[seed % 3], bool(seed // 3 % 2)
    plain = LLM(str(oracle.folder), **OPTIONS)  # type: ignore[arg-type]
    llm = LLM(str(oracle.folder), **(OPTIONS | tight_options(pick, plain)))  # type: ignore[arg-type]
    engine = llm.engine
    engine.incoming.grammars = plain.engine.incoming.grammars = Reading()  # type: ignore[assignment]
    engine.runner.asynchronous = asynchronous
    watch = None if asynchronous else Watch(llm)
    texts = [pick.integers(0, 160, 200).tolist()]
    requests: list[Request] = []
    said: list[list[int]] = []
    aborted = set()
    while len(requests) < REQUESTS or engine.has_work():
        if len(requests) < REQUESTS and pick.random() < 0.3:
            requests.append(random_request(pick, texts))
            engine.add_request(str(len(said)), *requests[-1])
            said.append([])
        for event in engine.step():
            number = int(event.request_id)
            said[number] += event.token_ids
            assert event.error is None
            if event.finish_reason is not None:
                texts.append(requests[number][0] + said[number])
        engine.check_integrity()
        if requests and pick.random() < 0.01:
            aborted.add(number := int(pick.integers(len(requests))))
            engine.abort(str(number))
    for number, ((prompt, params), found) in enumerate(zip(requests, said, strict=True)):
        (right,) = plain.generate([prompt], params, progress=False)
        assert (right.token_ids[: len(found)] if number in aborted else right.token_ids) == found
        if isinstance(params.thinking_token_budget, ThinkingBudget):
            check_thoughts(params.thinking_token_budget, found)
    if watch is not None:
        watch.check(oracle, 10)
