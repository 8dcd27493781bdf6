"""tools/measure_gpu.py: jobs that are done are not run again, and one that fails shows why."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.tiny_models import FAMILIES

ROOT = Path(__file__).parents[2]
WRITES = "import json, sys; json.dump({'engine': 1, 'results': [%s]}, open(sys.argv[1], 'w'))"
ROW = "{'workload': 'decode_1', 'steady_itl_ms': {'mean': 4.125}}"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_gpu", ROOT / "tools" / "measure_gpu.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["measure_gpu"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_job_names_files_that_are_there(tool):
    jobs = list(tool.jobs())
    assert len({job.name for job in jobs}) == len(jobs)
    for job in jobs:
        paths = [part for part in job.command if part.startswith(("tools/", "configs/", "/"))]
        assert paths and all((ROOT / path).exists() for path in paths)
    files = {str(path) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    tests = [job.command for job in jobs if job.name.startswith("tests/")]
    assert files == {part for command in tests for part in command if part.endswith(".py")}
    assert set(tool.FAMILIES) == set(FAMILIES)
    tests_alone = {job.name for job in jobs if job.alone and job.name.startswith("tests/")}
    assert tests_alone == {f"tests/{name}" for name in tool.ALONE}
    assert all(job.alone for job in jobs if not job.name.startswith("tests/"))


def test_a_job_that_is_done_is_not_run_again(tool, tmp_path, capfd):
    runs = tool.Runs(tmp_path, 60, ())
    job = tool.Job("rows/small", ("-c", WRITES % ROW, "OUT.json"))
    assert runs.run(job) and "rows/small: done" in capfd.readouterr().out
    assert json.loads((tmp_path / "rows-small.json").read_text())["engine"] == 1
    assert runs.run(job) and capfd.readouterr().out == ""
    assert "| rows-small | 4.12 |  |  |  |  |" in tool.summary(tmp_path)


def test_files_of_names_with_dots_are_not_mixed_up(tool, tmp_path, capfd):
    runs = tool.Runs(tmp_path, 60, ())
    for name in ("rows/a-3.5-b", "rows/a-3.6-b"):
        assert runs.run(tool.Job(name, ("-c", WRITES % ROW, "OUT.json")))
        assert f"{name}: done" in capfd.readouterr().out
    ends = (".done", ".json", ".log")
    expected = {f"rows-a-3.{n}-b{end}" for n in (5, 6) for end in ends}
    assert {path.name for path in tmp_path.iterdir()} == expected
    assert "| rows-a-3.5-b | 4.12 |" in tool.summary(tmp_path)


def test_a_module_of_tests_that_is_skipped_is_done(tool, tmp_path, capfd):
    """Unlike tests that none of was chosen."""
    skipped = tmp_path / "test_skipped.py"
    skipped.write_text("import pytest\npytest.skip('no such library', allow_module_level=True)\n")
    there = tmp_path / "test_there.py"
    there.write_text("def test_it(): pass\n")
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null")
    runs = tool.Runs(tmp_path / "out", 60, ())
    assert runs.run(tool.Job("tests/skipped", (*pytest, str(skipped))))
    assert "tests/skipped: done" in capfd.readouterr().out
    assert not runs.run(tool.Job("tests/other", (*pytest, str(there), "-k", "missing")))
    assert "tests/other: failed (5)" in capfd.readouterr().out
    assert not runs.run(tool.Job("other", ("-c", "raise SystemExit(5)")))


def test_a_job_that_fails_or_has_no_time_shows_what_it_said(tool, tmp_path, capfd):
    failing = tool.Job("a", ("-c", "print('it is broken'); raise SystemExit(3)"))
    assert not tool.Runs(tmp_path, 60, ()).run(failing)
    out = capfd.readouterr().out
    assert "a: failed (3)" in out and "    it is broken" in out
    slow = tool.Job("b", ("-c", "import time; print('begun', flush=True); time.sleep(60)"))
    assert not tool.Runs(tmp_path, 0.5, ()).run(slow)
    assert "b: out of time" in capfd.readouterr().out
    assert not tool.Runs(tmp_path, 0.0, ()).run(failing)
    assert "a: no time is left" in capfd.readouterr().out
    assert not list(tmp_path.glob("*.done"))
