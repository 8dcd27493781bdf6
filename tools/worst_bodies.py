#!/usr/bin/env python
r"""Sends a server the bodies that cost it most, one by one, and says how each was answered.

    python tools/worst_bodies.py --url http://127.0.0.1:5000
    python tools/worst_bodies.py --url http://127.0.0.1:5000 --seconds 600
    python tools/worst_bodies.py --url http://127.0.0.1:5000 --only text detokenize
    python tools/worst_bodies.py --list

Each line is JSON: the body's name and size, the status and the seconds until it came. A status of
500 or above is a failure of the server, as is a connection that is closed without an answer; then
the exit code is 1. The bodies are made first, as files in a temporary folder (3 GB): while they are
sent, the server has the cores to itself. `tools/soak_server.py --worst-bodies` holds streams
meanwhile.
"""

from __future__ import annotations

import argparse
import http.client
import json
import mmap
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

MOST_BYTES = 64 * 2**20  # the server's limit for a body
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
_MIB = 2**20
_PACKET = 2**16
_LETTERS = b"abcdefghijklmnopqrstuvwxyz    .,"


@dataclass(frozen=True)
class WorstBody:
    """`make` gives a body of at most so many bytes (smaller ones are as bad in their kind).

    `size`: what it has in full, in bytes. `chunk`: bytes in each of its chunks; 0: not in chunks.
    """

    name: str
    path: str
    make: Callable[[int], bytes]
    size: int = MOST_BYTES
    chunk: int = 0

    def body(self, most: int = MOST_BYTES) -> bytes:
        """The body, of no more than `most` bytes."""
        return self.make(min(self.size, most))


@dataclass(frozen=True)
class Outcome:
    """What came back. `status`: 0 if the connection was closed without an answer, for `reason`."""

    name: str
    bytes: int
    status: int
    seconds: float
    reason: str

    @property
    def bad(self) -> bool:
        return not 200 <= self.status < 500


def _repeated(head: str, unit: str | bytes, tail: str) -> Callable[[int], bytes]:
    """`unit` again and again; without the comma after the last one."""
    unit = unit if isinstance(unit, bytes) else unit.encode()

    def make(size: int) -> bytes:
        count = max(1, (size - len(head) - len(tail)) // len(unit))
        return head.encode() + (unit * count).removesuffix(b",") + tail.encode()

    return make


def _numbered(head: str, unit: str, tail: str, most: int = sys.maxsize) -> Callable[[int], bytes]:
    """`unit` with 0, 1, 2... in place of its #, with commas between, `most` at most."""

    def make(size: int) -> bytes:
        room = size - len(head) - len(tail)
        places = unit.count("#")
        parts: list[str] = []
        for number in range(most):
            digits = str(number)
            room -= len(unit) + places * (len(digits) - 1) + 1
            if room < 0 and parts:
                break
            parts.append(unit.replace("#", digits))
        return (head + ",".join(parts) + tail).encode()

    return make


def _nested(head: str, opened: str, closed: str, tail: str, most: int) -> Callable[[int], bytes]:
    """So deep at most."""

    def make(size: int) -> bytes:
        room = size - len(head) - len(tail) - 1
        depth = max(1, min(most, room // (len(opened) + len(closed))))
        return (head + opened * depth + "1" + closed * depth + tail).encode()

    return make


def _words(head: str, tail: str) -> Callable[[int], bytes]:
    """Words that no tokenizer has met before."""

    def make(size: int) -> bytes:
        noise = random.Random(1).randbytes(max(1, size - len(head) - len(tail)))
        return head.encode() + noise.translate(_LETTERS * 8) + tail.encode()

    return make


def _small(body: str) -> Callable[[int], bytes]:
    """One that is short as it is."""
    return lambda size: body.encode()


def _encoded(make: Callable[[int], bytes], encoding: str) -> Callable[[int], bytes]:
    return lambda size: make(size // 4).decode().encode(encoding)


_PROMPT = '{"max_tokens":1,"prompt":'
_MESSAGE = '{"max_tokens":1,"messages":[{"role":"user","content":'
_SHORT = '{"max_tokens":8,"messages":[{"role":"user","content":"a"}],'
_SCHEMA = (
    _SHORT + '"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":'
    '{"type":"object","additionalProperties":false,'
)
_TOOL = '{"type":"function","function":{"name":"f#","parameters":{"type":"object","properties":{'
_ASSISTANT = (
    '{"max_tokens":1,"messages":[{"role":"user","content":"a"},{"role":"assistant","tool_calls":'
    '[{"id":"c","type":"function","function":{"name":"f","arguments":"'
)
_TURN = '{"role":"user","content":"a"},{"role":"assistant","content":"b"},'

WORST_BODIES: tuple[WorstBody, ...] = (
    # Texts: to be tokenized, or refused before.
    WorstBody("text", COMPLETION, _words(_PROMPT + '"', '"}'), 60 * _MIB),
    WorstBody("text_1mb", COMPLETION, _words(_PROMPT + '"', '"}'), _MIB),
    WorstBody("text_that_may_fit", COMPLETION, _words(_PROMPT + '"', '"}'), 32_000),
    WorstBody("chat_text", CHAT, _words(_MESSAGE + '"', '"}]}'), 60 * _MIB),
    WorstBody("chat_text_1mb", CHAT, _words(_MESSAGE + '"', '"}]}'), _MIB),
    WorstBody("tokenize_text", "/tokenize", _words('{"prompt":"', '"}'), 60 * _MIB),
    WorstBody("tokenize_text_1mb", "/tokenize", _words('{"prompt":"', '"}'), _MIB),
    WorstBody("one_letter", COMPLETION, _repeated(_PROMPT + '"', "a", '"}'), _MIB),
    WorstBody("spaces", COMPLETION, _repeated(_PROMPT + '"', " ", '"}'), _MIB),
    WorstBody("line_ends", COMPLETION, _repeated(_PROMPT + '"', "\\n", '"}'), _MIB),
    WorstBody("digits", COMPLETION, _repeated(_PROMPT + '"', "1", '"}'), _MIB),
    WorstBody("punctuation", COMPLETION, _repeated(_PROMPT + '"', "'!", '"}'), _MIB),
    WorstBody("combining_marks", COMPLETION, _repeated(_PROMPT + '"a', "\u0301", '"}'), _MIB),
    WorstBody("pictures", COMPLETION, _repeated(_PROMPT + '"', "\U0001f600", '"}'), _MIB),
    WorstBody("special_tokens", COMPLETION, _repeated(_PROMPT + '"', "<|im_end|>", '"}'), _MIB),
    WorstBody("texts", COMPLETION, _repeated(_PROMPT + "[", '"a",', "]}")),
    WorstBody("parts", CHAT, _repeated(_MESSAGE + "[", '{"type":"text","text":"a"},', "]}]}")),
    WorstBody(
        "prompt_echoed",
        COMPLETION,
        _small(
            '{"echo":true,"logprobs":20,"max_tokens":1,"prompt":[' + ",".join(["7"] * 4000) + "]}"
        ),
    ),
    # Token ids.
    WorstBody("ids_15mb", COMPLETION, _repeated(_PROMPT + "[", "17,", "]}"), 15 * _MIB),
    WorstBody("ids", COMPLETION, _repeated(_PROMPT + "[", "17,", "]}"), 61 * _MIB),
    WorstBody("lists_of_ids", COMPLETION, _repeated(_PROMPT + "[", "[17],", "]}"), 61 * _MIB),
    WorstBody("ids_with_a_wrong_end", COMPLETION, _repeated(_PROMPT + "[", "17,", ',"a"]}')),
    WorstBody("detokenize", "/detokenize", _repeated('{"tokens":[', "17,", "]}"), 30_000_000),
    WorstBody("detokenize_300kb", "/detokenize", _repeated('{"tokens":[', "17,", "]}"), 300_000),
    WorstBody("stop_token_ids", CHAT, _repeated(_SHORT + '"stop_token_ids":[', "7,", "]}")),
    WorstBody("cache_checkpoints", CHAT, _numbered(_SHORT + '"cache_checkpoints":[', "1#", "]}")),
    # Other fields that hold much.
    WorstBody("logit_bias", CHAT, _numbered(_SHORT + '"logit_bias":{', '"#":1', "}}", 1_000_000)),
    WorstBody(
        "template_arguments",
        CHAT,
        _numbered(_SHORT + '"chat_template_kwargs":{', '"a#":1', "}}", 200_000),
    ),
    WorstBody(
        "template_text", CHAT, _words(_SHORT + '"chat_template_kwargs":{"a":"', '"}}'), 60 * _MIB
    ),
    WorstBody("stops", CHAT, _numbered(_SHORT + '"stop":[', '"a#"', "]}")),
    WorstBody("stop_text", CHAT, _repeated(_SHORT + '"stop":"', "a", '"}')),
    WorstBody(
        "longest_stops", CHAT, _repeated(_SHORT + '"stop":[', f'"{"a" * 1024}",', "]}"), 16_000
    ),
    WorstBody("salt", CHAT, _words(_SHORT + '"cache_salt":"', '"}')),
    WorstBody("model", CHAT, _words(_SHORT + '"model":"', '"}')),
    WorstBody("unknown_fields", CHAT, _numbered(_SHORT, '"a#":1', "}")),
    WorstBody("unknown_name", CHAT, _words(_SHORT + '"', '":1}')),
    WorstBody("small_objects", CHAT, _repeated(_SHORT + '"a":[', "{},", "]}"), 63 * _MIB),
    WorstBody("same_key", CHAT, _repeated(_SHORT, '"n":1,', "}")),
    WorstBody("abort", "/abort", _words('{"request_id":"', '"}')),
    WorstBody("no_such_route", "/v1/nothing", _words('{"a":"', '"}')),
    # Messages and tools.
    WorstBody(
        "messages_10000", CHAT, _repeated('{"max_tokens":1,"messages":[', _TURN, "]}"), 285_000
    ),
    WorstBody("messages", CHAT, _repeated('{"max_tokens":1,"messages":[', _TURN, "]}")),
    WorstBody("empty_messages", CHAT, _repeated('{"messages":[', "{},", "]}")),
    WorstBody("tokenize_messages", "/tokenize", _repeated('{"messages":[', _TURN, "]}"), 2 * _MIB),
    WorstBody(
        "call_arguments", CHAT, _numbered(_ASSISTANT + "{", '\\"a#\\":[]', '}"}}]}]}'), 15 * _MIB
    ),
    WorstBody(
        "calls",
        CHAT,
        _repeated(
            '{"max_tokens":1,"messages":[{"role":"assistant","tool_calls":[',
            '{"id":"c","type":"function","function":{"name":"f","arguments":"{}"}},',
            "]}]}",
        ),
    ),
    WorstBody("tools", CHAT, _numbered(_SHORT + '"tools":[', _TOOL + "}}}}", "]}")),
    WorstBody(
        "tools_128",
        CHAT,
        _numbered(
            _SHORT + '"tool_choice":"required","tools":[',
            _TOOL + ",".join(f'"p{i}":{{"type":"string"}}' for i in range(40)) + "}}}}",
            "]}",
            128,
        ),
    ),
    WorstBody(
        "tool_of_5000_properties",
        CHAT,
        _numbered(
            _SHORT + '"tool_choice":"required","tools":[' + _TOOL.replace("#", ""),
            '"p#":{"type":"string"}',
            "}}}}]}",
            5000,
        ),
    ),
    WorstBody(
        "tool_description",
        CHAT,
        _words(
            _SHORT + '"tools":[{"type":"function","function":{"name":"f","description":"', '"}}]}'
        ),
    ),
    # Schemas, which are compiled.
    WorstBody(
        "schema_of_5000",
        CHAT,
        _numbered(_SCHEMA + '"properties":{', '"p#":{"type":"string"}', "}}}}}", 5000),
    ),
    WorstBody(
        "schema_of_100000",
        CHAT,
        _numbered(_SCHEMA + '"properties":{', '"p#":{"type":"string"}', "}}}}}", 100_000),
    ),
    WorstBody(
        "schema_enum",
        CHAT,
        _numbered(
            _SCHEMA + '"required":["a"],"properties":{"a":{"enum":[', '"e#"', "]}}}}}}", 200_000
        ),
    ),
    WorstBody(
        "schema_any_of",
        CHAT,
        _numbered(
            _SCHEMA + '"required":["a"],"properties":{"a":{"anyOf":[',
            '{"type":"object","properties":{"b#":{"type":"string"}},"required":["b#"]}',
            "]}}}}}}",
            5000,
        ),
    ),
    WorstBody(
        "schema_pattern",
        CHAT,
        _small(
            _SCHEMA + '"required":["a"],"properties":{"a":{"type":"string",'
            '"pattern":"^((a|b){1,1000}(a|c){1,1000}){1,1000}$"}}}}}}'
        ),
    ),
    WorstBody(
        "schema_counts",
        CHAT,
        _small(
            _SCHEMA + '"required":["a"],"properties":{"a":{"type":"array","minItems":100000,'
            '"maxItems":1000000,"items":{"type":"string","minLength":100000}}}}}}}'
        ),
    ),
    WorstBody(
        "schema_nested",
        CHAT,
        _nested(
            _SCHEMA + '"properties":{"a":',
            '{"type":"object","required":["a"],"properties":{"a":',
            "}}",
            "}}}}}",
            180,
        ),
    ),
    WorstBody(
        "schema_of_itself",
        CHAT,
        _small(
            _SHORT + '"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":'
            '{"$ref":"#"}}}}'
        ),
    ),
    WorstBody("schema_text", CHAT, _words(_SCHEMA + '"description":"', '"}}}}')),
    # JSON itself.
    WorstBody("nested_lists", CHAT, _nested(_SHORT + '"a":', "[", "]", "}", sys.maxsize)),
    WorstBody("nested_objects", CHAT, _nested(_SHORT + '"a":', '{"a":', "}", "}", sys.maxsize)),
    WorstBody(
        "nested_900", CHAT, _nested(_SHORT + '"chat_template_kwargs":', '{"a":', "}", "}", 900)
    ),
    WorstBody("open_lists", CHAT, _repeated("", "[", "")),
    WorstBody("escapes", COMPLETION, _repeated(_PROMPT + '"', "\\u0061", '"}')),
    WorstBody("surrogates", COMPLETION, _repeated(_PROMPT + '"', "\\ud800", '"}')),
    WorstBody("surrogate_pairs", COMPLETION, _repeated(_PROMPT + '"', "\\ud83d\\ude00", '"}')),
    WorstBody("quotes", COMPLETION, _repeated(_PROMPT + '"', '\\"', '"}')),
    WorstBody("long_number", CHAT, _repeated(_SHORT + '"seed":', "9", "}"), 1_000_100),
    WorstBody("long_fraction", CHAT, _repeated(_SHORT + '"top_p":0.', "9", "}"), 1_000_100),
    WorstBody("long_exponent", CHAT, _repeated(_SHORT + '"top_p":1e', "9", "}"), 1_000_100),
    WorstBody("numbers_of_4000", COMPLETION, _repeated(_PROMPT + "[", "9" * 4000 + ",", "]}")),
    WorstBody("fractions", COMPLETION, _repeated(_PROMPT + "[", "0.12345678901234567,", "]}")),
    WorstBody("white_space", COMPLETION, _repeated(_PROMPT, " ", '"a"}')),
    WorstBody("no_end", COMPLETION, _words(_PROMPT + '"', "")),
    WorstBody("wrong_utf8", COMPLETION, _repeated(_PROMPT + '"', b"\xff", '"}')),
    WorstBody(
        "wrong_utf8_at_the_end",
        COMPLETION,
        lambda size: _words(_PROMPT + '"', "")(size - 3) + b'\xff"}',
    ),
    WorstBody("zeros", COMPLETION, _repeated("", b"\0", "")),
    WorstBody("utf16", COMPLETION, _encoded(_words(_PROMPT + '"', '"}'), "utf-16-le")),
    WorstBody("utf32", COMPLETION, _encoded(_words(_PROMPT + '"', '"}'), "utf-32-le")),
    WorstBody("a_list", COMPLETION, _repeated("[", "1,", "]")),
    WorstBody("a_text", COMPLETION, _words('"', '"')),
    # Chunked uploads.
    WorstBody("chunked_text", COMPLETION, _words(_PROMPT + '"', '"}'), 60 * _MIB, 2**16),
    WorstBody("chunked_ids", COMPLETION, _repeated(_PROMPT + "[", "17,", "]}"), 61 * _MIB, 1000),
    WorstBody("chunks_of_one_byte", COMPLETION, _words(_PROMPT + '"', '"}'), _MIB, 1),
)


def _pieces(body: bytes | mmap.mmap, chunk: int) -> Iterator[bytes]:
    """The body as it goes over the connection; tiny chunks share a packet."""
    if not chunk:
        yield from (body[start : start + 2**20] for start in range(0, len(body), 2**20))
        return
    together = chunk * max(1, _PACKET // (chunk + 8))
    for start in range(0, len(body), together):
        packet = body[start : start + together]
        chunks = (packet[i : i + chunk] for i in range(0, len(packet), chunk))
        yield b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in chunks)
    yield b"0\r\n\r\n"


def send(
    url: str,
    worst: WorstBody,
    body: bytes | mmap.mmap,
    api_key: str | None = None,
    timeout: float = 120.0,
) -> Outcome:
    """Send one body on a connection of its own; whatever comes back, or does not, is an outcome.

    A server may answer before it has read all of the body, and close.
    """
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout)
    start = time.monotonic()
    status, reason = 0, ""
    try:
        connection.putrequest("POST", worst.path)
        connection.putheader("Content-Type", "application/json")
        if worst.chunk:
            connection.putheader("Transfer-Encoding", "chunked")
        else:
            connection.putheader("Content-Length", str(len(body)))
        if api_key:
            connection.putheader("Authorization", f"Bearer {api_key}")
        connection.endheaders()
        try:
            for piece in _pieces(body, worst.chunk):
                connection.send(piece)
        except (BrokenPipeError, ConnectionResetError) as error:
            reason = f"not all of it was read: {error}"
        answer = connection.getresponse()
        status = answer.status
        reason = answer.read().decode(errors="replace")[:300]
    except (OSError, http.client.HTTPException) as error:
        reason = f"{type(error).__name__}: {error} {reason}".strip()
    finally:
        connection.close()
    return Outcome(worst.name, len(body), status, round(time.monotonic() - start, 3), reason)


def named(names: list[str]) -> list[WorstBody]:
    """Those with these names, or all if there are none."""
    unknown = sorted(set(names) - {worst.name for worst in WORST_BODIES})
    if unknown:
        raise SystemExit(f"There is no worst body {', '.join(unknown)}; --list names them.")
    return [worst for worst in WORST_BODIES if not names or worst.name in names]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="of the server")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these bodies")
    parser.add_argument("--seconds", type=float, help="again and again, for so long; else once")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two of them")
    parser.add_argument("--most-bytes", type=int, default=MOST_BYTES, help="of a body")
    parser.add_argument("--api-key", default=os.environ.get("MEGATRON_HYBRID_API_KEY"))
    parser.add_argument("--list", action="store_true", help="the bodies' names and sizes")
    args = parser.parse_args()
    chosen = named(args.only)
    if args.list:
        for worst in chosen:
            print(f"{worst.name:26} {len(worst.body(args.most_bytes)):>9} bytes to {worst.path}")
        return 0
    if args.url is None:
        parser.error("--url is missing.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that the folder is removed
    with tempfile.TemporaryDirectory() as folder:
        for worst in chosen:
            (Path(folder) / worst.name).write_bytes(worst.body(args.most_bytes))
        return int(send_all(args, chosen, Path(folder)) > 0)


def send_all(args: argparse.Namespace, chosen: list[WorstBody], folder: Path) -> int:
    """Each at least once, from its file, with a line before and after; how many went badly."""
    start, bad, turn = time.monotonic(), 0, 0
    while turn < len(chosen) or (args.seconds and time.monotonic() - start < args.seconds):
        worst = chosen[turn % len(chosen)]
        print(json.dumps({"sending": worst.name}), flush=True)
        with (
            open(folder / worst.name, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as body,
        ):
            outcome = send(args.url, worst, body, args.api_key)
        print(json.dumps(asdict(outcome)), flush=True)
        bad += outcome.bad
        turn += 1
        time.sleep(args.pause)
    return bad


if __name__ == "__main__":
    sys.exit(main())
