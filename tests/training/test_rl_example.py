"""examples/rl_on_policy.py, a few steps of it, with the model that ships with us."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.tools.test_tools import run

SCRIPT = "examples/rl_on_policy.py"
FEW = ("--prompts", 2, "--samples", 3, "--max-tokens", 12)
LINE = re.compile(r" +(\d+) +([\d.]+) +(\S+), +(\S+) +(\S+), +(\S+) +([\d.]+)")


def steps_of(output: str) -> list[list[float]]:
    """Step, reward, the trainer's difference and KL, those of transformers, seconds."""
    found = [match for line in output.splitlines() if (match := LINE.fullmatch(line))]
    return [[float(value) for value in match.groups()] for match in found]


def test_trainer_and_rollout_have_the_same_bits_while_weights_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--steps", 2, *FEW, "--learning-rate", 1e-4)
    assert run(SCRIPT, *flags, monkeypatch=monkeypatch) == 0
    steps = steps_of(capsys.readouterr().out)
    assert len(steps) == 2
    for _, reward, difference, divergence, *others, _ in steps:
        assert 0 <= reward <= 1
        assert difference == divergence == 0
        assert 0 <= others[0] < 1e-2  # other sums: close, and not always the same
    assert any(others[4] > 0 for others in steps)


def test_without_the_mode_they_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--steps", 1, *FEW, "--no-batch-invariant")
    assert run(SCRIPT, *flags, monkeypatch=monkeypatch) == 0
    assert any(difference > 0 for _, _, difference, *_ in steps_of(capsys.readouterr().out))


def test_the_reward_is_for_the_right_code_alone() -> None:
    example = runpy.run_path(str(Path(__file__).parents[2] / SCRIPT))
    task = example["Task"]([], "7315", "4821")
    said = {"It is 7315.": 1, "Noted.": 0, "7315 or 4821": 0, "4821": 0}
    assert {answer: task.reward(answer) for answer in said} == said
