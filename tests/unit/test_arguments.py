"""A mistake on a command line is answered in one sentence, and exit code 2."""

from __future__ import annotations

import re

import pytest

from megatron_hybrid import cli
from megatron_hybrid.arguments import ArgumentParser, add_engine_arguments
from megatron_hybrid.flag_names import NONE, SAME, elsewhere
from megatron_hybrid.server.cli import add_server_arguments

BATCHING = "--inference-dynamic-batching-"


def make_parser() -> ArgumentParser:
    """The server's."""
    parser = ArgumentParser(prog="serve")
    add_engine_arguments(parser)
    add_server_arguments(parser)
    return parser


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The lines that it prints."""
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(arguments)
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert not printed.out
    return printed.err.splitlines()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prot", "1"], "--prot is no flag; did you mean --port?"),
        (["--http-con=7"], "--http-con is no flag; did you mean --http-connections?"),
        (["--max_queue", "7"], "--max_queue is no flag here; it is called --max-queue."),
        (["--qwertz"], "--qwertz is no flag; --help lists all."),
        (
            ["--max-model-len", "8"],
            "--max-model-len is no flag here; it is called --inference-max-seq-length.",
        ),
        (["-tp", "2"], "-tp is no flag here; it is called --tensor-model-parallel-size."),
        (["--max-num-seqs=2"], f"--max-num-seqs is no flag here; it is called {BATCHING}max-req"),
        (["--speculative-num-steps=2"], "it is called --num-speculative-tokens."),
        (["--enforce-eager"], f"it is called {BATCHING}num-cuda-graphs 0."),
        (["--gpu-memory-utilization", ".9"], "no flag here, and there is none: what is free is"),
        (["--mem-fraction-static", ".9"], f"there is none: .*{BATCHING}buffer-size-gb"),
        (["--trust-remote-code"], "there is none: no code of a checkpoint is ever run."),
        (["Org/One", "Org/Two"], "'Org/Two' belongs to no flag; a model is named by --load, and"),
        (["--port", "x"], "--port: 'x' is not a whole number."),
        (["--port"], "--port: expected one argument."),
        (["--seed", "x"], "--seed: 'x' is not a whole number."),
        ([BATCHING + "buffer-size-gb", "1,5"], "buffer-size-gb: '1,5' is not a number."),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8' .choose from"),
    ],
)
def test_a_mistake_is_answered_in_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    (line,) = refused(capsys, *arguments)
    assert line.startswith("serve: ") and re.search(sentence.replace("?", r"\?"), line)


def test_every_wrong_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    lines = refused(capsys, "--model", "x", "--port", "5", "--tp-size=2")
    assert [line.split()[1] for line in lines] == ["--model", "--tp-size"]


def test_an_abbreviation_is_not_taken_for_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = refused(capsys, BATCHING + "block", "16")
    assert line.endswith(f"did you mean {BATCHING}block-size?")


def test_a_wrong_flag_comes_before_one_that_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    parser.add_argument("--prompts-file", required=True)
    with pytest.raises(SystemExit):
        parser.parse_args(["--prompt-file", "x"])
    assert "did you mean --prompts-file?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert "are required: --prompts-file" in capsys.readouterr().err


def test_values_may_look_like_flags() -> None:
    args = make_parser().parse_args(["--seed", "-5", "--ask", "--what is -this?", "--system=--x"])
    assert (args.seed, args.ask, args.system) == (-5, "--what is -this?", "--x")
    parser = ArgumentParser()
    parser.add_argument("words", nargs="*")
    assert parser.parse_args(["a", "--", "--b"]).words == ["a", "--b"]


def test_other_engines_names_lead_to_flags_that_are_there() -> None:
    ours = set(make_parser()._option_string_actions)
    for theirs, flag in SAME.items():
        assert flag.split()[0] in ours, theirs
    assert not (SAME.keys() | NONE.keys()) & ours
    assert elsewhere("--port") == (None, "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["srve"], "there is no command 'srve'; did you mean serve?"),
        ([], "name a command first: `megatron-hybrid serve"),
        (["--load", "x"], "name a command first"),
    ],
)
def test_a_command_that_is_not_there(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
