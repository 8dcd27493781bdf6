from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.serving_datasets import (
    DatasetError,
    PrefixRepetition,
    RandomLengths,
    custom_requests,
    prefix_repetition_requests,
    random_requests,
    sharegpt_requests,
)
from bench.serving_tokens import TokenSource, load_token_source
from megatron_hybrid.errors import ConfigurationError
from tests.text.make_tokenizers import byte_level, save

IDS = TokenSource(500)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_level(), tmp_path_factory.mktemp("tokenizer"))


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_random_prompts_have_the_lengths_asked_for() -> None:
    requests = random_requests(20, RandomLengths(30, 7, prefix=5), IDS, generator())
    prompts = [list(request.prompt) for request in requests]
    assert {len(prompt) for prompt in prompts} == {35}
    assert {tuple(prompt[:5]) for prompt in prompts} == {tuple(prompts[0][:5])}
    assert len({tuple(prompt[5:10]) for prompt in prompts}) == 20
    assert {request.max_tokens for request in requests} == {7}
    assert all(16 <= token < 500 for prompt in prompts for token in prompt)


def test_the_range_ratio_spreads_both_lengths() -> None:
    requests = random_requests(2000, RandomLengths(100, 10, range_ratio=0.5), IDS, generator())
    inputs = [len(request.prompt) for request in requests]
    outputs = [request.max_tokens for request in requests]
    assert (min(inputs), max(inputs)) == (50, 150)
    assert (min(outputs), max(outputs)) == (5, 15)
    assert np.mean(inputs) == pytest.approx(100, rel=0.03)


def test_a_seed_gives_the_same_prompts_again() -> None:
    lengths = RandomLengths(8, 4)
    first, again, other = (random_requests(5, lengths, IDS, generator(seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_bad_ratios_are_refused() -> None:
    for ratio in (-0.1, 1.0):
        with pytest.raises(DatasetError, match="--random-range-ratio"):
            random_requests(1, RandomLengths(range_ratio=ratio), IDS, generator())


def test_prefixes_are_repeated() -> None:
    sizes = PrefixRepetition(prefix=6, suffix=3, num_prefixes=4, output=9)
    requests = prefix_repetition_requests(41, sizes, IDS, generator())
    prefixes = [tuple(request.prompt[:6]) for request in requests]
    assert len(requests) == 40 and len(set(prefixes)) == 4
    assert all(prefixes.count(prefix) == 10 for prefix in set(prefixes))
    assert len({tuple(request.prompt) for request in requests}) == 40
    assert {len(request.prompt) for request in requests} == {9}
    with pytest.raises(DatasetError, match="num-prefixes"):
        prefix_repetition_requests(3, sizes, IDS, generator())


def test_a_chats_prompts_are_text(folder: Path) -> None:
    source = load_token_source(str(folder), None, as_text=True)
    (request,) = random_requests(1, RandomLengths(20, 4), source, generator())
    assert isinstance(request.prompt, str) and request.prompt
    with pytest.raises(ConfigurationError, match="--tokenizer"):
        TokenSource(500, as_text=True)


def test_no_special_token_is_drawn(folder: Path) -> None:
    source = load_token_source(str(folder), None)
    drawn = set(source.draw(5000, generator()))
    special = byte_level().all_special_ids
    assert len(drawn) > 100 and not drawn & set(special)


def test_the_models_vocabulary_goes_before_the_tokenizers(folder: Path, tmp_path: Path) -> None:
    tokenizers = load_token_source(str(folder), None).vocab_size
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text('{"vocab_size": 1024}')
    assert load_token_source(str(tmp_path), None).vocab_size == 1024
    assert load_token_source(str(tmp_path), 77).vocab_size == 77
    assert tokenizers not in (77, 1024)
    with pytest.raises(ConfigurationError, match="--vocab-size"):
        random_requests(1, RandomLengths(), TokenSource(None), generator())


def write_lines(path: Path, values: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(value) for value in values) + "\n")
    return path


def test_custom_prompts_come_from_lines(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "p.jsonl", [{"prompt": f"p{i}", "output_tokens": i + 1} for i in range(3)]
    )
    kept = custom_requests(path, 3, 50, generator(), shuffle=False)
    assert [(r.prompt, r.max_tokens) for r in kept] == [("p0", 50), ("p1", 50), ("p2", 50)]
    own = custom_requests(path, 5, -1, generator(), shuffle=False)
    assert [r.max_tokens for r in own] == [1, 2, 3, 1, 2]
    assert len(custom_requests(path, 5, 50, generator(), oversample=False)) == 3
    shuffled = custom_requests(path, 3, 50, generator(3))
    assert {r.prompt for r in shuffled} == {"p0", "p1", "p2"}


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "a"}, {"text": "b"}])
    with pytest.raises(DatasetError, match="Line 2 of --dataset-path"):
        custom_requests(path, 1, 5, generator())
    with pytest.raises(DatasetError, match="output_tokens"):
        custom_requests(path, 1, -1, generator())
    with pytest.raises(DatasetError, match="cannot be read"):
        custom_requests(tmp_path / "none", 1, 5, generator())
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(DatasetError, match="no prompt"):
        custom_requests(tmp_path / "empty", 1, 5, generator())


def test_sharegpts_answers_say_how_long_ours_are(folder: Path, tmp_path: Path) -> None:
    source = load_token_source(str(folder), None)
    question, answer = "What is the quick brown fox?", "The quick brown fox is numbers 12345."
    path = tmp_path / "s.json"
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    short = [{"from": "human", "value": "a"}, {"from": "gpt", "value": answer}]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": short}]))
    (request,) = sharegpt_requests(path, 1, None, source, generator(), oversample=False)
    assert request.prompt == question and request.max_tokens == source.count(answer)
    requests = sharegpt_requests(path, 9, 33, source, generator(), oversample=False)
    assert [r.max_tokens for r in requests] == [33]  # the short question is left out
    path.write_text('[{"conversations": [1, 2]}]')
    with pytest.raises(DatasetError, match="ShareGPT"):
        sharegpt_requests(path, 1, None, source, generator())
