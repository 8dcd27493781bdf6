from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from flask.testing import FlaskClient
from werkzeug.routing import Rule

from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.answer_memory import AnswerMemoryClient, AnswerMemoryServer
from megatron_hybrid.server.link.response_memory import ResponseMemoryClient, ResponseMemoryServer
from megatron_hybrid.server.link.sockets import bind_socket
from megatron_hybrid.server.loop.engine_loop import EngineLoop
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.server.replicas.replica_set import ReplicaSet
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.running import Hold

MAX_QUEUE = 4
STORE_BYTES, STORE_SECONDS = 10**7, 3600.0  # of stored responses

# Of each rule of each application Werkzeug compiles two functions, by which addresses could be
# made: three quarters of the time of a test with an application of its own. A rule's are those of
# the same rule before.
_builders: dict[tuple[Any, ...], Any] = {}
_compile_builder = Rule._compile_builder


def _builder(self: Rule, append_unknown: bool = True) -> Any:
    key = self.rule, *self._trace, repr(self.defaults), append_unknown
    if key not in _builders:
        _builders[key] = _compile_builder(self, append_unknown)
    return _builders[key]


Rule._compile_builder = _builder  # type: ignore[method-assign]


class RunningLoop:
    """An engine in its loop, in a thread, with the client that a front end has."""

    def __init__(
        self, engine: Any, folder: Path, max_queue: int = MAX_QUEUE, handover_address: str = ""
    ) -> None:
        self.engine = engine
        self.exit_code: int | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.endpoint = f"ipc://{folder}/engine"
        self._socket = bind_socket(self._context, self.endpoint)
        self._answer_server = AnswerMemoryServer(f"ipc://{folder}/answers")
        self.answers = AnswerMemoryClient(f"ipc://{folder}/answers")
        responses = f"ipc://{folder}/responses"
        self._response_server = ResponseMemoryServer(responses, STORE_BYTES, STORE_SECONDS)
        self.responses = ResponseMemoryClient(responses)
        self.loop = EngineLoop(
            engine, self._socket, max_queue=max_queue, handover_address=handover_address
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.engines = self.connect()
        self.client = self.engines.clients[0]

    def connect(self) -> ReplicaSet:
        """A front end's connection, ready."""
        engines = ReplicaSet([self.endpoint])
        engines.join("http://nowhere")
        assert engines.wait_until_ready(5)
        return engines

    def serve(self, tokenizer: Tokenizer, options: ServerOptions) -> Serving:
        """What a front end's routes need, with both memories."""
        responses = self.responses if options.stores_responses else None
        return Serving(self.engines, tokenizer, options, self.answers, responses=responses)

    def _run(self) -> None:
        self.exit_code = self.loop.run()

    def die(self) -> None:
        """What a client sees of a killed engine process: its socket is closed, without a word."""
        self.loop._send_all = lambda reply: None  # type: ignore[method-assign]
        self.loop.request_stop()
        self.thread.join(5)
        self._close_memories()
        self._socket.close(linger=0)
        self._context.term()

    def _close_memories(self) -> None:
        for one in (self.answers, self._answer_server, self.responses, self._response_server):
            one.close()

    def close(self) -> None:
        self.loop.request_stop()
        self.client.send(wire.ResetPrefixCache(0))  # an idle loop looks up at once
        self.thread.join(5)
        self.client.close()
        self._close_memories()
        self._socket.close()
        self._context.term()


@contextmanager
def reference_server(
    folder: Path, chat_template: Path | None = None, **changes: Any
) -> Iterator[tuple[FlaskClient, RunningLoop]]:
    """The application before the real engine with the reference model, and its loop. changes: of
    the EngineConfig."""
    from megatron_hybrid import reference_model
    from megatron_hybrid.config import EngineConfig
    from megatron_hybrid.engine.build import build_engine

    config = EngineConfig(
        inference_dynamic_batching_buffer_size_gb=0.1,
        inference_dynamic_batching_max_requests=8,
        inference_max_seq_length=2048,
        **changes,
    )
    running = RunningLoop(build_engine(config), folder, max_queue=64)
    model = str(reference_model.path())
    options = ServerOptions(tokenizer_folder=model, model_name="reference_model")
    serving = running.serve(Tokenizer.load(model, chat_template), options)
    yield create_app(serving).test_client(), running
    running.close()


@pytest.fixture(scope="session")
def reference_http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlaskClient]:
    """Requests to the application before the real engine with the reference model."""
    with reference_server(tmp_path_factory.mktemp("s")) as (http, _):
        yield http


@pytest.fixture(scope="module")
def hold(tmp_path_factory: pytest.TempPathFactory) -> Hold:
    """For servers with its flags."""
    return Hold(tmp_path_factory.mktemp("hold"))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(
        tokenizer.vocab_size,
        tokenizer.eos_token_ids,
        fail_on=tokenizer.encode("~")[0],
    )


@pytest.fixture
def running(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningLoop]:
    loop = RunningLoop(engine, tmp_path_factory.mktemp("s"))
    yield loop
    loop.close()


@pytest.fixture
def options(tokenizer_folder: Path) -> ServerOptions:
    return ServerOptions(
        tokenizer_folder=str(tokenizer_folder), model_name="fake", weight_folders=(".",)
    )


@pytest.fixture
def serving(running: RunningLoop, tokenizer: Tokenizer, options: ServerOptions) -> Serving:
    return running.serve(tokenizer, options)


@pytest.fixture
def http(serving: Serving) -> FlaskClient:
    """Requests to the application without a socket in between."""
    return create_app(serving).test_client()
