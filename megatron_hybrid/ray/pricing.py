"""What a replica answers when it is asked for a prompt: how many tokens it could skip, and how much
later all answers would be done with the prompt there.

The replica makes tokens of the body as its own front end does, with the answers and responses that
it has given, and looks them up in what its KV events say of blocks *and* states.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from megatron_hybrid.errors import RequestError
from megatron_hybrid.kv_events import KVEventSubscriber
from megatron_hybrid.ray.messages import Price
from megatron_hybrid.ray.routes import PROMPTED
from megatron_hybrid.server.http.preparation import Preparation
from megatron_hybrid.server.http.prepared import PreparedChat, PreparedCompletion, PreparedScores
from megatron_hybrid.server.http.responses.preparing import PreparedResponse
from megatron_hybrid.server.http.tokens.asked import PreparedTokens
from megatron_hybrid.server.keys import NOBODY, Caller, KeyRing
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.answer_memory import ENDPOINT_NAME, AnswerMemoryClient
from megatron_hybrid.server.link.response_memory import RESPONSES, ResponseMemoryClient
from megatron_hybrid.server.link.run_folder import RunFolder
from megatron_hybrid.server.options import POLICIES, ServerOptions
from megatron_hybrid.server.replicas.placer import Placer
from megatron_hybrid.server.replicas.replica import PromptKeys
from megatron_hybrid.text.tokenizer import Tokenizer

RECEIVE_SECONDS = 0.5  # KV events are to be read at least once a second
MOST_PRICED = 256  # prompts that were asked for and have not come; most go elsewhere
OURSELVES = 0  # the replica's number in its own Placer


class _Priced(NamedTuple):
    prompts: list[PromptKeys]
    n: int
    max_tokens: int | None


class Pricing:
    """One replica's. Everything is done in one thread, which these calls only hand it to."""

    def __init__(self, options: ServerOptions, folder: RunFolder, engine: wire.EngineReady) -> None:
        self._engine, self._sizes = engine, engine.cache
        self._keys = KeyRing(options.api_keys, salted=options.cache_salt_per_key)
        memory, responses = folder.endpoint(ENDPOINT_NAME), folder.endpoint(RESPONSES)
        self._preparation = Preparation(
            Tokenizer.load(options.tokenizer_folder, options.chat_template),
            options,
            lambda: AnswerMemoryClient(memory),
            (lambda: ResponseMemoryClient(responses)) if options.stores_responses else None,
        )
        self._placer = Placer(POLICIES[0], engine.cache, engine.max_queue)
        self._placer.replicas[OURSELVES].adapters = engine.adapter_keys
        self._subscriber: KVEventSubscriber | None = None
        self._events = folder.kv_events_endpoint(0), folder.kv_replay_endpoint(0)
        self._priced: OrderedDict[str, _Priced] = OrderedDict()
        self._computing: dict[str, PromptKeys] = {}  # by engine request, those that were placed
        self._worker = ThreadPoolExecutor(1, "pricing")
        self._ends = threading.Event()
        self._worker.submit(self._subscribe)
        threading.Thread(target=self._keep_reading, name="kv-events", daemon=True).start()

    def ask(
        self, name: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> Future[Price | None]:
        """What the request of this name would cost here; None where it can't be served here."""
        return self._worker.submit(self._ask, name, path, headers, body)

    def begin(self, name: str) -> Future[None]:
        """The request has come."""
        return self._worker.submit(self._begin, name)

    def start(self, name: str) -> None:
        """Its answer has begun."""
        self._worker.submit(self._start, name)

    def end(self, name: str) -> None:
        """It is over."""
        self._worker.submit(self._end, name)

    def close(self) -> None:
        """Give up thread and sockets."""
        self._ends.set()
        self._worker.submit(self._unsubscribe)
        self._worker.shutdown()

    def _keep_reading(self) -> None:
        while not self._ends.wait(RECEIVE_SECONDS):
            self._worker.submit(self._receive).result()

    # In the worker's thread.

    def _subscribe(self) -> None:
        if self._sizes.block_size:  # else there is no prefix cache
            self._subscriber = KVEventSubscriber(*self._events)
            self._placer.replicas[OURSELVES].contents = self._subscriber.contents

    def _unsubscribe(self) -> None:
        if self._subscriber is not None:
            self._subscriber.close()
            self._subscriber = None

    def _receive(self) -> None:
        if self._subscriber is None:
            return
        self._subscriber.receive()
        # Of an answer that comes in one piece nobody says that it has begun.
        blocks = self._subscriber.contents.blocks
        replica = self._placer.replicas[OURSELVES]
        for name, prompt in list(self._computing.items()):
            _, hashes = replica.keys_of(prompt)
            if hashes and hashes[-1] in blocks:
                self._computing.pop(name)
                self._placer.start(name)

    def _ask(self, name: str, path: str, headers: Mapping[str, str], body: bytes) -> Price | None:
        self._receive()
        try:
            priced = self._read(PROMPTED[path], headers, body)
        except RequestError:  # it will be refused; where is the same
            return None
        self._priced[name] = priced
        if len(self._priced) > MOST_PRICED:
            self._priced.popitem(last=False)
        replica = self._placer.replicas[OURSELVES]
        skips = sum(map(replica.reusable, priced.prompts))
        return Price(
            skips=skips,
            tokens=sum(prompt.length for prompt in priced.prompts),
            delay=self._placer.delay(OURSELVES, priced.prompts, priced.max_tokens),
            blocks=len(replica.contents.blocks),
            answers=replica.answers,
        )

    def _read(self, method: str, headers: Mapping[str, str], body: bytes) -> _Priced:
        read: Any = getattr(self._preparation, method)
        found = read(body, self._engine, self._caller(headers))
        if isinstance(found, PreparedResponse):
            found = found.chat
        if isinstance(found, PreparedTokens):
            asked, ids = found.prompts[0].generation, [one.token_ids for one in found.prompts]
            adapters = [one.generation.adapter for one in found.prompts]
        else:
            assert isinstance(found, PreparedChat | PreparedCompletion | PreparedScores)
            asked = found.generation
            ids = [found.prompt] if isinstance(found, PreparedChat) else found.prompts
            adapters = [asked.adapter] * len(ids)
        # Without a prefix cache a prompt is one block, which nothing is ever found for.
        size = self._sizes.block_size or 1 + max(map(len, ids), default=0)
        prompts = [
            PromptKeys(wire.packed(one), size, asked.cache_salt, self._sizes.stored_as, adapter)
            for one, adapter in zip(ids, adapters, strict=True)
        ]
        most = asked.params.max_tokens
        return _Priced(prompts, asked.params.n, most if isinstance(most, int) else None)

    def _caller(self, headers: Mapping[str, str]) -> Caller:
        given = headers.get("authorization", "")
        found = self._keys.find(given)
        if found is None and (key := headers.get("x-api-key")):
            found = self._keys.find(f"Bearer {key}")
        return NOBODY if found is None else found

    def _begin(self, name: str) -> None:
        priced = self._priced.pop(name, None)
        if priced is None:  # nobody asked: it counts as an answer, whose prompt is not known
            self._placer.move(name, OURSELVES, 1)
            return
        self._placer.place(name, priced.prompts, priced.n, priced.max_tokens, [OURSELVES])
        self._computing |= {f"{name}-{k}": one for k, one in enumerate(priced.prompts)}

    def _start(self, name: str) -> None:
        for waiting in [one for one in self._computing if one.rpartition("-")[0] == name]:
            self._computing.pop(waiting)
            self._placer.start(waiting)

    def _end(self, name: str) -> None:
        self._start(name)
        self._placer.end(name)
