"""Which drafts hold, and which are worth a try, against loops over sequences and tokens."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from megatron_hybrid.execution.random_streams import uniform, uniform_on_device
from megatron_hybrid.execution.runs import NO_DRAFT, Emitted, choose_drafts, verify

LONGEST = 5


def test_the_device_draws_the_same_numbers_as_the_host() -> None:
    generator = np.random.default_rng(0)
    seed = generator.integers(0, 2**64, 1000, dtype=np.uint64)
    seed[:4] = [0, 1, 2**63, 2**64 - 1]
    index = generator.integers(0, 2**40, 1000)
    index[:8] = range(8)
    found = uniform_on_device(torch.from_numpy(seed.view(np.int64)), torch.from_numpy(index))
    assert torch.equal(found, torch.from_numpy(uniform(seed, index)))
    assert found.min() >= 0 and found.max() < 1


@pytest.mark.parametrize("seed", range(20))
def test_drafts_hold_while_they_are_what_was_sampled(seed: int) -> None:
    pick = random.Random(seed)
    lengths = [pick.randint(1, LONGEST + 1) for _ in range(pick.randint(1, 6))]
    bounds = np.cumsum([0, *lengths]).tolist()
    fed = [pick.randint(0, 1) for _ in range(bounds[-1])]
    sampled = [pick.choice((*fed[i + 1 : i + 2], 0, 1, 2)) for i in range(bounds[-1])]
    expected, texts = [], []
    for begin, end in pairwise(bounds):
        held = 0
        while begin + held + 1 < end:
            if sampled[begin + held] != fed[begin + held + 1]:
                break
            held += 1
        expected.append(held)
        texts.append(sampled[begin : begin + held + 1])
    cu_seqlens = torch.tensor(bounds)
    found = verify(torch.tensor(sampled), torch.tensor(fed), cu_seqlens, LONGEST)
    assert (found.number - 1).tolist() == expected
    tokens = [row[:n] for row, n in zip(found.tokens.tolist(), found.number.tolist(), strict=True)]
    assert tokens == texts


@pytest.mark.parametrize("seed", range(40))
def test_a_guess_that_was_shown_to_be_wrong_gives_no_drafts(seed: int) -> None:
    pick = random.Random(seed)
    count, width = 5, 2 * LONGEST + 2
    windows, starts, positions, texts, expected = [], [], [], [], []
    for _ in range(count):
        start = pick.randint(0, 9)
        guesses = [pick.randint(0, 1) for _ in range(pick.randint(0, width))]
        window = guesses + [NO_DRAFT] * (width - len(guesses))
        # the text that is known afterwards; the window may begin inside of it or behind it
        emits = pick.randint(1, LONGEST + 1)
        position = start + emits - 1 + pick.randint(-1, 1)
        text = {position - emits + 1 + i: pick.randint(0, 1) for i in range(emits)}
        if pick.random() < 0.7:
            text = {at: dict(enumerate(window, start)).get(at, token) for at, token in text.items()}
        right = all(
            window[at - start] == token for at, token in text.items() if 0 <= at - start < width
        )
        places = range(position + 1 - start, position + 1 - start + LONGEST)
        drafts = [window[at] if right and 0 <= at < width else NO_DRAFT for at in places]
        windows.append(window)
        starts.append(start)
        positions.append(position)
        texts.append(list(text.values()))
        expected.append(drafts)
    before = Emitted(
        torch.tensor([text + [7] * (LONGEST + 1 - len(text)) for text in texts]),
        torch.tensor([len(text) for text in texts]),
    )
    found = choose_drafts(
        torch.tensor(windows), torch.tensor(starts), before, torch.tensor(positions), LONGEST
    )
    assert found.tolist() == expected
