"""Which experts tokens were sent to, over HTTP: as SGLang's and prime-rl's clients read them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from flask.testing import FlaskClient

from megatron_hybrid import EngineConfig, reference_model
from megatron_hybrid.engine.build import build_engine
from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.routers import OPTIONS, Ids, Routers
from tests.server.conftest import RunningLoop
from tests.server.http.tokens.asking import (
    GENERATE,
    INFER,
    generate,
    generate_body,
    infer,
    infer_body,
    sampling,
    streamed,
)


@pytest.fixture(scope="module")
def routers(tmp_path_factory: pytest.TempPathFactory) -> Routers:
    vocab = Tokenizer.load(str(reference_model.path())).backend.get_vocab_size()
    folder = tmp_path_factory.mktemp("experts")
    return Routers.of("nemotron_h_moe", folder, vocab_size=vocab)


@pytest.fixture(scope="module")
def expert_http(
    routers: Routers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FlaskClient]:
    """Requests to the application before the engine of a model with experts."""
    config = EngineConfig(load=str(routers.folder), enable_return_routed_experts=True, **OPTIONS)
    running = RunningLoop(build_engine(config), tmp_path_factory.mktemp("s"), max_queue=64)
    tokenizer = str(reference_model.path())
    options = ServerOptions(tokenizer_folder=tokenizer, model_name="experts")
    yield create_app(running.serve(Tokenizer.load(tokenizer), options)).test_client()
    running.close()


def of_sglang(answer: dict[str, Any], routers: Routers) -> Ids:
    """As slime decodes it."""
    flat = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
    config = routers.model.config
    return flat.reshape(-1, config.num_hidden_layers, config.num_experts_per_tok)


def check(routers: Routers, tokens: list[int], found: Ids, start: int = 0) -> None:
    expected = routers.choices(tokens)[start : len(tokens) - 1]
    np.testing.assert_array_equal(np.sort(found, axis=-1), expected)


def test_sglangs_answers_have_them_as_int32(expert_http: FlaskClient, routers: Routers) -> None:
    prompts = routers.prompts(20, 33)
    answers = generate(
        expert_http,
        prompts,
        sampling_params=sampling(n=2, temperature=1.0, sampling_seed=4),
        return_routed_experts=True,
        routed_experts_start_len=[0, 33],
    )
    for place, answer in enumerate(answers):
        prompt, start = prompts[place // 2], [0, 33][place // 2]
        assert answer["meta_info"]["routed_experts_start_len"] == start
        check(routers, prompt + answer["output_ids"], of_sglang(answer, routers), start)
    assert "routed_experts" not in generate(expert_http, prompts[0])["meta_info"]


def test_the_last_event_of_a_stream_has_them(expert_http: FlaskClient, routers: Routers) -> None:
    (prompt,) = routers.prompts(20)
    *events, last = streamed(
        expert_http, GENERATE, generate_body(prompt, return_routed_experts=True)
    )
    assert events and not any("routed_experts" in event["meta_info"] for event in events)
    check(routers, prompt + last["output_ids"], of_sglang(last, routers))
    *chunks, end = streamed(expert_http, INFER, infer_body(prompt))
    assert all(chunk["choices"][0]["routed_experts"] is None for chunk in chunks)
    tokens = [token for one in (*chunks, end) for token in one["choices"][0]["token_ids"]]
    check(routers, prompt + tokens, of_prime_rl(end["choices"][0]["routed_experts"]))


def of_prime_rl(said: dict[str, Any]) -> Ids:
    """As prime-rl's renderers decode it."""
    return np.frombuffer(base64.b64decode(said["data"]), dtype=said["dtype"]).reshape(said["shape"])


@pytest.mark.parametrize("start", [0, 7])
def test_vllms_answers_have_them_wherever_they_are_kept(
    expert_http: FlaskClient, routers: Routers, start: int
) -> None:
    (prompt,) = routers.prompts(20)
    (choice,) = infer(expert_http, prompt, routed_experts_prompt_start=start)["choices"]
    said = choice["routed_experts"]
    assert said.keys() == {"data", "shape", "start", "dtype"}
    assert (said["start"], said["dtype"]) == (start, "uint8")
    check(routers, prompt + choice["token_ids"], of_prime_rl(said), start)


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_stop_string_ends_has_those_of_its_tokens(
    expert_http: FlaskClient, routers: Routers, stream: bool
) -> None:
    """The engine learns of it later, and has computed more by then."""
    (prompt,) = routers.prompts(24)
    long = sampling(max_new_tokens=40)
    text = generate(expert_http, prompt, sampling_params=long)["text"]
    stop = next(text[i : i + 3] for i in range(8, 30) if text.find(text[i : i + 3]) == i)
    body = generate_body(
        prompt, sampling_params={**long, "stop": [stop]}, return_routed_experts=True
    )
    if stream:
        answer = streamed(expert_http, GENERATE, body)[-1]
    else:
        answer = expert_http.post(GENERATE, json=body).get_json()
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert 0 < len(answer["output_ids"]) < 40
    check(routers, prompt + answer["output_ids"], of_sglang(answer, routers))


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        (
            GENERATE,
            "routed_experts_start_len",
            generate_body([5] * 9, return_routed_experts=True, routed_experts_start_len=10),
        ),
        (
            INFER,
            "sampling_params.routed_experts_prompt_start",
            infer_body([5] * 9, routed_experts_prompt_start=10),
        ),
    ],
)
def test_a_start_behind_the_prompt_is_refused_in_the_clients_words(
    expert_http: FlaskClient, path: str, field: str, body: dict[str, Any]
) -> None:
    answer = expert_http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.get_json()["error"]
    assert error["param"] == field and "10" in error["message"] and "9 tokens" in error["message"]


def test_a_server_that_does_not_keep_them_names_the_flag(reference_http: FlaskClient) -> None:
    body = generate_body([5, 6, 7], return_routed_experts=True)
    answer = reference_http.post(GENERATE, json=body)
    assert answer.status_code == 400
    assert "--enable-return-routed-experts" in answer.get_json()["error"]["message"]
    assert infer(reference_http, [5, 6, 7])["choices"][0]["routed_experts"] is None
