"""Events of the engine as Dynamo's front end takes them, and how they come to the worker's loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from megatron_hybrid.dynamo.answers import Answer
from megatron_hybrid.dynamo.stream import EventStream, Handover
from megatron_hybrid.request import FinishReason, RequestEvent, TokenLogprob
from megatron_hybrid.server.link.subscription import EngineUnavailable


def test_usage_comes_with_the_end_and_holds_what_was_cached() -> None:
    answer = Answer()
    first = RequestEvent("a", token_ids=[5, 6], prompt_tokens=9, cached_tokens=4)
    assert answer.chunk(first) == {"token_ids": [5, 6], "index": 0} and not answer.has_ended
    last = RequestEvent(
        "a", token_ids=[1], prompt_tokens=9, cached_tokens=4, finish_reason=FinishReason.STOP
    )
    assert answer.chunk(last) == {
        "token_ids": [1],
        "index": 0,
        "finish_reason": "stop",
        "completion_usage": {
            "prompt_tokens": 9,
            "completion_tokens": 3,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    assert answer.has_ended


@pytest.mark.parametrize(
    ("reason", "word"), [(FinishReason.LENGTH, "length"), (FinishReason.ABORT, "cancelled")]
)
def test_reasons_have_dynamos_words(reason: FinishReason, word: str) -> None:
    assert Answer().chunk(RequestEvent("a", finish_reason=reason))["finish_reason"] == word


def test_log_probabilities_stand_beside_their_tokens() -> None:
    chosen = TokenLogprob(5, -0.5, ((7, -0.25), (5, -0.5)))
    chunk = Answer().chunk(RequestEvent("a", token_ids=[5], logprobs=[chosen]))
    assert chunk["log_probs"] == [-0.5]
    assert chunk["top_logprobs"] == [
        [
            {"rank": 1, "token_id": 7, "token": None, "logprob": -0.25},
            {"rank": 2, "token_id": 5, "token": None, "logprob": -0.5},
        ]
    ]
    alone = Answer().chunk(RequestEvent("a", token_ids=[5], logprobs=[TokenLogprob(5, -0.5)]))
    assert alone["log_probs"] == [-0.5] and "top_logprobs" not in alone


def test_log_probabilities_of_the_prompt_come_with_the_end() -> None:
    answer = Answer()
    prompt = [None, TokenLogprob(8, -3.0, ((2, -0.125),))]
    assert "engine_data" not in answer.chunk(RequestEvent("a", prompt_logprobs=prompt))
    last = answer.chunk(RequestEvent("a", finish_reason=FinishReason.STOP))
    assert last["engine_data"] == {
        "prompt_logprobs": [None, {"2": {"logprob": -0.125, "rank": 1}, "8": {"logprob": -3.0}}]
    }


def test_what_a_prefill_worker_hands_over_comes_with_the_end() -> None:
    answer = Answer("10.0.0.1:7001")
    assert "disaggregated_params" not in answer.chunk(RequestEvent("a", token_ids=[5]))
    last = answer.chunk(RequestEvent("a", finish_reason=FinishReason.LENGTH))
    assert last["disaggregated_params"] == {"peer": "10.0.0.1:7001"}


def test_events_of_a_burst_wake_the_loop_once_and_keep_their_order() -> None:
    wakes = 0

    async def receive() -> list[list[int]]:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def counted(*arguments: object) -> object:
            nonlocal wakes
            wakes += 1
            return call(*arguments)  # type: ignore[arg-type]

        handover = Handover(loop)
        streams = [EventStream(handover) for _ in range(3)]
        loop.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]

        def burst() -> None:
            for number in range(5):
                for stream in streams:
                    stream.deliver(RequestEvent("a", token_ids=[number]))

        thread = threading.Thread(target=burst)
        thread.start()
        thread.join()  # the loop stands still meanwhile
        return [[(await one.next()).token_ids[0] for _ in range(5)] for one in streams]

    assert asyncio.run(receive()) == [[0, 1, 2, 3, 4]] * 3
    assert wakes == 1


def test_what_ends_a_request_is_raised() -> None:
    async def receive() -> None:
        stream = EventStream(Handover(asyncio.get_running_loop()))
        stream.deliver(EngineUnavailable("The engine process has ended."))
        await stream.next()

    with pytest.raises(EngineUnavailable, match="has ended"):
        asyncio.run(receive())
