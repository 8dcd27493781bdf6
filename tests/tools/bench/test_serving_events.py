from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bench.serving_events import EventParser, decode_event

STREAM = (
    b": a comment\n\n"
    b"data: {}\n\n"
    b"data:no space\r\n\r\n"
    b"event: x\ndata: first\ndata: second\nid: 3\n\n"
    b"\n\n" + "data: größer 日本\n\n".encode() + b"data: [DONE]\n\n"
)
PAYLOADS = [b"{}", b"no space", b"first\nsecond", "größer 日本".encode(), b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    parser = EventParser()
    payloads = []
    for start, end in zip(places, places[1:], strict=False):
        payloads += parser.feed(STREAM[start:end])
    assert payloads == PAYLOADS


def test_every_single_byte_alone() -> None:
    parser = EventParser()
    payloads = [payload for i in range(len(STREAM)) for payload in parser.feed(STREAM[i : i + 1])]
    assert payloads == PAYLOADS


def test_an_unfinished_event_is_not_given_out() -> None:
    assert EventParser().feed(b"data: {}\n") == []


def test_unknown_fields_and_nulls_are_taken() -> None:
    event = decode_event(
        b'{"id": "x", "choices": [{"index": 0, "text": "a", "logprobs": null, "new": {}}],'
        b' "usage": null, "system_fingerprint": null}'
    )
    assert event.choices[0].text == "a" and event.usage is None and event.error is None
