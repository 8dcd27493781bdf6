"""The console script: what its help says, versions, and completion in shells."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from megatron_hybrid import __version__, cli, completion
from megatron_hybrid.commands import COMMANDS
from megatron_hybrid.versions import PACKAGES

ROOT = Path(__file__).parents[2]


def shown(capsys, *arguments):
    """What a command that is done at once prints."""
    try:
        code = cli.main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("argument", ["--help", "-h", "help"])
def test_help_has_a_line_for_every_command_and_what_a_manual_has(capsys, argument):
    text = shown(capsys, argument)
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} .* {re.escape(command.what)}$", text, re.M)
    for title in ("commands", "options", "examples", "exit codes", "environment", "documentation"):
        assert re.search(rf"^{title}:$", text, re.M)
    assert max(map(len, text.splitlines())) <= 100


def test_examples_of_help_are_right(capsys):
    text = shown(capsys, "--help")
    examples = re.findall(r"(?:^  |\| )megatron-hybrid (\w+)(.*)$", text, re.M)
    assert {name for name, _ in examples} == {"serve", "chat", "verify", "completion"}
    for name, rest in examples:
        words = re.split(r"  +| > ", rest)[0].split()
        COMMANDS[name].argument_parser().parse_args(words)


def test_pages_that_help_names_exist(capsys):
    pages = re.findall(r"docs/\w+\.md", shown(capsys, "--help"))
    assert pages and all((ROOT / page).exists() for page in pages)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_called_what_its_own_help_says(name):
    assert COMMANDS[name].argument_parser().prog == f"megatron-hybrid {name}"
    assert callable(import_module(COMMANDS[name].module).main)


def test_versions_are_those_that_are_installed(capsys):
    text = shown(capsys, "version")
    assert text.startswith(f"megatron-hybrid {__version__}, Python 3.")
    assert re.search(rf"^  torch +{re.escape(torch.__version__)}$", text, re.M)
    assert re.search(r"^  mamba-ssm +not installed$", text, re.M)


def test_versions_as_json(capsys):
    about = json.loads(shown(capsys, "version", "--json"))
    assert about["megatron-hybrid"] == __version__
    assert tuple(about["packages"]) == PACKAGES
    assert about["packages"]["torch"] == torch.__version__
    assert about["packages"]["mamba-ssm"] is None


@pytest.mark.parametrize("arguments", [["version"], ["completion", "bash"], ["chat", "--help"]])
def test_what_computes_nothing_imports_no_torch(arguments):
    code = (
        "import sys\nfrom megatron_hybrid import cli\n"
        "try: cli.main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """A shell's name to the file with its script."""
    folder = tmp_path_factory.mktemp("completion")
    parser = completion._whole_parser()
    import shtab

    for shell in completion.SHELLS:
        (folder / shell).write_text(shtab.complete(parser, shell))
    return {shell: folder / shell for shell in completion.SHELLS}


COMPLETE = """
source "$1"; shift
COMP_WORDS=(megatron-hybrid "$@"); COMP_CWORD=$#
_shtab_megatron_hybrid megatron-hybrid "${@: -1}" "${@: -2:1}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    "typed, completed",
    [
        (["ver"], ["verify", "version"]),
        (["serve", "--served"], ["--served-model-name"]),
        (["serve", "--host", "0.0.0.0", "--por"], ["--port"]),
        (["serve", "--kernels", ""], ["auto", "reference", "libraries"]),
        (["serve", "--config", "READ"], ["README.md"]),
        (["serve", "--load", "READ"], [""]),
        (["serve", "conf"], ["configs"]),
        (["chat", "--temp"], ["--temperature"]),
        (["completion", ""], ["bash", "zsh", "fish"]),
    ],
)
def test_bash_completes_commands_flags_values_and_files(scripts, typed, completed):
    done = subprocess.run(
        ["bash", "-c", COMPLETE, "complete", scripts["bash"], *typed],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == completed


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_flags_and_values(scripts):
    code = "source $argv[1]; complete -C $argv[2]"
    for typed, completed in (("serve --kern", "--kernels"), ("serve --kernels r", "reference")):
        done = subprocess.run(
            ["fish", "-c", code, scripts["fish"], f"megatron-hybrid {typed}"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.startswith(f"{completed}\t")


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_the_script_for_zsh_parses(scripts):
    subprocess.run(["zsh", "-n", scripts["zsh"]], check=True)
    assert scripts["zsh"].read_text().startswith("#compdef megatron-hybrid\n")


def test_a_shell_that_is_not_known_is_answered_with_those_that_are(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["completion", "tcsh"])
    assert ended.value.code == 2
    assert "'bash', 'zsh', 'fish'" in capsys.readouterr().err


def test_completion_without_shtab_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 2
    assert "pip install shtab" in capsys.readouterr().err
