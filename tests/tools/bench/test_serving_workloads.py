from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bench.serving_http import HttpClient, HttpError
from bench.serving_requests import OpenAIServer
from bench.serving_tokens import TokenSource
from bench.serving_workloads import (
    WorkloadRun,
    run_serving_workload,
    summarize_workload,
)
from bench.workloads import Workload, make_workload
from tests.tools.bench.scripted_server import ScriptedServer, answer_events


def run(server: ScriptedServer, workload: Workload) -> WorkloadRun:
    async def main() -> WorkloadRun:
        async with server.serve():
            client = HttpClient(server.url)
            measured = OpenAIServer(client, "/v1/completions", "m", chat=False)
            result = await run_serving_workload(measured, workload, TokenSource(512))
            client.close()
            return result

    return asyncio.run(main())


def sent_after_probe(server: ScriptedServer, workload: Workload) -> list[dict[str, Any]]:
    return server.bodies[-workload.token_counts().requests :]


@pytest.mark.parametrize(
    ("server", "source", "first_id"),
    [
        (ScriptedServer(), "return_token_ids", 100),
        (ScriptedServer(token_ids=False), "/tokenize", 300),
    ],
)
def test_later_prompts_hold_the_answers_tokens(
    server: ScriptedServer, source: str, first_id: int
) -> None:
    workload = make_workload("long_resume", 512, scale=0.002)
    result = run(server, workload)
    assert result.answers_from == source
    (first,), (second,) = workload.rounds
    prompts = [body["prompt"] for body in sent_after_probe(server, workload)]
    answer = [first_id + i for i in range(first.max_tokens)]
    assert prompts[0] == list(first.new_tokens)
    assert prompts[1] == [*first.new_tokens, *answer, *second.new_tokens]


def test_without_any_way_to_learn_the_ids_it_stops() -> None:
    server = ScriptedServer(token_ids=False, tokenize=False)
    with pytest.raises(HttpError, match="--tokenizer"):
        run(server, make_workload("multi_turn", 512, scale=0.002))
    run(server, make_workload("unique", 512, scale=0.002))  # one turn each needs none


def test_rounds_follow_each_other_and_go_out_at_once() -> None:
    server = ScriptedServer(seconds=0.05)
    workload = make_workload("multi_turn", 512, scale=0.002, count_scale=0.1)
    result = run(server, workload)
    assert [len(outcomes) for outcomes in result.outcomes] == [3] * 6 and server.peak == 3
    for before, after in zip(result.outcomes, result.outcomes[1:], strict=False):
        assert max(o.finished for o in before) <= min(o.sent for o in after)
    bodies = sent_after_probe(server, workload)
    assert all(body["ignore_eos"] and body["temperature"] == 0.0 for body in bodies)


def test_figures_are_those_of_the_offline_benchmark() -> None:
    workload = make_workload("unique", 512, scale=0.002)
    result = run(ScriptedServer(), workload)
    figures = summarize_workload(result)
    counts = workload.token_counts()
    assert figures["requests"] == counts.requests
    assert figures["prompt_tokens"] == counts.prompt_tokens
    assert figures["cached_tokens"] == counts.prompt_tokens // 2
    assert figures["output_tokens"] == counts.output_tokens
    assert figures["wall_s"] == pytest.approx(sum(result.round_walls))
    assert figures["ttft_s"]["p95"] > 0 and figures["rounds"][0]["requests"] == counts.requests


def test_a_wrong_number_of_tokens_is_a_failure_and_ends_the_run() -> None:
    def script(body: dict[str, Any]) -> list[Any]:
        return answer_events({**body, "max_tokens": body["max_tokens"] + 1}, chat=False)

    result = run(ScriptedServer(script), make_workload("shared_system", 512, scale=0.002))
    assert len(result.outcomes) == 1
    assert result.all_outcomes[0].failure == "wrong length"
