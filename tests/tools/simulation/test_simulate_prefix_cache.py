"""The tool runs from end to end, and its figures hang together."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from simulation import pools, sweep
from simulation.plots import load_matplotlib
from tests.thorough import thorough

TOOL = Path(__file__).parents[3] / "tools" / "simulate_prefix_cache.py"


def run(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", [str(TOOL), *map(str, flags)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TOOL), run_name="__main__")
    return ended.value.code


def test_a_sweep_prints_tables_and_writes_json(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.json"
    flags = "--trace shared chat --requests 150 --pool-sizes 20 100 --splits 50 80".split()
    assert run(monkeypatch, *flags, "--policies", "block-lru", "--json", out) == 0
    printed = capsys.readouterr().out
    assert "oracle" in printed and "us/step" in printed
    results = json.loads(out.read_text())
    assert len(results["references"]) == 2
    assert len(results["outcomes"]) == 2 * 2 * 2
    for reference in results["references"]:
        assert reference["unlimited"]["requests"] == 150
        assert reference["working_set"] > 0
        assert 0 < reference["oracle_share"] < 1
    bound = {r["workload"]["trace"]: r["oracle_share"] for r in results["references"]}
    for outcome in results["outcomes"]:
        assert outcome["skipped_share"] <= bound[outcome["cell"]["workload"]["trace"]]


def test_pools_may_be_given_in_bytes(monkeypatch, capsys):
    flags = "--trace shared --requests 50 --pool-gib 20 --splits 50 --policies marconi".split()
    assert run(monkeypatch, *flags) == 0
    assert "20 GiB" in capsys.readouterr().out


def test_the_best_split_is_reported():
    workload = sweep.Workload("shared", 100, 1)
    reference = sweep.measure_reference(workload)
    pool = sweep.Pool(reference.working_set, "all")
    cells = sweep.cells(reference, ["block-lru"], [pool], [0.3, 0.9])
    outcomes = [sweep.run_cell(cell) for cell in cells]
    (best,) = sweep.best_splits(outcomes)
    assert best.skipped_share == max(o.skipped_share for o in outcomes)


def test_a_pool_that_is_too_small_is_told_from_a_bad_result():
    cell = sweep.Cell(sweep.Workload("chat", 10, 1), "block-lru", sweep.Pool(2**27, "tiny"), 0.5)
    outcome = sweep.run_cell(cell)
    assert outcome.result is None and outcome.skipped_share == 0


@thorough
def test_states_in_int8_are_more_and_skip_more_of_a_small_pool():
    shape, pool = pools.SHAPES["nemotron-h-8b"], 30 * 2**30
    exact, packed = (pools.divide_pool(shape, pool, 0.5, cached_dtype=d) for d in (None, "int8"))
    # 24 layers of 128 heads of 64 x 128, with a window of 10,240 channels and a scale a column
    assert packed.bytes_per_packed_state == 24 * (128 * 128 * (64 + 4) + 10240 * 3 * 2)
    used = packed.num_cached_slots * packed.bytes_per_packed_state
    used += packed.num_full_slots * packed.bytes_per_state
    used += packed.num_blocks * packed.bytes_per_block
    assert 0.999 * pool < used <= pool
    assert packed.num_cached_slots > 3.5 * exact.num_cached_slots
    workload, small = sweep.Workload("shared", 300, 1), sweep.Pool(8 * 2**30, "8 GiB")
    cells = [
        sweep.Cell(workload, name, small, split)
        for name in ("ours", "ours-int8")
        for split in (0.3, 0.5)  # cheaper states leave more of the pool to KV
    ]
    best = sweep.best_splits(map(sweep.run_cell, cells))
    assert [outcome.cell.policy for outcome in best] == ["ours", "ours-int8"]
    assert best[1].skipped_share > best[0].skipped_share + 0.02


def test_plots_are_drawn_or_matplotlib_is_asked_for(monkeypatch, tmp_path, capsys):
    flags = "--trace shared --requests 60 --pool-sizes 50 100 --splits 70".split()
    try:
        load_matplotlib()
    except ImportError:
        assert run(monkeypatch, *flags, "--plot", tmp_path) == 1
        assert "pip install matplotlib" in capsys.readouterr().err
    else:
        assert run(monkeypatch, *flags, "--plot", tmp_path) == 0
        assert {path.suffix for path in tmp_path.iterdir()} == {".png"}
        assert len(list(tmp_path.iterdir())) == 2


@thorough
def test_host_memory_behind_a_small_pool_skips_more():
    workload = sweep.Workload("agents", 300, 1)
    reference = sweep.measure_reference(workload)
    pool = sweep.Pool(reference.working_set // 50, "small")
    found = map(sweep.run_cell, sweep.cells(reference, ["ours"], [pool], [0.5], [0.0, 4.0, 60.0]))
    without, some, all_of_it = (outcome.skipped_share for outcome in found)
    assert without + 0.05 < some < all_of_it <= reference.oracle_share
    assert all_of_it > 0.98 * reference.unlimited.skipped_share


def test_host_memory_has_rows_of_its_own(monkeypatch, capsys):
    flags = "--trace shared --requests 50 --pool-gib 20 --splits 50 --policies ours".split()
    assert run(monkeypatch, *flags, "--host-memory", 0, 2) == 0
    assert "ours, host x2" in capsys.readouterr().out
    assert run(monkeypatch, "--host-memory", -1) == 2
