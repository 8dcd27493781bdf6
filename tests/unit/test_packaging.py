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
SHELL_SCRIPTS = [ROOT / ".ci" / "run", *sorted((ROOT / "tools").glob("*.sh"))]


GENERATED = re.compile(r"PKG-INFO|setup\.cfg|megatron_hybrid\.egg-info/.*")  # by an sdist


def copy_of_the_repository(target):
    """So that the checkout stays clean. The names of the files."""
    if (ROOT / ".git").exists():
        list_files = "git ls-files -z --cached --others --exclude-standard".split()
        listed = subprocess.run(list_files, cwd=ROOT, capture_output=True, text=True, check=True)
        names = {name for name in listed.stdout.split("\0") if (ROOT / name).is_file()}
    else:  # we are in an sdist, which says what was in it
        listed = (ROOT / "megatron_hybrid.egg-info" / "SOURCES.txt").read_text()
        names = {name for name in listed.splitlines() if not GENERATED.fullmatch(name)}
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target / name)
    return names


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A copy of the repository, and the names of its files."""
    source = tmp_path_factory.mktemp("source") / "checkout"
    return source, copy_of_the_repository(source)


@pytest.fixture(scope="module")
def distributions(sources):
    """A wheel and an sdist."""
    source, _ = sources
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


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel_names, sources):
    package = {name for name in sources[1] if name.startswith("megatron_hybrid/")}
    assert {name for name in wheel_names if ".dist-info/" not in name} == package
    assert {"megatron_hybrid/py.typed", "megatron_hybrid/kernels/linear/fp4_few.cu"} <= package
    for kind in (".safetensors", ".html", ".css", ".js"):
        assert any(name.endswith(kind) for name in package)


def test_the_sdist_holds_every_file_of_the_repository(distributions, sources):
    with tarfile.open(distributions[1]) as sdist:
        names = {one.name.partition("/")[2] for one in sdist if one.isfile()}
    assert {name for name in names if not GENERATED.fullmatch(name)} == sources[1]


def test_what_compiles_against_cuda_is_in_the_gpu_extra_alone(metadata):
    compiles = {"mamba-ssm", "causal-conv1d", "transformer-engine", "flashinfer-python"}
    # Triton is a wheel; megatron-core imports it on Python 3.12.
    assert _requirements(metadata, "gpu") == compiles | {"triton"}
    assert _requirements(metadata, "flashinfer") == {"flashinfer-python"}
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
