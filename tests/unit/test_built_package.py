"""What `python -m build` makes, checked and used as whoever downloads it would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

import pytest

import megatron_hybrid
from tests.thorough import thorough
from tests.unit.test_packaging import copy_of_the_repository

pytestmark = thorough


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What it prints; a failure is shown with its last lines."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a fresh environment with build and twine alone."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", folder, cwd=folder)
    python = folder / "bin" / "python"
    try:
        run(python, "-m", "pip", "install", "-q", "build", "twine", cwd=folder)
    except AssertionError as error:
        pytest.skip(f"build and twine can't be had here: {str(error)[-200:]}")
    return python


@pytest.fixture(scope="module")
def built(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with an sdist, and with a wheel that was made from it."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    copy_of_the_repository(source)
    run(python, "-m", "build", cwd=source)  # in an environment of its own
    return source / "dist"


def test_twine_finds_nothing_to_mend(python: Path, built: Path) -> None:
    files = sorted(built.iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    shown = run(python, "-m", "twine", "check", "--strict", *files, cwd=built, NO_COLOR="1")
    assert shown.count("PASSED") == 2


def test_the_wheel_serves_its_model_elsewhere(python: Path, built: Path, tmp_path: Path) -> None:
    """What it needs is borrowed from the environment that runs this."""
    (wheel,) = built.glob("*.whl")
    run(python, "-m", "pip", "install", "-q", "--no-deps", wheel, cwd=tmp_path)
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    command, alone = python.parent / "megatron-hybrid", {"PYTHONPATH": ""}
    about = json.loads(run(command, "version", "--json", cwd=tmp_path, **alone))
    assert about["megatron-hybrid"] == megatron_hybrid.__version__
    where = "import megatron_hybrid; print(megatron_hybrid.__file__)"
    assert run(python, "-c", where, cwd=tmp_path, **alone).startswith(str(packages))
    flags = ("serve", "--port", "0", "--ask", "What is the cat called?", "--exit-after-answer")
    shown = run(command, *flags, cwd=tmp_path, **alone)
    assert "Asked again: " in shown and "prompt tokens from the cache" in shown


def test_all_tests_of_the_sdist_are_found(built: Path, tmp_path: Path) -> None:
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as sdist:
        sdist.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    collect = ("-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "tests")
    shown = run(sys.executable, *collect, cwd=root, PYTHONPATH=str(root))
    assert " tests collected" in shown and "error" not in shown.splitlines()[-1]
