"""A real model behind the real server, asked by the official client, alone and under torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from bench.ports import free_port
from tests.server.running import ServerProcess, is_alive, wait_until
from tests.text.make_tokenizers import byte_level, save
from tests.thorough import thorough, usually
from tests.tiny_models import make_tiny_model

TOOL = "tools/run_text_generation_server.py"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "The quick brown fox, naïve café. " * 16},
    {"role": "user", "content": "Where is the fox?"},
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_level()
    # A few rows more than there are tokens, as in most published models.
    make_tiny_model("nemotron_h", folder, vocab_size=len(tokenizer) + 8)
    return save(tokenizer, folder)


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[ServerProcess]:
    """Some of its settings come from a file of options."""
    options = {
        "load": "tiny",
        "port": 5,  # no such port is used: the flag wins
        "log_format": "json",
        "ask": "Who is quick?",
        "system": "Numbers: 12345, 12345 and 12345. " * 8,
    }
    file = model_folder.parent / "options.yaml"
    file.write_text(yaml.safe_dump(options))
    with ServerProcess(TOOL, "--config", str(file), "--port", "0") as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI) -> ChatCompletion:
    return client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=12
    )


def cached_tokens(answer: ChatCompletion) -> int:
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


def test_a_chat_asked_again_is_answered_from_the_cache(client: openai.OpenAI) -> None:
    first, again = ask(client), ask(client)
    assert first.usage is not None and first.usage.prompt_tokens > 128
    assert cached_tokens(first) == 0
    assert cached_tokens(again) >= 64
    assert again.choices[0].message.content == first.choices[0].message.content


def test_a_streamed_chat_says_the_same_and_its_usage(client: openai.OpenAI) -> None:
    whole = ask(client)
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0,
        max_completion_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) >= 64


def test_a_seed_repeats_every_choice(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.completions.create(
            model="tiny",
            prompt="The quick",
            max_tokens=10,
            n=2,
            seed=seed,
            extra_body={"ignore_eos": True},
        )
        return [choice.text for choice in answer.choices]

    assert texts(3) == texts(3)
    assert texts(3) != texts(4)
    assert texts(3)[0] != texts(3)[1]


def test_logprobs_of_the_greedy_token_are_the_highest(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="The quick", max_tokens=5, temperature=0, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.token_logprobs and logprobs.top_logprobs
    for logprob, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert logprob == pytest.approx(max(top.values()))


def test_bad_requests_are_refused_and_the_next_is_served(client: openai.OpenAI) -> None:
    for bad in (
        {"prompt": ""},
        {"prompt": [1] * 4000},
        {"prompt": "a", "max_tokens": -1},
        {"prompt": "a", "extra_body": {"surprise": 1}},
    ):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**{"model": "tiny", "max_tokens": 2, **bad})  # type: ignore[call-overload]
        assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices


def test_the_engines_counters_are_on_the_metrics_page(
    client: openai.OpenAI, server: ServerProcess
) -> None:
    ask(client), ask(client)
    page = client.with_options(base_url=server.url).get("/metrics", cast_to=str)
    figures = dict(
        line.rsplit(" ", 1) for line in page.splitlines() if line and not line.startswith("#")
    )
    for name in ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_hits_total"):
        assert float(figures[f"megatron_hybrid:{name}"]) > 0


# tests/parallel: test_engine_on_two_ranks.py has the answers, test_faults.py service and its end
@thorough
def test_two_ranks_answer_like_one_and_end_together(
    model_folder: Path, client: openai.OpenAI
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    flags = ("--load", str(model_folder), "--port", "0", "--tensor-model-parallel-size", "2")
    with ServerProcess(*torchrun, TOOL, *flags, OMP_NUM_THREADS="1") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as other:
            assert ask(other).choices[0].message.content == ask(client).choices[0].message.content
            assert cached_tokens(ask(other)) >= 64
        ranks = server.children()
        server.stop(signal.SIGTERM, seconds=20)
        assert not any(is_alive(rank) for rank in ranks)
        with pytest.raises(OSError):
            urllib.request.urlopen(f"{server.url}/health", timeout=5)


def test_ranks_end_when_torchrun_is_killed(model_folder: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    with ServerProcess(*torchrun, TOOL, "--load", str(model_folder), "--port", "0") as server:
        ranks = server.children()
        assert ranks
        server.stop(signal.SIGKILL)
        wait_until(lambda: not any(is_alive(rank) for rank in ranks))


@thorough  # tests/parallel/test_faults.py
def test_a_rank_killed_in_mid_stream_is_restarted_by_torchrun_behind_the_same_front_end(
    model_folder: Path,
) -> None:
    port = str(free_port())
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--max-restarts", "3")
    flags = ("--nproc-per-node", "1", TOOL, "--load", str(model_folder), "--port", port)
    with ServerProcess(*torchrun, *flags, "--engine-restart-timeout", "120") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            (rank,) = server.children()
            front_end = [pid for pid in server.descendants() if pid != rank]
            assert health(server)["engine_pid"] == rank
            before = ask(client).choices[0].message.content
            stream = client.completions.create(
                model="tiny",
                prompt="The quick",
                max_tokens=1000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            next(iter(stream))
            os.kill(rank, signal.SIGKILL)
            with pytest.raises(openai.APIError, match="engine process has ended"):
                list(stream)
            with pytest.raises(openai.InternalServerError) as caught:
                ask(client)
            assert caught.value.status_code == 503
            wait_until(lambda: health(server).get("engine_pid") not in (None, rank), 120)
            assert ask(client).choices[0].message.content == before
            assert all(is_alive(process) for process in front_end)
        server.stop(signal.SIGTERM, seconds=30)
        wait_until(lambda: not any(is_alive(process) for process in front_end))


def health(server: ServerProcess) -> dict[str, Any]:
    """Empty while no requests are taken."""
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=20) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return {}


def test_the_first_question_was_asked_twice(server: ServerProcess) -> None:
    server.wait_for_line(r"(Asked again)", 30)
    server.wait_for_line(r"([1-9]\d*) of \d+ prompt tokens from the cache", 30)
    assert re.search(r"\b0 of \d+ prompt tokens from the cache", server.output)


def test_a_file_of_options_holds_for_every_process(server: ServerProcess) -> None:
    urllib.request.urlopen(f"{server.url}/v1/models").close()
    for process in ("engine", "front end"):
        line = server.wait_for_line(rf'^(\{{.*"process": ?"{process}".*\}})$', 10)
        assert json.loads(line)["process"] == process


REFUSED = [
    (("--load", "/nowhere"), "/nowhere"),
    (("--host", "host.invalid"), "--host"),  # by the front end
    (("--tensor-model-parallel-size", "0"), "--tensor-model-parallel-size"),
    (("--inference-dynamic-batching-block-size", "0"), "block-size"),
    (("--inference-dynamic-batching-prefix-caching-mamba-gb", "1e-9"), "one state takes"),
    (("--port", "99999"), "--port"),
]


@pytest.mark.parametrize(("flags", "words"), usually(REFUSED[:2], REFUSED))
def test_what_cannot_be_served_is_said_in_a_sentence_with_exit_code_2(
    model_folder: Path, flags: tuple[str, ...], words: str
) -> None:
    with pytest.raises(AssertionError, match="the server ended") as caught:
        ServerProcess(TOOL, "--load", str(model_folder), "--port", "0", *flags)
    assert words in str(caught.value)
    assert "Traceback" not in str(caught.value)
