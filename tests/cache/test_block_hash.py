"""SequenceKeys: one key a prefix, whatever the way to it."""

from __future__ import annotations

import random

import numpy as np

from megatron_hybrid.cache.block_hash import SequenceKeys, Tokens, extend_keys, root_key

B = 4


class Text:
    """Tokens of a sequence that may grow; counts what is asked of it."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.asked: list[tuple[int, int]] = []

    def __call__(self, start: int, end: int) -> Tokens:
        assert 0 <= start < end <= len(self.tokens)
        self.asked.append((start, end))
        return np.asarray(self.tokens[start:end], dtype=np.int32)


def test_keys_depend_on_every_earlier_token_the_salt_the_adapter_and_the_epoch():
    tokens = np.arange(3 * B, dtype=np.int32)
    first = extend_keys(root_key(0), tokens, B)
    assert len(set(first)) == 3 and len(first[0]) == 16
    changed = tokens.copy()
    changed[0] = 99
    assert not set(extend_keys(root_key(0), changed, B)) & set(first)
    # a chain that goes on equals one that is computed at once; a partial block has no key
    more = np.arange(B, 3 * B + 3, dtype=np.int32)
    assert first[:1] + extend_keys(first[0], more, B) == first


def test_no_two_combinations_of_epoch_salt_adapter_and_type_have_one_root():
    words = ["", "a", "b", "ab", "a\0", "\0", "0", "1", "\ud800"]
    roots = {root_key(epoch, salt, adapter, stored_as)
             for epoch in (0, 1, 10) for salt in words for adapter in words
             for stored_as in words}  # fmt: skip
    assert len(roots) == 3 * len(words) ** 3


def test_keys_are_equal_if_and_only_if_prefixes_are():
    """Against a dictionary of all prefixes, token by token."""
    rng = random.Random(0)
    prefix_of: dict[bytes, tuple[object, ...]] = {}
    key_of: dict[tuple[object, ...], bytes] = {}
    for _ in range(300):
        salt = rng.choice(["", "s"])
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 15))]
        text = Text(tokens)
        keys = SequenceKeys(root_key(0, salt), B, text)
        positions = list(range(len(tokens) + 1))
        rng.shuffle(positions)
        for position in positions:
            prefix = (salt, *tokens[:position])
            key = keys.at(position)
            assert prefix_of.setdefault(key, prefix) == prefix
            assert key_of.setdefault(prefix, key) == key
            assert keys.at(position) == key
    assert len(prefix_of) == len(key_of) > 300


def test_each_token_of_a_full_block_is_asked_for_once():
    text = Text(list(range(11)))
    keys = SequenceKeys(root_key(0), B, text)
    keys.extend_to(6)
    keys.extend_to(4)
    assert (len(keys.blocks), text.asked) == (1, [(0, 4)])
    text.tokens = list(range(16))  # it grew
    keys.extend_to(11)
    keys.extend_to(16)
    assert text.asked == [(0, 4), (4, 8), (8, 16)]
    assert keys.blocks == extend_keys(root_key(0), np.arange(16, dtype=np.int32), B)
    assert [keys.of_block(count) for count in range(5)] == [keys.root, *keys.blocks]
    assert keys.at(8) == keys.blocks[1] and keys.at(0) == keys.root


def test_a_key_inside_a_block_is_none_of_a_blocks_and_is_computed_once():
    text = Text(list(range(8)))
    keys = SequenceKeys(root_key(0), B, text)
    inside = [keys.at(position) for position in (1, 2, 3, 5, 6, 7)]
    assert len({*inside, *keys.blocks, keys.root}) == 6 + 1 + 1
    asked = len(text.asked)
    assert [keys.at(position) for position in (1, 2, 3, 5, 6, 7)] == inside
    assert len(text.asked) == asked


def test_a_copy_goes_its_own_way():
    mine, other = Text(list(range(10))), Text([*range(8), 50, 51, 52, 53])
    keys = SequenceKeys(root_key(0), B, mine)
    keys.extend_to(10)
    copied = keys.copy_for(other)
    assert copied.root == keys.root and copied.blocks == keys.blocks
    assert copied.at(9) != keys.at(9)
    copied.extend_to(12)
    assert len(copied.blocks) == 3 and len(keys.blocks) == 2
    assert all(start >= 8 for start, _ in other.asked)
