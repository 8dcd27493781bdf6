"""One HTTP request's answers: engine events in, pieces of text out."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from megatron_hybrid.errors import InvalidRequestError, RequestError
from megatron_hybrid.request import FinishReason, RequestEvent, TokenLogprob
from megatron_hybrid.server.http.choice import Choice, Delta
from megatron_hybrid.server.http.protocol.generation_request import GenerationRequest
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.link import messages as wire
from megatron_hybrid.server.link.engine_client import Placement
from megatron_hybrid.server.link.subscription import (
    AnswerKey,
    EngineUnavailable,
    Overloaded,
    Subscription,
)
from megatron_hybrid.server.link.traces import AnswerTrace

DISCONNECT_POLL_SECONDS = 0.5
REASONING_USAGE = "completion_tokens_details"  # in `usage`, of models that think


class GenerationFailed(RequestError):
    """The engine ended a request with an error, through no fault of the client."""

    code = "engine_error"


class TimedOut(RequestError):
    """A request's time is over; it is aborted."""

    status, kind, code = 504, "timeout_error", "timeout"


class ClientGone(RequestError):
    """Nobody reads the answer any more."""

    status, kind = 499, "client_closed"  # nginx's number


def new_id(prefix: str) -> str:
    """An id that nobody guesses: who knows it may end the answer."""
    return prefix + secrets.token_hex(16)


class Tokens(NamedTuple):
    """Of a request: in its prompts, and how many of these were cached; in its answers, and how many
    of these were thoughts, None of a model without."""

    prompt: int
    cached: int
    completion: int
    reasoning: int | None


@dataclass(slots=True)
class _Times:
    """Of one answer: when its phases ended, in seconds since the request came; and how it did."""

    begun: float | None = None
    first_token: float | None = None
    ended: float | None = None
    finish_reason: str | None = None
    preemptions: int = 0

    def add(self, event: RequestEvent) -> None:
        """Its first event, or its last one."""
        self.begun = event.queue_seconds
        if event.queue_seconds is not None and event.prefill_seconds is not None:
            self.first_token = event.queue_seconds + event.prefill_seconds
        if event.counters is not None:
            self.preemptions = event.counters.get("preemptions", 0)


class Generation:
    """The choices of one HTTP request, in the engine from `start` to `close`, up to which it holds
    one of the server's places."""

    def __init__(
        self,
        serving: Serving,
        request: GenerationRequest,
        request_id: str,
        *,
        disconnected: Callable[[], bool],
        arrived: float,
    ) -> None:
        """request_id: as `new_id` makes it. disconnected: whether the client has gone; looked at
        with every event and while waiting. arrived: when the request came, by `time.monotonic`,
        from which its time counts. Raises EngineUnavailable, or Overloaded when there is no place.
        """
        self.request_id = request_id
        self.created = int(time.time())
        self._client, self._options = serving.client, serving.options
        self.model = request.adapter or serving.options.model_name
        self.wanted = request
        self._disconnected = disconnected
        self._arrived = arrived
        self._timeout = min(
            filter(None, (request.timeout, self._options.request_timeout)), default=inf
        )
        self._choices: dict[AnswerKey, Choice] = {}
        self._adds: list[wire.AddRequest] = []
        self._placement: Placement | None = None
        self._subscription: Subscription | None = None
        self._prompt_tokens = 0
        self.submitted: float | None = None  # to the engine; seconds since the request came
        self._times: defaultdict[int, _Times] = defaultdict(_Times)  # by index of the answer
        self.failure: int | None = None  # the HTTP status that fits what broke a stream off
        # By prompt: one entry a token, None for the first; there before choice 0 has ended.
        self.prompt_logprobs: dict[int, list[TokenLogprob | None]] = {}
        self._ended: dict[int, Delta] = {}  # by choice, its last one, which is held back
        self._leave: Callable[[], None] | None = serving.take_place()

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        make_choice: Callable[[int], Choice],
        message_ends: tuple[int, ...] = (),
        each: Sequence[GenerationRequest] | None = None,
    ) -> None:
        """Submit every prompt; choice j of prompt i has the index i * n + j in the answer.

        message_ends: where messages end in the prompt, if it is a chat. each: what is wanted of
        each prompt, with the same n, where that differs; whoever gives them has checked their ids.
        """
        n = self.wanted.params.n
        engine = self._client.check()
        if each is None:
            self.wanted.params.validate_vocabulary(engine.vocab_size)
            each = [self.wanted] * len(prompts)
        limit, flag = engine.max_seq_length, engine.max_seq_length_flag
        self._prompt_tokens = sum(map(len, prompts))
        for number, (prompt, request) in enumerate(zip(prompts, each, strict=True)):
            request_id = f"{self.request_id}-{number}"
            for index in range(n):
                self._choices[request_id, index] = make_choice(number * n + index)
            params = request.params
            longest = params.longest_answer(len(prompt), limit, flag)
            if params.max_tokens not in (None, longest):  # a default of ours, which does not fit
                params = replace(params, max_tokens=longest)
            self._adds.append(
                wire.AddRequest(
                    request_id,
                    wire.packed(prompt),
                    params,
                    answers=len(prompts) * n if number == 0 else 0,
                    cache_salt=request.cache_salt,
                    priority=request.priority,
                    cache_checkpoints=request.cache_checkpoints,
                    message_ends=message_ends,
                    arrived=self._arrived,
                    prefilled_by=request.prefilled_by,
                    prefilling=request.prefilling,
                    called=request.called,
                    adapter=request.adapter,
                )
            )
        self.submitted = time.monotonic() - self._arrived
        packed = [add.prompt for add in self._adds]
        longest_asked = [one.params.max_tokens for one in each]
        known = [tokens for tokens in longest_asked if tokens is not None]
        most = max(known) if len(known) == len(each) else None
        adapters = [add.adapter for add in self._adds]
        salt, named = self.wanted.cache_salt, adapters if any(adapters) else []
        wanted = wire.Wanted(self.request_id, packed, n, most, salt, named)
        self._submit(self._client.place(wanted))

    def _submit(self, placement: Placement) -> None:
        """Send the prompts there, or where there is a replica; EngineUnavailable if none is."""
        # Stop strings are looked for while the engine runs; else an unstreamed answer can wait.
        whole = not self.wanted.stream and not any(add.params.stop for add in self._adds)
        while True:
            if self._subscription is not None:
                self._subscription.close()
            self._placement = placement
            self._subscription = Subscription(
                placement.client, whole=whole, on_first=placement.on_first
            )
            try:
                for add in self._adds:
                    self._subscription.add(add)
            except EngineUnavailable:  # it ended just now
                other = placement.elsewhere()
                if other is None:
                    raise
                placement = other
            else:
                return

    def _next_events(self) -> list[RequestEvent]:
        """What came; a replica whose queue is full has refused the request as a whole, and then
        another one is asked. Raises what `Subscription.next` raises."""
        assert self._subscription is not None, "start comes first"
        try:
            return self._subscription.next(self._patience())
        except Overloaded:
            assert self._placement is not None
            other = self._placement.elsewhere()
            if other is None:
                raise
        self._submit(other)
        return []

    def deltas(self) -> Iterator[list[Delta]]:
        """Pieces of the answers as they come, until every choice has ended.

        Raises ClientGone, TimedOut, GenerationFailed, InvalidRequestError for a field that shows
        only now that it can't be served, and what `Subscription.next` raises.
        """
        assert self._subscription is not None, "start comes first"
        while self._subscription.open_answers:
            events = self._next_events()
            if self._disconnected():
                raise ClientGone("The client has gone.")
            deltas = [
                delta for event in events for delta in self._advance(self._subscription, event)
            ]
            if deltas:
                yield deltas

    def _patience(self) -> float:
        """Seconds to wait for the next event; TimedOut if none are left."""
        left = self._arrived + self._timeout - time.monotonic()
        if left <= 0:
            raise TimedOut(
                f"The request was given up after {self._timeout:g} seconds, the limit (timeout or "
                "--request-timeout)."
            )
        return min(left, DISCONNECT_POLL_SECONDS)

    def _advance(self, subscription: Subscription, event: RequestEvent) -> list[Delta]:
        choice = self._choices[event.request_id, event.index]
        if event.queue_seconds is not None:  # with its first event, and with its last one
            self._times[choice.index].add(event)
        if choice.finish_reason is not None:
            return self._last_event(choice, event)
        if event.finish_reason is FinishReason.ERROR:
            if event.error is not None and event.error_field is not None:
                raise InvalidRequestError(event.error_field, event.error)
            raise GenerationFailed(event.error or "The engine failed and did not say why.")
        if event.prompt_logprobs is not None:
            self.prompt_logprobs[choice.index // self.wanted.params.n] = event.prompt_logprobs
        delta = choice.advance(event)
        if delta.finish_reason is not None:
            times = self._times[choice.index]
            times.ended, times.finish_reason = time.monotonic() - self._arrived, delta.finish_reason
            # Does nothing unless a stop string ended it here.
            subscription.abort(
                event.request_id, event.index, FinishReason.STOP, waits=self._wants_experts
            )
            self._ended[choice.index] = delta
            return self._last_event(choice, event)
        return [delta]

    @property
    def _wants_experts(self) -> bool:
        return self.wanted.params.return_routed_experts is not False

    def _last_event(self, choice: Choice, event: RequestEvent) -> list[Delta]:
        """The last delta of a choice that has ended, once; where experts are wanted, when the
        engine has ended it, too."""
        if event.finish_reason is None and self._wants_experts:
            return []
        delta = self._ended.pop(choice.index, None)
        if delta is not None and event.routed_experts is not None:
            tokens = event.prompt_tokens + choice.completion_tokens
            delta.routed_experts = event.routed_experts.until(tokens)
        return [] if delta is None else [delta]

    def close(self) -> None:
        """Abort what is still running. Always called, by whoever comes first."""
        if self._leave is None:
            return
        self._leave()
        self._leave = None
        if self._subscription is not None:
            self._subscription.close()
        if self._placement is not None:
            choices = self._choices.values()
            whole = all(one.finish_reason is not None for one in choices)
            tokens = sum(one.completion_tokens for one in choices)
            self._placement.ended(tokens if whole else None)

    def figures(self) -> dict[str, object]:
        """For the log: tokens so far, and seconds in the queue (the longest of all answers) and
        until the first token."""
        figures: dict[str, object] = {}
        if self._prompt_tokens:
            figures["prompt_tokens"] = self._prompt_tokens  # though no event may have come
            _, figures["cached_tokens"], figures["answer_tokens"], _ = self.tokens()
        queued = [one.begun for one in self._times.values() if one.begun is not None]
        if queued:
            figures["queue_seconds"] = round(max(queued), 4)
        if self._subscription is not None and self._subscription.first_event is not None:
            figures["first_token_seconds"] = round(
                self._subscription.first_event - self._arrived, 4
            )
        return figures

    @property
    def fingerprint(self) -> str | None:
        """Of what computes the answers; known once there is a delta."""
        subscription = self._subscription
        if subscription is None or subscription.fingerprint is None:
            return None
        return subscription.fingerprint.short

    def seconds(self, index: int) -> float | None:
        """From when the request came to the end of this answer; None while it goes on."""
        return self._times[index].ended

    @property
    def weight_version(self) -> str:
        """Of the weights that are there now."""
        assert self._subscription is not None, "start comes first"
        now = self._subscription.client.fingerprint
        return "" if now is None else now.weight_version

    @property
    def handover_address(self) -> str:
        """Where other servers go on from what was computed; "" unless it is handed over."""
        return "" if self._subscription is None else self._subscription.handover_address

    @property
    def handed_over_request(self) -> str:
        """By which name they may follow it meanwhile; "" for several prompts."""
        return self._adds[0].request_id if len(self._adds) == 1 else ""

    def usage(self) -> dict[str, object]:
        """Tokens read and written."""
        return self._usage(*self.tokens())

    def outcome(self, status: int) -> int:
        """What became of a request that was answered with this HTTP status: the one that fits what
        broke its stream off."""
        return (self.failure or status) if status < 400 else status

    def answers(self) -> list[AnswerTrace]:
        """What became of each so far, and when."""
        return [
            AnswerTrace(
                one.prompt_tokens,
                one.cached_tokens,
                one.completion_tokens,
                times.begun,
                times.first_token,
                times.ended,
                times.finish_reason,
                times.preemptions,
            )
            for one in self._choices.values()
            for times in [self._times[one.index]]
        ]

    def tokens(self) -> Tokens:
        """So far. A prompt with several choices was given once, so counts once, and what was cached
        of it is what was found for the first of them to be computed."""
        answers = list(self._choices.values())
        n = self.wanted.params.n
        groups = [answers[start : start + n] for start in range(0, len(answers), n)]
        prompt = sum(max(answer.prompt_tokens for answer in group) for group in groups)
        completion = sum(answer.completion_tokens for answer in answers)
        cached = sum(min(answer.cached_tokens for answer in group) for group in groups)
        thoughts = [one.reasoning_tokens for one in answers]
        known = [tokens for tokens in thoughts if tokens is not None]
        return Tokens(prompt, cached, completion, sum(known) if known else None)

    def usage_so_far(self, index: int) -> dict[str, object]:
        """Of the choice with this index: tokens of its prompt, and those it has written."""
        number, own = divmod(index, self.wanted.params.n)
        answer = self._choices[f"{self.request_id}-{number}", own]
        return self._usage(
            answer.prompt_tokens,
            answer.cached_tokens,
            answer.completion_tokens,
            answer.reasoning_tokens,
        )

    def _usage(
        self, prompt: int, cached: int, completion: int, reasoning: int | None
    ) -> dict[str, object]:
        usage: dict[str, object] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if self._options.report_cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if reasoning is not None:
            usage[REASONING_USAGE] = {"reasoning_tokens": reasoning}
        return usage
