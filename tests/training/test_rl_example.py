"""examples/rl_on_policy.py, a few steps of it: a trainer and a server of the shipped model."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.thorough import thorough
from tests.tools.test_tools import run

SCRIPT = "examples/rl_on_policy.py"
FEW = ("--prompts", 3, "--samples", 3, "--max-tokens", 10, "--test-questions", 2)
LINE = re.compile(
    r"step \d+: reward (\S+); \d+ answers trained, off by (\S+), KL (\S+)"
    r"(?: \(transformers: (\S+), (\S+)\))?; \S+ s"
)


class Shown(NamedTuple):
    """Of a step."""

    reward: float
    difference: float
    divergence: float
    of_transformers: float | None


def steps_of(output: str) -> list[Shown]:
    found = [match for line in output.splitlines() if (match := LINE.fullmatch(line))]
    return [Shown(*map(float, m.groups()[:3]), m[4] and float(m[4])) for m in found]


def test_trainer_and_rollout_have_the_same_bits_while_weights_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "reward.png"
    flags = ("--batch-invariant", "--steps", 2, *FEW, "--transformers", "--plot", picture)
    assert run(SCRIPT, *flags, "--learning-rate", 1e-4, monkeypatch=monkeypatch) == 0
    steps = steps_of(capsys.readouterr().out)
    assert len(steps) == 2
    for step in steps:
        assert 0 <= step.reward <= 1
        assert step.difference == step.divergence == 0
        assert step.of_transformers is not None and 0 <= step.of_transformers < 1e-2
    assert any(step.of_transformers for step in steps)  # other sums: not always the same
    assert picture.read_bytes().startswith(b"\x89PNG")


@thorough
def test_without_the_mode_they_differ_and_the_server_may_lend_its_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--steps", 2, *FEW, "--enable-sleep-mode")
    assert run(SCRIPT, *flags, monkeypatch=monkeypatch) == 0
    steps = steps_of(capsys.readouterr().out)
    assert len(steps) == 2 and all(0 <= step.difference < 1e-3 for step in steps)
    assert any(step.difference for step in steps)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--samples", 1), "--samples is 1; it can be 2 or more"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--dtype", "int3"), "int3"),
    ],
)
def test_wrong_flags_are_named(
    flags: tuple[object, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(SCRIPT, *flags, monkeypatch=monkeypatch) == 2
    assert words in capsys.readouterr().err


def test_answers_that_are_all_alike_teach_nothing() -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / SCRIPT))

    def group(*rewards: float, logprob: float = -1.0) -> list[object]:
        logprobs = torch.full((2,), logprob)
        return [example["Answer"]([1, 2], logprobs, reward, "0") for reward in rewards]

    worth = example["worth_training"]
    assert worth([group(1, 1), group(0, 1), group(0, 0), group(1, 0)]) == [1, 3]
    # Something is compared in every step.
    assert worth([group(1, 1), group(0, 0, logprob=-2.0), group(1, 1)]) == [1]


def test_the_loss_raises_the_better_answer() -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / SCRIPT))
    good, bad = (torch.full((2,), -1.0, requires_grad=True) for _ in range(2))
    example["loss_of"]([good, bad], torch.tensor([[1.0, 0.0]])).backward()
    assert good.grad.tolist() == [-0.125, -0.125] and bad.grad.tolist() == [0.125, 0.125]
