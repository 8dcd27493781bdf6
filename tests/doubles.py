"""What stands for what in tests. mypy reads this, so that no double drifts from what
it stands for."""

from __future__ import annotations

from bench import driver
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.engine.speculation import Drafter
from megatron_hybrid.execution.plan import Launched, Runner
from tests.engine.symbolic import GoodGuesses, SymbolicLaunch, SymbolicRunner
from tests.engine.unchecked import UncheckedRunner
from tests.knowing_drafter import Knowing
from tests.server.fake_engine import FakeEngine
from tests.unit.echo_engine import EchoEngine


def runners(symbolic: SymbolicRunner, unchecked: UncheckedRunner) -> list[Runner]:
    return [symbolic, unchecked]


def launched(symbolic: SymbolicLaunch) -> Launched:
    return symbolic


def drafters(symbolic: GoodGuesses, knowing: Knowing) -> list[Drafter]:
    return [symbolic, knowing]


def engine_of_a_server(fake: FakeEngine) -> DynamicInferenceEngine:
    return fake


def engine_of_a_benchmark(echo: EchoEngine) -> driver.Engine:
    return echo
