"""tools/check_exactness.py: nothing differs in batch-invariant mode; what would break it is found,
and named."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from exactness import watching
from megatron_hybrid.kernels import kernel_set
from tests.batch_invariant_breaks import break_attention, break_scans
from tests.parallel.ranks import run_on_ranks
from tests.thorough import thorough, usually
from tests.tiny_models import FAMILIES, make_tiny_model

ROOT = Path(__file__).parents[2]
TINY = ("--device", "cpu", "--longest", "128")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = ROOT / "tools" / "check_exactness.py"
    spec = importlib.util.spec_from_file_location("check_exactness", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["check_exactness"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models")

    def of(family: str) -> Path:
        if not (folder / family).exists():
            make_tiny_model(family, folder / family)
        return folder / family

    return of


@pytest.fixture
def run(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tool's exit code, and what it writes."""

    def with_flags(*flags: Any) -> tuple[int, Any]:
        report = tmp_path / "report.json"
        monkeypatch.setattr(
            sys, "argv", ["check_exactness.py", *TINY, "--json", str(report), *map(str, flags)]
        )
        try:
            code = tool.main()
        except SystemExit as ended:
            code = ended.code
        return code, json.loads(report.read_text()) if report.exists() else None

    return with_flags


@pytest.mark.parametrize("family", usually(("nemotron_h_moe",), FAMILIES))
def test_every_way_computes_the_same_bits(family: str, models: Any, run: Any) -> None:
    logprobs, sampled = usually((900, 270), (3000, 900))
    code, found = run("--load", models(family), "--logprobs", logprobs, "--sampled", sampled)
    assert code == 0, found["differences"] or found["failures"]
    assert found["differing"]["all"] == 0 and not found["located"]
    assert found["compared"]["all"] >= logprobs and found["compared"]["sampled"] >= sampled
    assert len(found["by_engine"]) == 9
    for name, counts in found["by_engine"].items():
        assert sum(kind["compared"] for kind in counts.values()) > 20, name
    engines = found["engines"]
    drafting = usually("drafts from all texts", "drafts")  # few others hold in so little
    assert all(one["accepted_tokens"] for name, one in engines.items() if drafting in name)
    warm = found["by_condition"]["some of it cached"]
    assert all(warm[kind]["compared"] for kind in ("sampled", "prompt", "scored"))


@thorough
def test_requests_are_preempted(models: Any, run: Any) -> None:
    flags = ("--logprobs", 3000, "--sampled", 1500, "--only", "few blocks")
    # With other seeds there may be none, so few are the steps.
    code, found = run("--load", models("nemotron_h"), *flags, "--session-seed", 6)
    assert code == 0
    (figures,) = (one for name, one in found["engines"].items() if name != "alone")
    assert figures["preemptions"] and figures["evicted_blocks"] and figures["evicted_states"]
    assert found["by_condition"]["preempted"]["sampled"]["compared"] > 5


@thorough
def test_the_model_that_ships_with_us_and_every_operation_of_a_request(run: Any) -> None:
    code, found = run("--logprobs", 200, "--only", "small chunks|few states", "--locate")
    assert code == 0 and found["compared"]["all"] >= 200
    (located,) = found["located"].values()
    assert located["place"] is None and located["operations"] > 100 and located["tokens"] > 5


def swap(patch: pytest.MonkeyPatch, part: str, name: str, change: Any) -> None:
    """A function of a part of the kernels by `change` of it."""
    kernels = kernel_set.REFERENCE_INVARIANT
    own = getattr(kernels, part)
    names = {one: getattr(own, one) for one in dir(own) if not one.startswith("__")}
    names[name] = partial(change, names[name])
    broken: dict[str, Any] = {part: SimpleNamespace(**names)}
    patch.setattr(kernel_set, "REFERENCE_INVARIANT", replace(kernels, **broken))


def break_products(patch: pytest.MonkeyPatch) -> None:
    """Those of keys and queries: K in two parts where there is more than one row."""

    def multiply(own: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        if isinstance(weight, torch.Tensor) and weight.shape == (128, 64) and len(x) > 1:
            parts = zip(x.split(32, 1), weight.split(32, 1), strict=True)
            return sum(F.linear(a, b) for a, b in parts)
        return own(x, weight, bias)

    swap(patch, "linear", "multiply", multiply)


def break_norms(patch: pytest.MonkeyPatch) -> None:
    """In the last bits, of steps of three tokens."""

    def add_rms_norm(own: Any, x: Any, *others: Any) -> Any:
        y, total = own(x, *others)
        return (y * (1 + 2**-20) if len(x) == 3 else y), total

    swap(patch, "norm", "add_rms_norm", add_rms_norm)


def break_log_softmax(patch: pytest.MonkeyPatch) -> None:
    """Of several rows."""
    swap(
        patch, "sampling", "log_softmax",
        lambda own, logits: own(logits) * (1 + 2**-20 * (len(logits) > 1)),
    )  # fmt: skip


# Which operation, and in which block of nemotron_h, which is Mamba2, MLP, attention, Mamba2, MLP.
BREAKS = {
    break_products: ("linear.multiply (blocks.2.mixer.qkv_proj.run0)", "block 2 (Attention)"),
    break_norms: ("norm.add_rms_norm (blocks.1.norm.weight)[0]", "block 1 (MLP)"),
    break_scans: ("mamba2_scan.run", "block 0 (Mamba2)"),
    break_attention: ("attention.attend", "block 2 (Attention)"),
    break_log_softmax: ("sampling.log_softmax", "head"),
}


@pytest.mark.parametrize(
    "change", usually([break_products], list(BREAKS)), ids=lambda change: change.__name__
)
def test_what_differs_is_found_and_named(
    change: Any, models: Any, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    flags = ("--logprobs", usually(200, 600), "--only", usually("many", "many|no cache"))
    code, found = run("--load", models("nemotron_h"), *flags)
    assert code == 1
    assert found["differing"]["all"] > 0 and found["located"]
    for located in found["located"].values():
        place = located["place"]
        assert (place["operation"], place["block"]) == BREAKS[change]
        assert place["largest_difference"] > 0 and place["numbers_that_differ"] > 0
        assert place["alone"]["step"] and place["other"]["shapes"]


def test_another_mode_differs(models: Any, run: Any) -> None:
    flags = ("--logprobs", 300, "--only", "many", "--no-batch-invariant", "--no-locate")
    code, found = run("--load", models("nemotron_h"), *flags)
    assert code == 1 and found["differing"]["all"] > 20 and not found["located"]


def test_too_little_time_is_not_a_pass(models: Any, run: Any) -> None:
    flags = ("--logprobs", 100_000, "--only", "many|no cache", "--time-limit", "0.001")
    code, found = run("--load", models("nemotron_h"), *flags)
    assert code == 2 and found["differing"]["all"] == 0
    assert 0 < found["compared"]["all"] < 100_000


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--logprobs", "0"), "--logprobs is 0"),
        (("--only", "nothing"), "--only nothing is found in no way's name"),
        (("--longest", "20"), "Requests of 20 tokens are too short"),
        (("--load", "/nowhere"), "/nowhere"),
    ],
)
def test_what_cannot_be_run_is_said(
    flags: tuple[str, ...], words: str, run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run(*flags)
    assert code == 2 and found is None
    assert words in capsys.readouterr().err


@thorough
@pytest.mark.parametrize("option", ("tensor", "pipeline"))
def test_on_two_ranks(option: str, models: Any, tmp_path: Path) -> None:
    flags = (*TINY, "--load", str(models("nemotron_h")), f"--{option}-model-parallel-size", "2")
    wanted = ("--logprobs", "200", "--only", "many|few blocks", "--locate")
    found = run_on_ranks(2, "tests.tools.exactness_worker", tmp_path, *flags, *wanted)
    assert found == {"exit code": 0}
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["differing"]["all"] == 0 and report["compared"]["all"] >= 200
    (located,) = report["located"].values()
    assert located["place"] is None and located["operations"] > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_a_digest_changes_with_any_bit_of_its_row_alone(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 100, (7, 3, 33), generator=draw).to(dtype)
    known = watching.digests(rows)
    assert len(set(known)) == 7 and watching.digests(rows[2:5]) == known[2:5]
    for bit in range(8):
        changed = rows.clone()
        changed.view(torch.uint8).view(7, -1)[3, 11 + bit] ^= 1 << bit
        found = watching.digests(changed)
        assert [a == b for a, b in zip(found, known, strict=True)] == [i != 3 for i in range(7)]
    swapped = rows.clone()
    swapped[3, 0, 0], swapped[3, 0, 1] = rows[3, 0, 1], rows[3, 0, 0]
    assert rows[3, 0, 0] == rows[3, 0, 1] or watching.digests(swapped)[3] != known[3]


@thorough
@pytest.mark.parametrize("format", ["bfloat16", "float16"])
def test_in_16_bits(format: str, models: Any, run: Any) -> None:
    flags = ("--logprobs", 1500, "--dtype", format)
    code, found = run("--load", models("qwen3_next"), *flags)
    assert code == 0, found["differences"]
