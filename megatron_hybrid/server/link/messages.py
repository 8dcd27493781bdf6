"""What front ends say to engine processes and to the coordinator, and these to them, over ZMQ in
msgpack.

The engine, or the coordinator, binds a ROUTER, each front end connects a DEALER. A front end sends
commands, and is answered with replies. Both directions carry lists, so that a step costs one
message.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from megatron_hybrid.request import CONTEXT_FLAG, FinishReason, RequestEvent, SamplingParams
from megatron_hybrid.weight_transfer import requests as weight_transfer


class Command(msgspec.Struct, tag=True, frozen=True):
    """Sent by a front end."""


class Join(Command, frozen=True):
    """A front end is there; answered with EngineReady as soon as the engine is."""


class Joined(Command, frozen=True):
    """EngineReady has come: this front end takes requests at `url` from now on."""

    url: str


class Left(Command, frozen=True):
    """The answer to Draining: no more requests come from this front end."""


class AddRequest(Command, frozen=True):
    """One prompt of an HTTP request, named `<its id>-<number>`.

    `prompt`: its ids, `packed`. `answers`: how many the HTTP request asks for
    in all, and 0 in its later prompts: it is let in or refused as a whole. `arrived`: when it came,
    by this machine's `time.monotonic`. `prefilled_by`: a server that has computed the prompt, or
    whose request `prefilling` computes it. `called`: the client's own name for it, by which
    AbortAnswers finds it too.
    """

    request_id: str
    prompt: bytes
    params: SamplingParams
    answers: int = 1
    cache_salt: str = ""
    priority: int = 0
    cache_checkpoints: tuple[int, ...] = ()
    message_ends: tuple[int, ...] = ()
    arrived: float | None = None
    prefilled_by: str = ""
    prefilling: str = ""
    called: str = ""
    adapter: str = ""


class Prepared(Command, frozen=True):
    """The grammar of a request was compiled, and its prompt is not computed elsewhere any more: now
    the engine takes it. The first rank sends it to the others, never a front end."""

    request_id: str


class AbortRequest(Command, frozen=True):
    """End one answer to a request; without an index, all that have not ended. `reason`: how it is
    counted; "stop" when a stop string ended it, which only the front end sees."""

    request_id: str
    index: int | None = None
    reason: FinishReason = FinishReason.ABORT


class Query(Command, frozen=True):
    """A command that is answered, with one Result."""

    query_id: int


class GetStats(Query, frozen=True):
    """The engine's counters."""


class AbortAnswers(Query, frozen=True):
    """End all answers to one HTTP request, whichever front end it came through; the result holds
    `aborted`, their number. `request_id`: ours, or what the client calls it."""

    request_id: str


class AbortAll(Query, frozen=True):
    """End every answer of every front end; the result holds `aborted`, their number."""


class ResetPrefixCache(Query, frozen=True):
    """Forget every cached prefix. `if_idle`: refused while a request runs or waits."""

    if_idle: bool = False


class Pause(Query, frozen=True):
    """Start no more requests. Those that run: "finish", "abort" or "keep" them where they are.
    Answered when nothing is computed any more, with the weights' `epoch`."""

    mode: str


class Resume(Query, frozen=True):
    """Go on after Pause."""


class UpdateWeights(Query, frozen=True):
    """Overwrite the model's weights when what runs has been treated as by Pause; a mode of "": as
    by the pause that holds, or "finish". The cache is emptied. Paused before: stays paused; else
    goes on. Answered with the new `epoch` and `weight_version`. Between BeginUpdate and
    FinishUpdate it is one piece of several. version: what answers call the weights then."""

    source: weight_transfer.Source
    mode: str = ""
    version: str | None = None


class BeginUpdate(Query, frozen=True):
    """Pause as `mode` says and stay so: an update in several pieces comes."""

    mode: str = ""


class FinishUpdate(Query, frozen=True):
    """All pieces are there. Goes on, unless it was paused before BeginUpdate."""

    version: str | None = None


class NameWeights(Query, frozen=True):
    """What answers call the weights from now on, which stay as they are."""

    version: str


class Sleep(Query, frozen=True):
    """Give memory back, by tags: "weights", "kv_cache"; `keep_weights`: in the host's meanwhile.
    Requests that run are treated as by Pause before; those that come wait. See engine.sleep."""

    tags: list[str]
    keep_weights: bool
    mode: str


class WakeUp(Query, frozen=True):
    """Take memory of these tags again, and go on when all is there, weights too."""

    tags: list[str]


class CheckWeights(Query, frozen=True):
    """See loop.weight_check. Answered with their `checksum`, but for "reset_tensors"."""

    action: str


class LoadAdapter(Query, frozen=True):
    """Let requests have an adapter by this name. `config`: what its adapter_config.json would say,
    of one that is no folder. Unless `in_place`, refused for a name that there is already."""

    name: str
    source: weight_transfer.Source
    config: dict[str, Any] | None = None
    in_place: bool = False


class UnloadAdapter(Query, frozen=True):
    """No more requests have it; those that do go on to their end."""

    name: str


class OpenGroup(Query, frozen=True):
    """Make a group with a trainer, which does the same: answered when it has come about. Until then
    what runs stands still."""

    group: weight_transfer.TransferGroup


class CloseGroup(Query, frozen=True):
    """Leave a group with a trainer; the result says whether there was one of that `name`."""

    name: str


class Stop(Command, frozen=True):
    """Ends the engine loop; the first rank sends it to the others, never a front end."""

    at_once: bool = True  # else when the replicas in lockstep may end too


class Wanted(msgspec.Struct, frozen=True):
    """An HTTP request before it has a place. All its prompts, each `packed`, go to one replica:
    they are let in or refused together, and answers to one prompt share what it costs. `adapters`:
    the name of each prompt's, "" for none; of nobody's if it is empty."""

    request_id: str
    prompts: list[bytes]
    n: int  # answers to each prompt
    max_tokens: int | None  # of each answer
    cache_salt: str
    adapters: list[str] = []

    @property
    def answers(self) -> int:
        """Answers in all."""
        return len(self.prompts) * self.n


class Place(Query, frozen=True):
    """To the coordinator: which of `replicas` shall take this HTTP request? From its answer on,
    `replica`, the request counts there until Ended."""

    wanted: Wanted
    replicas: list[int]


class Moved(Command, frozen=True):
    """To the coordinator: the request went to this replica, whatever was answered; nothing else is
    known of it if nothing was asked."""

    request_id: str
    replica: int
    answers: int


class Started(Command, frozen=True):
    """To the coordinator: a prompt, called as its engine request, has been computed."""

    request_id: str


class Ended(Command, frozen=True):
    """To the coordinator: the HTTP request is over; its answers together had `tokens` tokens, None
    if they did not come to their end."""

    request_id: str
    tokens: int | None


class Reply(msgspec.Struct, tag=True, frozen=True):
    """Sent by the engine process, or by the coordinator."""


class CacheSizes(msgspec.Struct, frozen=True):
    """How an engine's prefix cache is cut, in tokens. `block_size` 0: it has none, or it is not
    known. `unit`: what is reusable of a computed prompt, exact ends aside, is a multiple of it.
    `stored_as`: of its keys, see cache.block_hash.root_key."""

    block_size: int = 0
    unit: int = 1
    stored_as: str = ""


NO_CACHE = CacheSizes()


class EngineReady(Reply, frozen=True):
    """The answer to Join. `max_seq_length`: the longest prompt and answer together, and the flag
    that says so; `pid`: of the engine process; `max_queue`: answers that may wait;
    `handover_address`: where it hands over what it computes of prompts; "": it answers itself.
    `adapters`: those that requests may have, and their folders; `adapter_keys`: what stands for
    each in keys of cached prefixes."""

    max_seq_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    pid: int = 0
    max_queue: int = 0
    cache: CacheSizes = NO_CACHE
    max_seq_length_flag: str = CONTEXT_FLAG
    handover_address: str = ""
    adapters: dict[str, str] = {}
    adapter_keys: dict[str, str] = {}


class Adapters(Reply, frozen=True):
    """Those that requests may have from now on: as EngineReady has them."""

    adapters: dict[str, str]
    adapter_keys: dict[str, str]


class Fingerprint(Reply, frozen=True):
    """What computes this replica's answers from now on, and its short form: comes before
    EngineReady, and whenever weights have changed. `weight_version`: what trainers call these
    weights; `epoch`: how often they have changed."""

    short: str
    parts: dict[str, Any] = {}
    weight_version: str = ""
    epoch: int = 0


class Draining(Reply, frozen=True):
    """This replica ends when its requests have, and takes no more; answered with Left."""


class Events(Reply, frozen=True):
    """One step's events for the requests of one front end."""

    events: list[RequestEvent]


class Refused(Reply, frozen=True):
    """The engine did not take a request: InvalidRequestError on the wire."""

    request_id: str
    field: str
    message: str
    status: int


class Result(Reply, frozen=True):
    """Of a Query: its values, or the sentence of an error and its HTTP status."""

    query_id: int
    values: dict[str, Any] = {}
    error: str | None = None
    status: int = 200


class Heartbeat(Reply, frozen=True):
    """The process is alive and has nothing to say; that it can't be delivered shows that a front
    end is gone. `paused`: the engine starts no requests for now."""

    paused: bool = False


class EngineEnded(Reply, frozen=True):
    """The last message: the engine process ends, and why."""

    reason: str


WeightsQuery = UpdateWeights | BeginUpdate | FinishUpdate | NameWeights
AdapterQuery = LoadAdapter | UnloadAdapter
ControlQuery = (
    Pause
    | Resume
    | WeightsQuery
    | OpenGroup
    | CloseGroup
    | Sleep
    | WakeUp
    | CheckWeights
    | AdapterQuery
)
AnyQuery = GetStats | AbortAnswers | AbortAll | ResetPrefixCache | ControlQuery
AnyCommand = Join | Joined | Left | AddRequest | AbortRequest | AnyQuery
CoordinatorCommand = Place | Moved | Started | Ended
AnyReply = (
    EngineReady
    | Adapters
    | Fingerprint
    | Draining
    | Events
    | Refused
    | Result
    | Heartbeat
    | EngineEnded
)


def packed(token_ids: Iterable[int]) -> bytes:
    """Ids as 32-bit little-endian numbers: cheap to make, to send and to read, however many."""
    return array("i", token_ids).tobytes()


def _plain(value: Any) -> Any:
    """Counters may be numpy numbers, and `max_tokens` an int of a class of its own."""
    return int(value) if isinstance(value, int) else value.item()


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode_commands = msgspec.msgpack.Decoder(list[AnyCommand]).decode
decode_coordinator_commands = msgspec.msgpack.Decoder(list[CoordinatorCommand]).decode
decode_replies = msgspec.msgpack.Decoder(list[AnyReply]).decode
