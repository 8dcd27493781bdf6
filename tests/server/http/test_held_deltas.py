"""Log-probabilities of text that is held back: given with it, not gone through at every token."""

from __future__ import annotations

import pytest

from megatron_hybrid.request import TokenLogprob
from megatron_hybrid.server.http import streaming
from megatron_hybrid.server.http.choice import Delta


def test_what_is_held_back_is_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []
    join = streaming._joined

    def counted(pieces: list[Delta]) -> Delta:
        joined.append(len(pieces))
        return join(pieces)

    monkeypatch.setattr(streaming, "_joined", counted)
    waiting: dict[int, list[Delta]] = {}
    entries = [TokenLogprob(token, -1.0) for token in range(100)]
    for entry in entries[:-1]:
        assert streaming._by_choice([Delta(0, "", [entry])], waiting) == []
    # another choice is shown meanwhile
    other = Delta(1, "b")
    assert streaming._by_choice([other], waiting) == [other]
    assert joined == [1]
    last = [Delta(0, "te", [entries[-1]]), Delta(1, ""), Delta(0, "xt", finish_reason="stop")]
    (shown,) = streaming._by_choice(last, waiting)
    assert shown == Delta(0, "text", entries, "stop")
    assert joined == [1, 101]
    assert waiting == {1: [Delta(1, "")]}
