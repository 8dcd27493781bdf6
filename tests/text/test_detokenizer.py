"""Streamed text is the text of the whole, and never shows what a stop string cuts off."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid.text.detokenizer import IncrementalDetokenizer, _Stops, bytes_of_token
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.text.make_tokenizers import byte_level, metaspace, sentencepiece_style

TOKENIZERS = {
    "byte_level": Tokenizer(byte_level()),
    "sentencepiece": Tokenizer(sentencepiece_style()),
    "metaspace": Tokenizer(metaspace()),
}
names = st.sampled_from(sorted(TOKENIZERS))
texts = st.text(alphabet=st.sampled_from("abcthe .,é日本😀\ufffd\n "), max_size=40)


def pushed_in_pieces(detokenizer: IncrementalDetokenizer, ids: list[int], cuts: list[int]) -> str:
    bounds = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    pieces = [
        detokenizer.push(ids[start:end]) for start, end in zip(bounds, bounds[1:], strict=False)
    ]
    return "".join(pieces) + detokenizer.flush()


@settings(max_examples=300, deadline=None)
@given(name=names, text=texts, cuts=st.lists(st.integers(0, 100), max_size=10))
def test_pieces_of_a_text_add_up_to_its_decoding(name: str, text: str, cuts: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    got = pushed_in_pieces(IncrementalDetokenizer(tokenizer), ids, cuts)
    assert got == tokenizer.decode(ids)


@settings(max_examples=500, deadline=None)
@given(name=names, data=st.data(), cuts=st.lists(st.integers(0, 100), max_size=10))
def test_pieces_of_any_tokens_add_up_to_their_decoding(
    name: str, data: st.DataObject, cuts: list[int]
) -> None:
    tokenizer = TOKENIZERS[name]
    # A few ids beyond the vocabulary stand for a padded embedding.
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=60))
    got = pushed_in_pieces(IncrementalDetokenizer(tokenizer), ids, cuts)
    assert got == tokenizer.decode(ids)


def first_stop_by_hand(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The text grows character by character and ends when a stop string is complete."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    name=names,
    text=st.text(alphabet="abé日 ", max_size=30),
    stops=st.lists(st.text(alphabet="abé日 ", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 100), max_size=10),
)
def test_text_ends_before_the_first_complete_stop_string(
    name: str, text: str, stops: list[str], cuts: list[int]
) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer, stops)
    got = pushed_in_pieces(detokenizer, ids, cuts)
    assert (got, detokenizer.stop_hit) == first_stop_by_hand(tokenizer.decode(ids), stops)


def test_tokens_used_counts_up_to_the_token_that_completed_the_stop_string() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    before, stop, after = (tokenizer.encode(text) for text in ("xyz", "##", "qqq"))
    detokenizer = IncrementalDetokenizer(tokenizer, ("##",))
    assert detokenizer.push(before + stop + after) + detokenizer.flush() == "xyz"
    assert detokenizer.tokens_used == len(before + stop)
    assert detokenizer.push(after) == ""


def test_the_beginning_of_a_stop_string_is_held_back_and_released() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    detokenizer = IncrementalDetokenizer(tokenizer, ("END",))
    assert detokenizer.push(tokenizer.encode("xE")) == "x"
    assert detokenizer.push(tokenizer.encode("N")) == ""
    assert detokenizer.push(tokenizer.encode("q")) == "ENq"
    assert detokenizer.push(tokenizer.encode("E")) == ""
    assert detokenizer.flush() == "E"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_an_unfinished_character_is_held_back(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("\U0001f680")  # a rocket, in neither vocabulary
    assert len(ids) > 2
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(detokenizer.push([token]) for token in ids[:-1]) == ""
    assert detokenizer.push(ids[-1:]) + detokenizer.flush() == "\U0001f680"


def test_endless_wrong_bytes_are_shown_and_cost_the_same_each() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    wrong = tokenizer.backend.token_to_id("<0xFF>")
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = detokenizer.push([wrong] * 1000)
    assert set(shown) == {"\ufffd"}
    assert len(shown) > 800
    assert shown + detokenizer.flush() == "\ufffd" * 1000


def test_a_long_answer_is_decoded_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    decoded = 0
    decode = Tokenizer.decode

    def counting(self: Tokenizer, ids: list[int], **options: bool) -> str:
        nonlocal decoded
        decoded += len(ids)
        return decode(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    ids = tokenizer.encode("the an ab " * 500)
    detokenizer = IncrementalDetokenizer(tokenizer)
    for token in ids:
        detokenizer.push([token])
    assert decoded < 5 * len(ids)


def test_special_tokens_are_not_shown() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("<|user|>Hello<eos>")
    assert IncrementalDetokenizer(tokenizer).push(ids) == "Hello"


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_bytes_of_tokens_spell_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    text = "the cat" if name == "metaspace" else "the café 日本 \U0001f680"
    data = b"".join(bytes_of_token(tokenizer, token) for token in tokenizer.encode(text))
    assert data.decode().strip() == text


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By looking at every end: the text before the stop string that is complete first, the longest
    of several."""
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            hit = max(hits, key=len)
            return text[: end - len(hit)], hit
    return text, None


@pytest.mark.parametrize("seed", range(30))
def test_stop_strings_are_found_as_by_looking_at_every_end(seed: int) -> None:
    rng = random.Random(seed)

    def word(longest: int) -> str:
        return "".join(rng.choices("ab", k=rng.randint(1, longest)))

    for _ in range(30):
        stops = [word(6) for _ in range(rng.randint(1, 4))]
        pieces = [word(4) for _ in range(8)]
        finder, shown, hit = _Stops(stops), "", None
        for number, piece in enumerate(pieces):
            certain, hit = finder.push(piece)
            shown += certain
            if hit is not None:
                break
            so_far = "".join(pieces[: number + 1])
            held = max(
                length
                for stop in stops
                for length in range(len(stop))
                if so_far.endswith(stop[:length])
            )
            assert shown == so_far[: len(so_far) - held]
        else:
            shown += finder.held
        assert (shown, hit) == first_stop("".join(pieces), stops)


def test_a_character_costs_no_more_where_much_is_held_back() -> None:
    """Counted, not timed: comparisons of characters, of which KMP makes at most two for each."""
    comparisons = 0

    class Counted(str):
        def __getitem__(self, index):
            nonlocal comparisons
            comparisons += 1
            return str.__getitem__(self, index)

    stops = _Stops(["a" * 1000 + "b", "b" * 1000])
    stops._stops = [(Counted(stop), borders) for stop, borders in stops._stops]
    for _ in range(5000):
        stops.push("a")
    assert comparisons < 5000 * 2 * 3
