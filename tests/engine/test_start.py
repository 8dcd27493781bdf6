"""What a start need not import, it does not: torch alone takes most of its seconds. And where they
go is known."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from megatron_hybrid import EngineConfig
from megatron_hybrid.engine.build import build_engine
from megatron_hybrid.engine.start import StartTimes, process_age

START = """
import sys
from megatron_hybrid import LLM
LLM(device="cpu")
costly = {"megatron", "transformers", "triton", "scipy", "llguidance"} & sys.modules.keys()
assert not costly, costly
"""


def test_one_rank_starts_without_what_only_others_need() -> None:
    """megatron-core: with several ranks; transformers: with the first text; triton: on a GPU."""
    subprocess.run([sys.executable, "-c", START], check=True)


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_parts_of_a_start_add_up_to_all_of_it() -> None:
    clock = Clock()
    start = StartTimes(98.0, clock)
    for name, seconds in (("imports", 1.0), ("weights", 5.0), ("imports", 0.25), ("none", 0.0)):
        clock.now += seconds
        start.end_part(name)
    assert start.parts == {"imports": 3.25, "weights": 5.0, "none": 0.0}
    assert start.total == sum(start.parts.values()) == 8.25
    assert start.describe() == "started in 8.2 s: imports 3.2, weights 5.0"


def test_a_process_knows_its_age() -> None:
    code = "from megatron_hybrid.engine.start import process_age; print(process_age())"
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE)
    seen = time.monotonic() - begun
    assert 0 < float(done.stdout) <= seen + 0.05  # the system counts in hundredths
    assert process_age() > seen


def test_an_engine_says_what_its_start_took(caplog: pytest.LogCaptureFixture) -> None:
    start = StartTimes(time.monotonic() - 60)
    with caplog.at_level("INFO", "megatron_hybrid.engine.build"):
        engine = build_engine(EngineConfig(device="cpu"), start=start)
    found = engine.stats()["start_seconds"]
    assert list(found)[:3] == ["imports", "device and libraries", "weights"]
    assert found["imports"] >= 60 and sum(found.values()) == pytest.approx(start.total)
    (line,) = [line for line in caplog.messages if line.startswith("started in 6")]
    assert "imports 60." in line
