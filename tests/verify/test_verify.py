"""`megatron-hybrid verify` finds nothing where nothing is wrong, and what is wrong where something
is."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hybrid import LLM, cli
from megatron_hybrid.execution.runner import ModelRunner
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.verify import prompts, ways
from tests.quantized_folders import FORMATS, write
from tests.server.running import python_path
from tests.text.make_tokenizers import byte_level, save
from tests.thorough import EVERYTHING, thorough, usually
from tests.tiny_models import FAMILIES, make_tiny_model

SMALL = ("--inference-dynamic-batching-buffer-size-gb", "0.02", "--no-speed")
# Weights alone, and inputs that are rounded too.
SOME = [("nemotron_h", "compressed_w4a16"), ("lfm2", "modelopt_mixed")]
EVERY = [(family, format) for format in FORMATS for family in ("nemotron_h_moe", "lfm2")]


class Verified:
    """What came of it."""

    def __init__(self, folder: Path | None, file: Path, *flags: str) -> None:
        load = () if folder is None else ("--load", str(folder))
        self.code = cli.main(["verify", *load, "--report", str(file), *flags])
        self.text = file.read_text()
        self.report: dict[str, Any] = json.loads(self.text)
        self.checks = {check["name"]: check for check in self.report["checks"]}

    def outcomes(self, *words: str) -> set[str]:
        """Of the checks whose names have one of these words."""
        return {c["outcome"] for n, c in self.checks.items() if any(word in n for word in words)}

    @property
    def wrong(self) -> list[str]:
        return [name for name, check in self.checks.items() if check["outcome"] == "differs"]


Verify = Callable[..., Verified]


@pytest.fixture(autouse=not EVERYTHING)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "LONGEST", 76)
    monkeypatch.setattr(ways, "TOP", 8)
    monkeypatch.setattr(ways, "ANSWER", 4)


@pytest.fixture
def verify(tmp_path: Path) -> Verify:
    def run(folder: Path | None, *flags: str) -> Verified:
        return Verified(folder, tmp_path / "report.json", *SMALL, *flags)

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def get(family: str, format: str = "") -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            make_tiny_model(family, made[family], eos_token_id=0)
        if format and family + format not in made:
            made[family + format] = root = tmp_path_factory.mktemp(format)
            write(made[family], format, root, tmp_path_factory.mktemp("oracle"), block=(48, 32))
        return made[family + format]

    return get


def test_the_reference_model_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = () if EVERYTHING else ("--no-speed",)
    found = Verified(None, tmp_path / "report.json", *flags)
    assert found.code == 0 and not found.report["differs"], found.wrong
    assert found.outcomes("logits", "greedy", "end tokens", "chat template", "tool calls") == {"ok"}
    assert len([name for name in found.checks if "logits" in name]) == 5
    assert found.checks["reasoning"]["outcome"] == "not checked"
    assert found.checks["logits, cold"]["figures"]["worst"] < 1e-4
    assert found.report["about"]["family"] == "bamba"
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(found.checks) + 1
    assert lines[-1].endswith("0 differ, 1 not checked.")


@pytest.mark.parametrize(("family", "format"), usually(SOME, EVERY))
def test_a_quantised_folder_is_right(
    verify: Verify, folder: Callable[..., Path], family: str, format: str
) -> None:
    found = verify(folder(family, format))
    assert found.code == 0, found.wrong
    assert found.outcomes("logits", "greedy") == {"ok"}
    (formats, *_) = found.report["about"]["formats_by_layer"].values()
    assert sum(formats.values()) > 0
    assert str(folder(family, format)) not in found.text


@thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_right(
    verify: Verify, folder: Callable[..., Path], family: str, dtype: str
) -> None:
    found = verify(folder(family), "--dtype", dtype)
    assert found.code == 0, [found.checks[name] for name in found.wrong]


@thorough
@pytest.mark.parametrize("format", ["fp8", "fp8_block"])
@pytest.mark.parametrize("family", ["granite_moe_hybrid", "qwen3_5_moe"])
def test_experts_that_are_rounded_while_they_are_read(
    verify: Verify, folder: Callable[..., Path], family: str, format: str
) -> None:
    found = verify(folder(family), "--quantization", format)
    assert found.code == 0, [found.checks[name] for name in found.wrong]


@thorough
@pytest.mark.parametrize(
    "flags",
    [
        ("--quantization", "fp8"),
        ("--quantization", "fp8_block"),
        ("--kv-cache-dtype", "fp8_e4m3"),
        ("--mamba-inference-cached-states-dtype", "int8"),
        ("--mamba-inference-ssm-states-dtype", "bfloat16"),
        (
            "--mamba-inference-ssm-states-dtype",
            "float16",
            "--mamba-inference-stochastic-rounding",
        ),
        ("--num-speculative-tokens", "3"),
    ],
)
def test_what_an_engine_rounds_is_allowed(
    verify: Verify, folder: Callable[..., Path], flags: tuple[str, ...]
) -> None:
    found = verify(folder("nemotron_h"), *flags)
    assert found.code == 0, [found.checks[name] for name in found.wrong]


@pytest.mark.parametrize("format", ["", *usually([], ["fp8_block", "compressed_w4a16"])])
def test_a_weight_that_is_loaded_wrong_is_found(
    verify: Verify, folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, format: str
) -> None:
    load = HybridModel.after_loading

    def spoil(model: HybridModel) -> None:
        part = next(p for _, p in model.weight_parts() if p.role == "mixer.out_proj.weight")
        target = part.target.scale if format else part.target
        with torch.no_grad():
            target.mul_(1.5)
        load(model)

    monkeypatch.setattr(HybridModel, "after_loading", spoil)
    found = verify(folder("nemotron_h", format))
    assert found.code == 1
    assert "logits, cold" in found.wrong
    assert "log-probabilities are off by" in found.checks["logits, cold"]["says"]


def test_states_that_are_not_kept_right_are_found_where_they_are_read(
    verify: Verify, folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = LLM.generate

    def spoiling(llm: LLM, *args: Any, **options: Any) -> Any:
        outputs = generate(llm, *args, **options)
        caches = llm.engine.runner._caches  # type: ignore[attr-defined]
        for state in caches.state.values():
            state.ssm.mul_(1.5)
        return outputs

    monkeypatch.setattr(LLM, "generate", spoiling)
    found = verify(folder("nemotron_h"))
    assert found.code == 1
    assert "logits, warm" in found.wrong
    assert {name.partition(", ")[2] for name in found.wrong} <= {"warm", "continued"}


@pytest.mark.parametrize("good_steps", usually([9], [0, 9]))
def test_answers_that_the_engine_gives_up_are_named(
    verify: Verify,
    folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    good_steps: int,
) -> None:
    launch, steps = ModelRunner.launch, itertools.count()

    def failing(runner: ModelRunner, *args: Any) -> Any:
        if next(steps) >= good_steps:
            raise RuntimeError("no memory is left")
        return launch(runner, *args)

    monkeypatch.setattr(ModelRunner, "launch", failing)
    found = verify(folder("llama"))
    assert found.code == 1
    for name in ("cold", "warm", "continued", "chunked", "batched"):
        assert "no memory is left" in found.checks[f"logits, {name}"]["says"]


def test_a_cache_that_finds_nothing_is_found(
    verify: Verify, folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = LLM.generate

    def forgetful(llm: LLM, *args: Any, **options: Any) -> Any:
        outputs = generate(llm, *args, **options)
        llm.engine.reset()
        return outputs

    monkeypatch.setattr(LLM, "generate", forgetful)
    found = verify(folder("llama"))
    assert found.wrong == ["logits, warm"] and found.code == 1
    assert "no token of any prompt came from the cache" in found.checks["logits, warm"]["says"]


def test_without_transformers_the_ways_are_compared_with_one_another(
    verify: Verify, folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = verify(folder("nemotron_h"), "--oracle", "none")
    assert found.code == 0
    assert found.checks["logits beside transformers"]["outcome"] == "not checked"
    assert found.outcomes("beside cold") == {"ok"}


def test_a_wrong_end_token_is_named(verify: Verify, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_tiny_model("llama", model, vocab_size=500, eos_token_id=7)
    save(byte_level(), model)
    found = verify(model, "--oracle", "none")
    assert found.code == 1 and found.wrong == ["end tokens"]
    assert "<eos>" in found.checks["end tokens"]["says"]


def test_what_cannot_be_run_ends_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--load", str(tmp_path / "nothing")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
    assert cli.main(["verify", str(tmp_path / "nothing"), "--oracle", "none"]) == 2
    assert f"--load names {tmp_path}/nothing, and there" in capsys.readouterr().err
    assert cli.main(["verify", "--revision", "v2"]) == 2
    assert "--revision is v2, which is of a model on the" in capsys.readouterr().err
    assert cli.main(["verify", "--report", str(tmp_path / "nowhere" / "report.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(["verify", "--orakle", "none"])
    assert ended.value.code == 2
    assert "did you mean --oracle?" in capsys.readouterr().err


@thorough
def test_a_model_that_is_split_over_ranks_is_right(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "megatron_hybrid.cli", "verify", "--load", str(folder("qwen3_next"))]
    command += ["--tensor-model-parallel-size", "2", "--report", str(report), *SMALL]
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("logits, cold") == 1  # the first rank speaks
    assert json.loads(report.read_text())["about"]["ranks"] == 2
