"""A mistake on a command line is answered in one sentence, and exit code 2."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_hybrid import cli
from megatron_hybrid.arguments import (
    ArgumentParser,
    add_engine_arguments,
    engine_config_from_args,
)
from megatron_hybrid.flag_names import ALIASES, NONE, SAME, elsewhere
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
            ["--context-length", "8"],
            "--context-length is no flag here; it is called --inference-max-seq-length.",
        ),
        (["--tp", "2"], "--tp is no flag here; it is called --tensor-model-parallel-size."),
        (["--max-running-requests=2"], f" is no flag here; it is called {BATCHING}max-requests."),
        (["--max-num-seqs=2.5"], "--max-num-seqs: '2.5' is not a whole number."),
        (["--max-model-len=8q"], "--max-model-len: '8q' is not a whole number."),
        (
            ["--max-model-len=8", "--inference-max-seq-length=9"],
            "--max-model-len is 8, and --inference-max-seq-length, which it stands for, is 9;",
        ),
        (
            ["--tensor-parallel-size=2", "-tp", "4"],
            "-tp is 4, and --tensor-model-parallel-size, which it stands for, is 2; leave one",
        ),
        (
            ["--enable-prefix-caching", "--no-" + BATCHING[2:] + "prefix-caching"],
            f"--enable-prefix-caching is True, and {BATCHING}prefix-caching, which",
        ),
        (["--speculative-num-steps=2"], "it is called --num-speculative-tokens."),
        (["--disable-cuda-graph"], f"it is called {BATCHING}num-cuda-graphs 0."),
        (["--gpu-memory-utilization", "0,9"], "--gpu-memory-utilization: '0,9' is not a number."),
        (["--mem-fraction-static", ".9"], f"there is none: .*{BATCHING}buffer-size-gb"),
        (["--trust-remote-code"], "there is none: no code of a checkpoint is ever run."),
        (["Org/One", "Org/Two"], "'Org/Two' belongs to no flag; a model is named by --load, and"),
        (["--port", "x"], "--port: 'x' is not a whole number."),
        (["--port"], "--port: expected one argument."),
        (["--seed", "x"], "--seed: 'x' is not a whole number."),
        ([BATCHING + "buffer-size-gb", "1,5"], "buffer-size-gb: '1,5' is not a number."),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8' .choose from"),
        (["--kv-cache-dtype", "fp8_e5m2"], "invalid choice: 'fp8_e5m2' .* fp8_e4m3, fp8.."),
    ],
)
def test_a_mistake_is_answered_in_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    (line,) = refused(capsys, *arguments)
    assert line.startswith("serve: ") and re.search(sentence.replace("?", r"\?"), line)


def test_every_wrong_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    lines = refused(capsys, "--model-path", "x", "--port", "5", "--tp-size=2")
    assert [line.split()[1] for line in lines] == ["--model-path", "--tp-size"]


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
    assert (SAME.keys() | NONE.keys()) & ours == {*ALIASES, "--no-enable-prefix-caching"}
    assert elsewhere("--port") == (None, "")


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ("--max-model-len 8192", "inference_max_seq_length", 8192),
        ("--max-model-len 8k", "inference_max_seq_length", 8000),
        ("--max-model-len 8K", "inference_max_seq_length", 8192),
        ("--max-model-len 1.1k", "inference_max_seq_length", 1100),
        ("--max-model-len auto", "inference_max_seq_length", None),
        ("--max-model-len -1", "inference_max_seq_length", None),
        ("-tp 2", "tensor_model_parallel_size", 2),
        ("--tensor-parallel-size 2", "tensor_model_parallel_size", 2),
        ("--pipeline-parallel-size=2", "pipeline_model_parallel_size", 2),
        ("--max-num-seqs 7", "inference_dynamic_batching_max_requests", 7),
        ("--max-num-batched-tokens 1K", "inference_dynamic_batching_max_tokens", 1024),
        ("--block-size 16", "inference_dynamic_batching_block_size", 16),
        ("--no-enable-prefix-caching", "inference_dynamic_batching_prefix_caching", False),
        ("--enable-prefix-caching", "inference_dynamic_batching_prefix_caching", True),
        ("--enforce-eager", "inference_dynamic_batching_num_cuda_graphs", 0),
        ("--disable-log-stats", "inference_logging_step_interval", 0),
        ("--model x/y", "load", "x/y"),
        ("--tokenizer x", "tokenizer_model", "x"),
    ],
)
def test_a_name_of_vllms_sets_our_flag_and_says_so(
    arguments: str, field: str, value: object
) -> None:
    args = make_parser().parse_args(arguments.split())
    flag = "--" + field.replace("_", "-")
    assert getattr(args, field) == value
    said = "left out" if value is None else value
    assert args.aliases == [
        f"{re.split('[ =]', arguments)[0]} sets {flag}: {said}".replace("--no-en", "--en")
    ]
    assert getattr(engine_config_from_args(args), field) == value


def test_names_that_agree_are_taken_and_others_values_too(tmp_path: Path) -> None:
    args = make_parser().parse_args(["-tp", "2", "--tensor-model-parallel-size", "2"])
    assert engine_config_from_args(args).tensor_model_parallel_size == 2
    file = tmp_path / "options.yaml"
    file.write_text("dtype: float16\ninference_max_seq_length: 9\n")
    for name, ours in (("half", "float16"), ("float", "float32"), ("auto", None)):
        flags = ["--config", str(file), "--dtype", name, "--max-model-len", "8"]
        args = make_parser().parse_args([*flags, "--kv-cache-dtype", "fp8"])
        config = engine_config_from_args(args)
        assert (config.dtype, config.inference_max_seq_length) == (ours, 8)
        assert config.kv_cache_dtype == "fp8_e4m3"


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
