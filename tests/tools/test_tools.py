"""The tools and examples do what their first lines say, with the model that ships with us."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.thorough import thorough, usually

ROOT = Path(__file__).parents[2]


def run(script, *flags, monkeypatch):
    """Runs a script in this process; its exit code. A process of its own takes 5 s to start."""
    monkeypatch.setattr(sys, "argv", [str(ROOT / script), *map(str, flags)])
    try:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    except SystemExit as ended:
        return ended.code or 0
    return 0


@pytest.fixture(scope="module")
def offline_inference():
    path = ROOT / "tools" / "offline_inference.py"
    spec = importlib.util.spec_from_file_location("offline_inference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------ offline inference


def test_every_line_is_answered_in_its_order(tmp_path, monkeypatch):
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        "The code of the gate is",
        [20, 21, 22],
        {"prompt": "The cat", "max_tokens": 2, "ignore_eos": True},
        {"messages": [{"role": "user", "content": "My name is Anna. What is my name?"}]},
    ]
    prompts.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    flags = ("--prompts-file", prompts, "--output", output, "--max-tokens", 4, "--ignore-eos")
    assert run("tools/offline_inference.py", *flags, monkeypatch=monkeypatch) == 0
    answers = [json.loads(line) for line in output.read_text().splitlines()]
    assert [len(answer["token_ids"]) for answer in answers] == [4, 4, 2, 4]
    assert answers[1]["prompt_tokens"] == 3
    assert {answer["finish_reason"] for answer in answers} == {"length"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("7", "a string, a list of token ids or an object"),
        ('{"max_tokens": 3}', "exactly one of prompt"),
        ('{"prompt": "a", "messages": []}', "exactly one of prompt"),
        ('{"prompt": "a", "temprature": 1}', "'temprature'"),
        ('{"prompt": 7}', "prompt must be a string"),
        ("[1, true]", "whole numbers"),
        ('{"prompt": "a", "temperature": -1}', "temperature is -1"),
    ],
)
def test_a_wrong_line_is_named_before_a_model_is_loaded(line, words, tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "in.jsonl"
    prompts.write_text(line)
    flags = ("--prompts-file", prompts, "--load", "/nowhere")
    assert run("tools/offline_inference.py", *flags, monkeypatch=monkeypatch) == 2
    assert words in capsys.readouterr().err


def test_a_lines_own_parameters_win(offline_inference):
    kind, prompt, own = offline_inference._read_line(1, '{"prompt": "a", "stop": "b", "seed": 3}')
    assert (kind, prompt, own) == ("prompt", "a", {"stop": ("b",), "seed": 3})


def test_a_missing_file_is_a_sentence(monkeypatch, capsys):
    flags = ("--prompts-file", "/nowhere.jsonl")
    assert run("tools/offline_inference.py", *flags, monkeypatch=monkeypatch) == 2
    assert "/nowhere.jsonl" in capsys.readouterr().err


# ------------------------------------------------------------------------- benchmarks


@thorough
def test_every_workload_gives_its_figures(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    flags = ("--scale", 0.004, "--json", out)
    assert run("tools/benchmark_offline.py", *flags, monkeypatch=monkeypatch) == 0
    report = json.loads(out.read_text())
    assert len(report["results"]) == 8
    for result in report["results"]:
        assert result["computed_tokens"] + result["cached_tokens"] == result["prompt_tokens"]
        assert result["output_tok_s"] > 0
        assert result["ttft_s"].keys() == result["itl_ms"].keys() == {"mean", "p50", "p95"}
        assert result["peak_memory"]["host_mib"] > 0
        assert len(result["digest"]) == 16
    (resumed,) = (r for r in report["results"] if r["workload"] == "long_resume")
    assert resumed["rounds"][1]["cached_tokens"] > 0
    assert report["versions"]["torch"]
    assert "--scale 0.004" in report["command"]


@thorough
def test_pairs_compare_the_same_work_with_and_without_caching(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    flags = ("--workload", "long_resume", "--scale", 0.004, "--compare", "prefix-caching")
    more = ("--pairs", 2, "--json", out)
    assert run("tools/benchmark_offline.py", *flags, *more, monkeypatch=monkeypatch) == 0
    (result,) = json.loads(out.read_text())["results"]
    assert result["cached_tokens"] > 0
    for ratio in (result["wall_ratio_on_over_off"], result["cpu_ratio_on_over_off"]):
        assert len(ratio["all"]) == 2
        assert ratio["min"] <= ratio["median"] <= ratio["max"]


@thorough
def test_what_a_workload_left_is_there_in_the_next_one(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    flags = ("--workload", "shared_system,shared_system", "--scale", 0.01, "--shared-prefix", 7000)
    more = ("--keep-cache", "--repeats", 2, "--warm-up", 0, "--json", out)
    assert run("tools/benchmark_offline.py", *flags, *more, monkeypatch=monkeypatch) == 0
    report = json.loads(out.read_text())
    (result,) = report["results"]  # the same name twice is one row: all of its runs
    assert len(result["walls_s"]) == 4
    first = result["rounds"][0]
    assert first["prompt_tokens"] == 70 + 3
    assert report["engine"]["kernels"] == "auto"
    assert "reference_model on" in capsys.readouterr().err


def test_an_earlier_runs_figures_stand_beside_a_peers(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    flags = ("--workload", "decode_1", "--scale", 0.01, "--json", out)
    assert run("tools/benchmark_offline.py", *flags, monkeypatch=monkeypatch) == 0
    flags = ("--from-json", out, "--peer", ROOT / "docs" / "peers.json", "--plot", tmp_path)
    assert run("tools/benchmark_offline.py", *flags, monkeypatch=monkeypatch) == 0
    assert "Peers are left out" in capsys.readouterr().err
    assert (tmp_path / "workloads_reference_model.png").stat().st_size > 1000

    report = json.loads(out.read_text())
    report |= {"model": "nemotron-h-8b", "scale": 1.0, "count_scale": 1.0}
    out.write_text(json.dumps(report))
    assert run("tools/benchmark_offline.py", *flags, monkeypatch=monkeypatch) == 0
    shown = capsys.readouterr().err
    assert "| vLLM 0.26.0 (mode), ours / it" in shown and "megatron-core 0.19.2 (mode)" in shown
    assert "4.75 ms (off)" in shown and "3.72 ms (align)" in shown and "5.63 ms (on)" in shown
    assert (tmp_path / "workloads_nemotron-h-8b.png").stat().st_size > 1000


def test_measured_times_stand_over_what_the_hardware_allows(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    flags = ("--workload", "decode_1,prompts_8k,fork", "--scale", 0.01, "--limits", "--json", out)
    assert run("tools/benchmark_offline.py", *flags, monkeypatch=monkeypatch) == 0
    shown = capsys.readouterr().err
    (result,) = (
        r
        for r in json.loads(out.read_text())["results"]
        if r["workload"] != "fork" and r["output_tokens"] == r["requests"]
    )
    assert f"{result['prompt_tok_s']:.0f} in" in shown
    # Slower, but still far from what is measured here: the table shows two decimals.
    rates = ("--limits", "--copy-rate", 0.1, "--product-rate", 1)
    flags = ("--from-json", out, *rates)
    assert run("tools/benchmark_offline.py", *flags, monkeypatch=monkeypatch) == 0
    slower = capsys.readouterr().err
    ratios = [_ratios_over_limits(text) for text in (shown, slower)]
    assert [one.keys() for one in ratios] == [{"decode_1", "prompts_8k"}] * 2
    assert ratios[0]["decode_1"] / ratios[1]["decode_1"] == pytest.approx(42.95, rel=0.01)
    assert ratios[0]["prompts_8k"] / ratios[1]["prompts_8k"] == pytest.approx(790, rel=0.01)


def _ratios_over_limits(shown):
    _, table = shown.split("measured / limit |")
    rows = [line.split("|") for line in table.splitlines()[2:]]
    return {row[1].strip(): float(row[4]) for row in rows}


def test_what_the_hardware_allows_is_shown_without_measuring(monkeypatch, capsys):
    files = [ROOT / "configs" / f"{name}.yaml" for name in ("nemotron-h-8b", "lfm2-1.2b")]
    flags = ("--limits-only", *files, "--workload", "unique,decode_1,fork")
    assert run("tools/benchmark_offline.py", *flags, monkeypatch=monkeypatch) == 0
    head, _, nemotron, lfm2 = capsys.readouterr().out.splitlines()
    assert "decode_1, ms | unique, s" in head
    assert nemotron.split("|")[3].strip() == "3.56" and "lfm2-1.2b" in lfm2


@pytest.mark.parametrize(
    "model", usually(["nemotron-h-8b"], ["nemotron-h-8b", "granite-4.0-h-tiny"])
)
def test_every_kernel_is_timed(model, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    flags = ("--model", model, "--device", "cpu", "--json", out)
    assert run("tools/benchmark_kernels.py", *flags, monkeypatch=monkeypatch) == 0
    report = json.loads(out.read_text())
    names = {row["name"] for row in report["rows"]}
    assert names >= {"state update", "scan", "conv decode", "conv prefill", "append KV", "rope"}
    assert names >= {"attention decode", "attention prefill", "add_rms_norm", "gated_rms_norm"}
    assert names >= {"activation", "draw"}
    for name in ("router", "experts", "experts and shared MLP"):
        assert (name in names) == (model[0] == "g")
    for row in report["rows"]:
        assert "failed" not in row
        assert row["us"] > 0 and row["floor_us"] > 0
    assert "matrix product" in capsys.readouterr().out


INDEXED = {"index, choice", "index, attention", "index, attention, alike"}


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("qwen3.8-flash-next", INDEXED),
        ("glm-5.3-flash", INDEXED),
        ("inkling-small", {"bias by distance"}),
    ],
)
def test_kernels_that_few_models_have_are_timed(model, names, tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    flags = ("--model", model, "--device", "cpu", "--json", out, "--only", "index,bias by")
    assert run("tools/benchmark_kernels.py", *flags, monkeypatch=monkeypatch) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["name"] for row in rows} == names
    assert not any("failed" in row for row in rows)


def test_only_the_kernels_that_are_named_are_timed(monkeypatch, capsys):
    flags = ("--device", "cpu", "--only", "draw,rope")
    assert run("tools/benchmark_kernels.py", *flags, monkeypatch=monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()[3:]
    assert {line.split()[1] for line in lines} == {"draw", "rope"}
    assert run("tools/benchmark_kernels.py", "--only", "none", monkeypatch=monkeypatch) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--scale", "0"), "--scale"),
        (("--pairs", "0"), "--pairs"),
        (("--warm-up", "2"), "--warm-up is 2"),
        (("--shared-prefix", "0"), "--shared-prefix is 0"),
        (("--workload", "unique,uniq"), "'uniq' is not one of unique"),
        (("--peer", "/nowhere.json"), "--peer /nowhere.json cannot be read"),
        (("--peer", str(ROOT / "pyproject.toml")), "docs/peers.json is one"),
        (("--limits", "--compare", "prefix-caching"), "leave one of them out"),
        (("--limits", "--tensor-model-parallel-size", "2"), "--limits is of one GPU"),
        (("--limits-only", "a.yaml", "--workload", "fork"), "--limits-only takes a --workload"),
        (("--copy-rate", "0"), "--copy-rate is 0.0"),
        (("--workload", "long_resume", "--scale", "100"), "--inference-max-seq-length"),
        (("--load", "/nowhere"), "/nowhere"),
    ],
)
def test_wrong_flags_of_the_benchmark_are_explained(flags, words, monkeypatch, capsys):
    assert run("tools/benchmark_offline.py", *flags, monkeypatch=monkeypatch) == 2
    assert words in capsys.readouterr().err


def test_the_engines_overhead_is_measured(tmp_path, monkeypatch):
    out = tmp_path / "out.json"
    flags = ("--requests", 8, "--steps", 70, "--prompt-tokens", 100)
    more = ("--cached-blocks", 64, 128, "--evictions", 50, "--waiting", 200, "--json", out)
    monkeypatch.setattr("megatron_hybrid.engine.garbage.collect_seldom", lambda: None)
    assert run("tools/benchmark_engine_overhead.py", *flags, *more, monkeypatch=monkeypatch) == 0
    report = json.loads(out.read_text())
    assert report["step"]["requests"] == 8
    assert report["step"]["steps"] > 60
    # Every request crosses a block boundary once in 64 steps, and the cache is full.
    assert report["step"]["evicted_blocks"] >= 8
    assert [row["cached_blocks"] for row in report["eviction"]] == [64, 128]
    waiting = report["waiting"]
    assert waiting["waiting"] == 200 and 0 < waiting["still_waiting"] <= 200
    assert waiting["ms_per_step"].keys() == {"running", "paused", "new weights", "aborted"}
    assert all(times["max"] >= times["p99"] > 0 for times in waiting["ms_per_step"].values())


# --------------------------------------------------------------------------- examples


def test_a_second_turn_skips_what_the_first_one_left(monkeypatch, capsys):
    flags = ("--prompt-tokens", 500, "--repeats", 1)
    assert run("examples/multi_turn_chat.py", *flags, monkeypatch=monkeypatch) == 0
    output = capsys.readouterr().out
    assert "times shorter" in output
    assert "with and without the cache: yes" in output


def test_the_other_offline_examples_run(monkeypatch, capsys):
    for name in ("offline_generate", "samples_of_one_prompt", "cache_statistics"):
        assert run(f"examples/{name}.py", monkeypatch=monkeypatch) == 0, name
    output = capsys.readouterr().out
    assert "'state_missing'" in output
    assert "checkpoints_published" in output


# ------------------------------------------------------------------ starts


@thorough
def test_a_start_is_measured_to_its_first_token(monkeypatch, capfd):
    flags = ("--device", "cpu", "--runs", 1, "--prompt-length", 5)
    assert run("tools/benchmark_start.py", *flags, monkeypatch=monkeypatch) == 0
    rows = [line.split("|")[1:-1] for line in capfd.readouterr().out.splitlines()]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}
    assert cells["seconds"] == ["cold", "warm"]
    parts = list(cells)[2 : list(cells).index("to the first token")]
    assert {"imports", "weights", "first token"} < set(parts)
    for kind in (0, 1):
        total = sum(float(cells[part][kind]) for part in parts)
        assert abs(total - float(cells["to the first token"][kind])) < 0.005 * (len(parts) + 1)


# ------------------------------------------------------------------- sleep


@thorough  # tests/engine/test_sleep*.py
def test_sleep_is_measured_and_answers_are_the_same(monkeypatch, capsys, tmp_path):
    figures = tmp_path / "figures.json"
    flags = ("--device", "cpu", "--json", figures)
    assert run("tools/measure_sleep.py", *flags, monkeypatch=monkeypatch) == 0
    assert "| level | GiB before |" in capsys.readouterr().out
    rows = json.loads(figures.read_text())["rows"]
    assert [row["level"] for row in rows] == [0, 1, 2]
    assert all(row["same"] for row in rows[1:]) and rows[2]["weights_s"] > 0
