"""EngineConfig, flags and files name the same options and refuse the same mistakes."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_hybrid.arguments import add_engine_arguments, engine_config_from_args
from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import ConfigurationError

BLOCK = "inference_dynamic_batching_block_size"
BUFFER = "inference_dynamic_batching_buffer_size_gb"
STATES = "inference_dynamic_batching_prefix_caching_mamba_gb"
INTERVAL = "inference_dynamic_batching_prefix_caching_checkpoint_interval"
EXACT_ENDS = "inference_dynamic_batching_prefix_caching_exact_ends"


def parse(*arguments: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    return engine_config_from_args(parser.parse_args(arguments))


def test_no_flags_give_the_defaults():
    assert parse() == EngineConfig()


def test_every_field_is_a_flag_and_documented():
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    flags = set(parser._option_string_actions)
    for option in fields(EngineConfig):
        assert "--" + option.name.replace("_", "-") in flags
        assert option.metadata["help"]
    assert "--no-inference-dynamic-batching-prefix-caching" in flags
    assert "--no-inference-dynamic-batching-prefix-caching-exact-ends" in flags


def test_exact_ends_replay_cost_and_states_at_intervals_are_the_default():
    config = parse()
    assert getattr(config, EXACT_ENDS) is True and getattr(config, INTERVAL) == 1024
    policy = "inference_dynamic_batching_prefix_caching_eviction_policy"
    assert getattr(config, policy) == "replay_cost"
    off = parse("--no-" + EXACT_ENDS.replace("_", "-"), "--" + INTERVAL.replace("_", "-"), "0")
    assert getattr(off, EXACT_ENDS) is False and getattr(off, INTERVAL) == 0


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("inference-dynamic-batching-block-size: 32\nseed: 7\n")
    config = parse("--config", str(path), "--seed", "9")
    assert getattr(config, BLOCK) == 32 and config.seed == 9
    assert EngineConfig.from_yaml(path, seed=1).seed == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({BLOCK: 0}, "block-size is 0"),
        ({BLOCK: "64"}, "block-size is '64'"),
        ({"seed": True}, "--seed is True"),
        ({"dtype": "int8"}, "--dtype is 'int8'; it must be one of float32"),
        ({"inference_dynamic_batching_buffer_size_gb": -1}, "buffer-size-gb is -1"),
        ({"pipeline_model_parallel_size": 0}, "--pipeline-model-parallel-size is 0"),
        ({"inference_logging_step_interval": -1}, "logging-step-interval is -1"),
        (
            {"inference_dynamic_batching_prefix_caching_eviction_policy": "fifo"},
            "one of ref_zero, lru",
        ),
        ({INTERVAL: -1}, "checkpoint-interval is -1; it must be 0 .none. or more"),
        ({EXACT_ENDS: "yes"}, "exact-ends is 'yes'"),
        ({"kernels": "fast"}, "--kernels is 'fast'; it must be one of auto, reference"),
        ({"inference_dynamic_batching_num_cuda_graphs": -2}, "num-cuda-graphs is -2"),
        ({"mamba_inference_state_write_interval": 17}, "it must be at most 16"),
        ({"mamba_inference_state_write_interval": 0}, "it must be at least 1"),
        (
            {"inference_dynamic_batching_cuda_graph_mixed_prefill_count": -1},
            "mixed-prefill-count is -1",
        ),
        (
            {
                "inference_dynamic_batching_max_requests": 9,
                "inference_dynamic_batching_max_tokens": 8,
            },
            "must be at least --inference-dynamic-batching-max-requests, which is 9",
        ),
        ({BUFFER: float("nan")}, "buffer-size-gb is nan; it must be a finite number"),
        ({BUFFER: float("inf")}, "buffer-size-gb is inf; it must be a finite number"),
        ({BUFFER: -float("inf")}, "buffer-size-gb is -inf; it must be more than 0"),
        ({BUFFER: 1.7e308}, "buffer-size-gb is 1.7e.308; it must be at most 1073741824"),
        ({STATES: float("nan")}, "mamba-gb is nan; it must be a finite number"),
        ({STATES: -float("inf")}, "mamba-gb is -inf; it must be a finite number"),
        ({STATES: -1}, "mamba-gb is -1; it must be 0 .none. or more"),
        ({BLOCK: 10**12}, "block-size is 1000000000000; it must be at most 1048576"),
        ({"inference_dynamic_batching_max_requests": 10**9}, "it must be at most 65536"),
        ({"inference_dynamic_batching_max_tokens": 10**10}, "it must be at most 16777216"),
        ({"inference_max_seq_length": 2**70}, "it must be at most 2147483647"),
        ({"seed": 2**64}, "it must be at most 18446744073709551615"),
        ({"seed": -(10**5000)}, "--seed is a number of 16610 bits; it must be at least -9223"),
        ({"seed": float("inf")}, "--seed is inf; it must be of type int"),
        ({"no_such_option": 1}, "'no_such_option', which is not an option"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(values, message):
    with pytest.raises(ConfigurationError, match=message):
        EngineConfig.from_mapping(values, "here")


def test_every_number_has_limits():
    for option in fields(EngineConfig):
        if str(option.type).split(" ")[0] in ("int", "float"):
            for value in (option.metadata["most"] + 1, option.metadata["least"] - 1):
                with pytest.raises(ConfigurationError, match=option.name.replace("_", "-")):
                    EngineConfig(**{option.name: value})


@pytest.mark.parametrize(
    "text",
    [
        "a: [", "- 1\n", "nope: 1\n", "1: 2\n", "seed: " + "9" * 5000, "seed: 2020-99-99\n",
        "load: \xff\n", "a: " + "[" * 5000,
    ],
)  # fmt: skip
def test_a_bad_file_is_refused_by_name(tmp_path: Path, text: str):
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigurationError, match="bad.yaml"):
        parse("--config", str(path))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        parse("--config", str(tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("max-model-len: 8192", "inference_max_seq_length", 8192),
        ("max_model_len: 8K", "inference_max_seq_length", 8192),
        ("max_model_len: auto", "inference_max_seq_length", None),
        ("max_model_len: -1", "inference_max_seq_length", None),
        ("tensor_parallel_size: 2", "tensor_model_parallel_size", 2),
        ("tp: 2", "tensor_model_parallel_size", 2),
        ("max-num-seqs: 7", "inference_dynamic_batching_max_requests", 7),
        ("enable-prefix-caching: false", "inference_dynamic_batching_prefix_caching", False),
        ("no-enable-prefix-caching: true", "inference_dynamic_batching_prefix_caching", False),
        ("enforce-eager: true", "inference_dynamic_batching_num_cuda_graphs", 0),
        ("model: some-one/Small", "load", "some-one/Small"),
    ],
)
def test_vllms_names_in_a_file_set_ours_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, field: str, value: object
):
    path = tmp_path / "c.yaml"
    path.write_text(text + "\n")
    with caplog.at_level("INFO", "megatron_hybrid"):
        assert getattr(EngineConfig.from_yaml(path), field) == value
    flag, said = "--" + field.replace("_", "-"), "left out" if value is None else value
    name = text.split(":")[0].replace("-", "_")
    (record,) = caplog.records
    assert record.getMessage() == f"--config {path}: {name} sets {flag}: {said}"
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    args = parser.parse_args(["--config", str(path)])
    assert getattr(engine_config_from_args(args), field) == value
    assert args.aliases == [record.getMessage()]


def test_a_file_may_have_vllms_values_and_what_it_switches_off(tmp_path: Path):
    (tmp_path / "m").mkdir()
    path = tmp_path / "c.yaml"
    path.write_text("dtype: half\nkv-cache-dtype: fp8\nenforce-eager: false\nmodel: m\n")
    config = EngineConfig.from_yaml(path)
    assert (config.dtype, config.kv_cache_dtype) == ("float16", "fp8_e4m3")
    assert config.inference_dynamic_batching_num_cuda_graphs == 16
    assert config.load == str(tmp_path / "m")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_model_len": 8, "inference-max-seq-length": 9}, "sets max_model_len to 8, and infer"),
        ({"tp": 2, "tensor_parallel_size": 4}, "sets tp to 2, and tensor_model_parallel_size, wh"),
        ({"max_model_len": "8q"}, "--inference-max-seq-length is '8q'; it must be of type int"),
        ({"enforce_eager": 1}, "sets enforce_eager to 1; it must be true or false"),
        ({"trust-remote-code": True}, "'trust-remote-code', which is not an option: no code of a"),
        ({"page_size": 16}, f"is not an option; it is called --{BLOCK.replace('_', '-')}"),
    ],
)
def test_mistakes_in_vllms_names_are_refused_in_a_sentence(values, message):
    with pytest.raises(ConfigurationError, match=message):
        EngineConfig.from_mapping(values, "here")


def test_what_a_file_says_has_the_same_limits(tmp_path: Path):
    path = tmp_path / "c.yaml"
    for text, words in ((".nan", "is nan; it must be a finite"), (".inf", "is inf; it must be a")):
        path.write_text(f"{BUFFER}: {text}\n")
        with pytest.raises(ConfigurationError, match=words):
            parse("--config", str(path))


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("configs/*.yaml")))
def test_the_shipped_files_are_valid(path: Path):
    EngineConfig.from_yaml(path)


def test_a_files_model_is_looked_for_beside_the_file(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("load: models/m\n")
    assert parse("--config", str(path)).load == str(tmp_path / "models" / "m")
    assert parse("--config", str(path), "--load", "n").load == "n"  # a flag's is as it is
    path.write_text("load: /models/m\n")
    assert EngineConfig.from_yaml(path).load == "/models/m"


def test_a_model_that_a_shipped_file_names_is_shipped_too():
    for path in Path(__file__).parents[2].glob("configs/*.yaml"):
        load = EngineConfig.from_yaml(path).load
        assert load is None or (Path(load) / "config.json").is_file()
