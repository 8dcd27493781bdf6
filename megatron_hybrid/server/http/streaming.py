"""Server-sent events, and answers in one piece: what all endpoints do to give them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import chain
from typing import Any

from flask import Response
from msgspec import json

from megatron_hybrid.server.http.choice import Delta
from megatron_hybrid.server.http.generation import REASONING_USAGE, ClientGone, Generation
from megatron_hybrid.server.http.http_errors import describe, json_response
from megatron_hybrid.server.http.protocol.generation_request import GenerationRequest
from megatron_hybrid.server.http.serving import Serving

Chunk = dict[str, Any]

FINGERPRINT = "X-System-Fingerprint"  # the header of every answer, also where no field says it
HANDED_OVER = "kv_transfer_params"  # vLLM's name, of a field of answers and of requests
_DONE = b"data: [DONE]\n\n"
_TEXT_GOES_HERE = "~text~"


class Answers(ABC):
    """The answers of one HTTP request, whose generation has begun; of each endpoint there is a kind
    that says what they look like."""

    def __init__(
        self, serving: Serving, generation: Generation, wanted: GenerationRequest, *, number: int
    ) -> None:
        """number: of answers."""
        self._serving = serving
        self._generation = generation
        self._wanted = wanted
        self._number = number

    @abstractmethod
    def whole(self, answers: list[Delta]) -> Any:
        """The answers in one piece, each as one delta; what is sent as JSON."""

    @abstractmethod
    def events(self, delta: Delta) -> bytes:
        """The events of one delta, in order."""

    def first_events(self) -> bytes:
        """What comes before the first delta."""
        return b""

    def last_events(self) -> bytes:
        """What comes after all deltas."""
        return b""

    @abstractmethod
    def failed(self, error: Chunk) -> bytes:
        """What ends a stream that an error broke off; error: its object, as `describe` makes it."""

    def respond(self) -> Response:
        """Events as they come, or everything when it has ended. Raises what `Generation.deltas`
        raises."""
        if not self._wanted.stream:
            pieces: list[list[Delta]] = [[] for _ in range(self._number)]
            for delta in chain.from_iterable(self._generation.deltas()):
                pieces[delta.index].append(delta)
            return self._named(json_response(self.whole([_joined(one) for one in pieces])))
        # The first ones are awaited, so that a request that fails at once gets a proper status.
        deltas = self._generation.deltas()
        first = next(deltas, [])
        response = Response(self._stream(chain([first], deltas)), mimetype="text/event-stream")
        response.headers["Cache-Control"] = "no-cache"
        response.headers["X-Accel-Buffering"] = "no"  # nginx would collect the events
        return self._named(response)

    def _named(self, response: Response) -> Response:
        if (fingerprint := self._generation.fingerprint) is not None:
            response.headers[FINGERPRINT] = fingerprint
        return response

    def _stream(self, batches: Iterable[list[Delta]]) -> Iterator[bytes]:
        generation = self._generation
        waiting: dict[int, list[Delta]] = {}  # log-probabilities of text that is held back
        try:
            if events := self.first_events():
                yield events
            for batch in batches:
                if len(batch) == 1 and not waiting and _is_shown(batch[0]):
                    events = self.events(batch[0])  # what nearly every token comes to
                else:
                    events = b"".join(map(self.events, _by_choice(batch, waiting)))
                if events:
                    yield events
            last = self.last_events()
        except (ClientGone, GeneratorExit):
            generation.failure = ClientGone.status
            return
        except Exception as error:  # the status line is out: the error goes into the stream
            generation.failure, body = describe(error)
            last = self.failed(body)
        finally:
            generation.close()
        if last:
            yield last


class ChunkAnswers(Answers):
    """In OpenAI's older form: an object with "choices", or as a stream one such chunk an event."""

    def __init__(
        self,
        serving: Serving,
        generation: Generation,
        wanted: GenerationRequest,
        *,
        number: int,
        name: str,
    ) -> None:
        """number: of answers. name: of the object that is answered."""
        super().__init__(serving, generation, wanted, number=number)
        self.head: Chunk = {
            "id": generation.request_id,
            "object": name,
            "created": generation.created,
            "model": generation.model,
        }
        self._end = b',"usage":null}\n\n' if wanted.include_usage else b"}\n\n"

    @cached_property
    def _before(self) -> bytes:
        """What all events have in common, encoded with the first one."""
        return b"data: " + json.encode(self._named_head())[:-1] + b',"choices":['

    def _named_head(self) -> Chunk:
        return {**self.head, "system_fingerprint": self._generation.fingerprint}

    @abstractmethod
    def choice(self, answer: Delta) -> Chunk:
        """A whole answer as an entry of "choices"."""

    def whole(self, answers: list[Delta]) -> Chunk:
        choices = [self.choice(answer) | versions_of(answer) for answer in answers]
        answer = {**self._named_head(), "choices": choices, "usage": self._generation.usage()}
        return answer | self._handed_over()

    def _handed_over(self, request: str = "") -> Chunk:
        """Of prompts that another server is to go on from: what it has to be told. request: that
        still computes one."""
        peer = self._generation.handover_address
        told = {"peer": peer, "request": request} if request else {"peer": peer}
        return {HANDED_OVER: told} if peer else {}

    def first_events(self) -> bytes:
        request = self._generation.handed_over_request
        if not request or not (handed_over := self._handed_over(request)):
            return b""
        return self._before + b"]," + json.encode(handed_over)[1:-1] + self._end

    def last_events(self) -> bytes:
        if not self._wanted.include_usage:
            return _DONE
        usage = json.encode(self._generation.usage())
        return self._before + b'],"usage":' + usage + b"}\n\n" + _DONE

    def failed(self, error: Chunk) -> bytes:
        return b"data: " + json.encode(error) + b"\n\n" + _DONE

    def event(
        self, choice: Chunk, prompt_token_ids: list[int] | None = None, *, begun: bool = True
    ) -> bytes:
        """The event of one entry of "choices", beside which prompt_token_ids may stand. begun: some
        of the choice's text was given."""
        ids = b""
        if prompt_token_ids is not None:
            ids = b',"prompt_token_ids":' + json.encode(prompt_token_ids)
        more = b""
        if choice["finish_reason"] is not None and (handed_over := self._handed_over()):
            more = b"," + json.encode(handed_over)[1:-1]
        before = self._before + json.encode(choice) + b"]"
        return before + ids + more + self._usage_of(choice, begun)

    def text_events(self, make_choice: Callable[[str], Chunk]) -> Callable[[str], bytes]:
        """Encodes `event(make_choice(text))`: what is the same for every text is encoded here."""
        if self._wanted.continuous_usage:
            return lambda text: self.event(make_choice(text))
        whole = self.event(make_choice(_TEXT_GOES_HERE)).removeprefix(self._before)
        first, *others = whole.split(json.encode(_TEXT_GOES_HERE))
        around = [self._before + first, *others]
        return lambda text: json.encode(text).join(around)

    def _usage_of(self, choice: Chunk, begun: bool) -> bytes:
        """The end of an event: what its choice has used so far, where every event says it."""
        if not self._wanted.continuous_usage:
            return self._end
        usage = self._generation.usage_so_far(choice["index"])
        if not begun:  # the first token is there already, but its text is still to come
            usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
            if REASONING_USAGE in usage:
                usage[REASONING_USAGE] = {"reasoning_tokens": 0}
        return b',"usage":' + json.encode(usage) + b"}\n\n"


def _by_choice(batch: list[Delta], waiting: dict[int, list[Delta]]) -> list[Delta]:
    """One delta for each choice that has something to show."""
    for delta in batch:
        waiting.setdefault(delta.index, []).append(delta)
    # What has waited is not looked at again: there may be thousands of tokens.
    shown = {delta.index for delta in batch if _is_shown(delta)}
    return [_joined(waiting.pop(index)) for index in list(waiting) if index in shown]


def _joined(pieces: list[Delta]) -> Delta:
    calls = [call for piece in pieces for call in piece.calls]
    in_order = [said for piece in pieces for said in piece.in_order or [piece.text]]
    return Delta(
        pieces[0].index,
        "".join(piece.text for piece in pieces),
        [entry for piece in pieces for entry in piece.logprobs],
        pieces[-1].finish_reason,
        calls,
        [token_id for piece in pieces for token_id in piece.token_ids],
        "".join(piece.reasoning for piece in pieces),
        pieces[-1].stop,
        in_order if calls else [],
        pieces[-1].weight_versions,
        pieces[-1].routed_experts,
    )


def versions_of(delta: Delta) -> Chunk:
    """What a choice's end says of the weights, if it says anything of them."""
    spans = [span._asdict() for span in delta.weight_versions]
    return {"weight_versions": spans} if spans else {}


def _is_shown(delta: Delta) -> bool:
    """Whether it makes an event now. Log-probabilities alone wait for their text."""
    return bool(
        delta.text or delta.reasoning or delta.calls or delta.token_ids or delta.finish_reason
    )
