"""What is installed and what is shipped: extras, weights, the scripts of the README."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import megatron_hybrid
from megatron_hybrid import cli
from megatron_hybrid.config import EngineConfig

ROOT = Path(__file__).parents[2]
WEIGHTS = ROOT / "megatron_hybrid" / "reference_model" / "weights"
SHELL_SCRIPTS = [ROOT / ".ci" / "run", *sorted((ROOT / "tools").glob("*.sh"))]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """A wheel and an sdist, built from a copy so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    source.mkdir()
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("megatron_hybrid", "tools", "configs", "docs", "examples"):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
        )
    out = source / "dist"
    build = subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "-d", str(out), "bdist_wheel", "-d", str(out)],
        cwd=source,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert build.returncode == 0, build.stderr[-4000:]
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def wheel_names(distributions):
    with zipfile.ZipFile(distributions[0]) as wheel:
        return set(wheel.namelist())


@pytest.fixture(scope="module")
def metadata(distributions, wheel_names):
    (name,) = (n for n in wheel_names if n.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(distributions[0]) as wheel:
        return wheel.read(name).decode()


def _requirements(metadata, extra=None):
    """Names of what the base (or one extra) requires."""
    names = set()
    for requirement in re.findall(r"^Requires-Dist: (.+)$", metadata, re.M):
        found = re.search(r"extra == \"(.+?)\"", requirement)
        if (found.group(1) if found else None) == extra:
            names.add(re.match(r"[A-Za-z0-9._-]+", requirement).group())
    return names


def test_the_wheel_holds_the_reference_models_weights(wheel_names):
    shipped = [p for p in WEIGHTS.rglob("*") if p.is_file()]
    assert any(p.suffix == ".safetensors" for p in shipped)
    for path in shipped:
        assert path.relative_to(ROOT).as_posix() in wheel_names


def test_the_sdist_holds_the_reference_models_weights_and_the_tools(distributions):
    with tarfile.open(distributions[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    for path in [*WEIGHTS.glob("*.safetensors"), ROOT / "tools" / "run_tests.sh"]:
        assert path.relative_to(ROOT).as_posix() in names


def test_the_wheel_holds_every_module_and_nothing_else(wheel_names):
    modules = {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "megatron_hybrid").rglob("*.py")
        if "__pycache__" not in p.parts
    }
    assert modules <= wheel_names
    assert {n for n in wheel_names if n.endswith(".py")} == modules


def test_non_python_files_of_the_server_are_shipped(wheel_names):
    for path in (ROOT / "megatron_hybrid" / "server").rglob("*"):
        if path.is_file() and path.suffix in {".html", ".css", ".js", ".svg"}:
            assert path.relative_to(ROOT).as_posix() in wheel_names


def test_what_compiles_against_cuda_is_in_the_gpu_extra_alone(metadata):
    compiles = {"mamba-ssm", "causal-conv1d", "transformer-engine", "flashinfer-python"}
    # Triton is a wheel; megatron-core imports it on Python 3.12.
    assert _requirements(metadata, "gpu") == compiles | {"triton"}
    for extra in (None, "test", "dev"):
        assert not _requirements(metadata, extra) & compiles


def test_the_base_has_what_the_server_needs(metadata):
    assert _requirements(metadata) >= {
        "torch",
        "megatron-core",
        "transformers",
        "safetensors",
        "flask",
        "pyzmq",
        "msgspec",
        "prometheus-client",
        "gunicorn",
        "gevent",
        "llguidance",
    }


def test_an_installed_cpu_build_of_torch_is_kept(metadata):
    assert re.search(r"^Requires-Dist: torch<2\.14,>=2\.11$", metadata, re.M)


def test_flash_linear_attention_is_not_among_what_the_tests_install(metadata):
    assert "flash-linear-attention" not in metadata


def test_the_console_script_is_installed_and_names_a_function(distributions, wheel_names):
    (name,) = (n for n in wheel_names if n.endswith(".dist-info/entry_points.txt"))
    with zipfile.ZipFile(distributions[0]) as wheel:
        text = wheel.read(name).decode()
    target = re.search(r"^megatron-hybrid = (\S+):(\S+)$", text, re.M)
    assert target is not None
    assert callable(getattr(importlib.import_module(target.group(1)), target.group(2)))


def test_the_console_script_hands_the_flags_on(monkeypatch):
    from megatron_hybrid.server import cli as server_cli

    monkeypatch.setattr(server_cli, "main", lambda argv: len(argv))
    assert cli.main(["serve", "--port", "1"]) == 2


def test_the_console_script_names_the_commands_it_knows(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["sevre"])
    assert ended.value.code == 2
    assert "serve" in capsys.readouterr().err


def test_the_version_is_one_and_the_same(metadata):
    assert f"\nVersion: {megatron_hybrid.__version__}\n" in metadata


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda p: p.name)
def test_shell_scripts_parse_and_are_executable(script):
    subprocess.run(["bash", "-n", script], check=True)
    if script.name != "environment.sh":  # sourced
        assert os.access(script, os.X_OK)


def test_a_wrong_interpreter_is_explained(tmp_path):
    for name in ("python3", "python3.11", "python3.12", "python"):
        fake = tmp_path / "bin" / name
        fake.parent.mkdir(exist_ok=True)
        fake.write_text("#!/bin/sh\nexit 1\n")
        fake.chmod(0o755)
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    done = subprocess.run(
        [shutil.which("bash"), tmp_path / "tools" / "run_tests.sh"],
        env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "Python 3.11 or 3.12" in done.stderr
    assert not (tmp_path / ".venv").exists()


FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
-m\\ venv\\ *) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
-m\\ pip\\ *--upgrade*) ;;
-m\\ pip\\ *) printf '%s\\n' "$PIP_SAYS"; exit "$PIP_STATUS" ;;
*) exec REAL "$@" ;;
esac
"""


@pytest.mark.parametrize("status", [0, 1])
def test_an_installation_says_how_far_it_is_and_why_it_failed(tmp_path, status):
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copy(ROOT / "setup.py", tmp_path)
    fake = tmp_path / "fake"
    fake.write_text(FAKE_PYTHON.replace("REAL", sys.executable))
    fake.chmod(0o755)
    says = [
        "WARNING: somebody runs pip as root",
        "Collecting torch<2.14 (from here)",
        "  Downloading torch-2.11.whl (800 MB)",
        "Installing collected packages: sympy, torch",
        *(["ERROR: the disk is full", "  of wheels"] if status else []),
    ]
    script = (
        'set -euo pipefail; . tools/environment.sh; PROGRESS_SECONDS=0; ensure_environment "$@"'
    )
    command = [shutil.which("bash"), "-c", script]
    variables = {"PYTHON": str(fake), "PIP_SAYS": "\n".join(says), "PIP_STATUS": str(status)}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, (tmp_path / ".venv" / ".installed").exists()) == (status, not status)
    steps = re.findall(r"^   0:0\d  (.*)$", done.stdout, re.M)
    assert list(dict.fromkeys(steps)) == [
        "starting",
        "looking for torch<2.14",
        "downloading torch-2.11.whl (800 MB)",
        "installing what was downloaded",
    ]
    failure = "ERROR: the disk is full\n  of wheels\nThe installation failed; pip's message above"
    assert done.stderr.startswith(failure) if status else done.stderr == ""


def test_ci_runs_the_readmes_second_command():
    assert "tools/run_tests.sh" in (ROOT / ".ci" / "run").read_text()
    assert "tools/run_tests.sh" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_configs_are_accepted(path):
    assert EngineConfig.from_yaml(path) != EngineConfig()


def test_every_package_is_on_the_page_that_explains_them():
    page = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "megatron_hybrid"
    folders = {p.parent.relative_to(package).as_posix() for p in package.rglob("__init__.py")}
    assert len(folders) > 10
    assert [folder for folder in folders - {"."} if f"`{folder}/`" not in page] == []


def test_modules_on_the_page_that_explains_them_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    modules = {
        p.name for top in ("megatron_hybrid", "tools", "tests") for p in (ROOT / top).rglob("*.py")
    }
    named = set(re.findall(r"`(?:\w+/)*(\w+\.py)`", page))
    assert named and named <= modules, f"not there: {sorted(named - modules)}"


def test_a_newcomers_reading_fits_into_a_day():
    (text,) = re.findall(
        r"^A newcomer reads (.*?) and then", (ROOT / "README.md").read_text(), re.M | re.S
    )
    files = [ROOT / "megatron_hybrid" / name for name in re.findall(r"`([\w/]+\.py)`", text)]
    assert len(files) > 4
    assert sum(len(file.read_text().splitlines()) for file in files) <= 2500


def test_links_between_pages_lead_somewhere():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_pre_commit_runs_what_ci_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    ci = (ROOT / "tools" / "run_tests.sh").read_text()
    for command in ("ruff check", "ruff format", "mypy"):
        assert f"step {command}" in ci
        assert any(hook["entry"].startswith(command) for hook in hooks)
