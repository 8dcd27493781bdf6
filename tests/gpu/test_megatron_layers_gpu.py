"""Megatron's layers and kernels beside the engine's in batch-invariant mode, in bfloat16: which
bits are equal, and how far apart the others are. `pytest -s` prints what was found."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
from megatron_hybrid.kernels import kernel_set  # noqa: E402
from megatron_hybrid.kernels.linear import triton_in_order as in_order  # noqa: E402
from megatron_hybrid.kernels.protocols import Mamba2Constants, Mamba2Tokens  # noqa: E402
from megatron_hybrid.training.formulas import Sequences  # noqa: E402
from megatron_hybrid.training.whole_sequences import WholeSequences  # noqa: E402
from tests.training.megatron_comparison import apart  # noqa: E402

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
# One tiling of each of mamba-ssm's kernels, which it would choose among many for minutes.
os.environ.setdefault("MAMBA_DETERMINISTIC", "1")
LIBRARIES = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mamba_ssm", "causal_conv1d"))),
    reason="needs mamba_ssm and causal_conv1d",
)
CUDA = torch.device("cuda")
SIZES = [(4096, 4096), (18560, 4096), (4096, 8192), (1536, 2056)]  # rows and columns of weights
# Of Nemotron-H-8B's Mamba layers.
HEADS, HEAD_DIM, GROUPS, STATE = 128, 64, 8, 128


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, device="cuda")).bfloat16()


def batch_invariant_kernels() -> Any:
    """Megatron's."""
    import megatron_hybrid.parallel.megatron  # noqa: F401  # hides what cannot be imported

    name = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
    return pytest.importorskip(name)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("megatron_layers")
    command = [sys.executable, "-m", "tests.gpu.megatron_layers_worker", str(folder)]
    path = f"{ROOT / 'tools'}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    loaded: dict[str, Any] = json.loads((folder / "found.json").read_text())
    for name, numbers in loaded.items():
        print(name, numbers)
    return loaded


@LIBRARIES
def test_with_the_engine_s_kernels_a_megatron_model_has_its_bits(found: dict[str, Any]) -> None:
    """Also after a step of training, of which the engine got the weights from a checkpoint."""
    for name in ("with the engine's kernels", "after a step"):
        assert found[name]["largest"] == 0, name
    assert found["the step"]["largest"] > 1e-3
    assert found["gradients"] < 0.1


@LIBRARIES
def test_its_own_layers_are_close(found: dict[str, Any]) -> None:
    assert 0 < found["as it is"]["largest"] < 0.2
    assert found["embedding"]["largest"] == 0
    for name in ("norm", "in_proj", "mixer", "attention", "mlp", "experts"):
        assert found[name]["places"] <= 8, name
    assert found["cross entropy"]["largest"] < 1e-5
    assert found["norm"]["share"] > 0.1 and found["mixer"]["share"] > 0.1


@LIBRARIES
def test_mamba_ssm_s_scan_has_other_bits_in_each_of_its_chunks() -> None:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    torch.manual_seed(0)
    length = 1000
    x = randn(length, HEADS, HEAD_DIM)
    b, c = (randn(length, GROUPS, STATE) for _ in "BC")
    dt, bias = randn(length, HEADS), torch.randn(HEADS, device="cuda") - 3
    a, d = -(1 + 15 * torch.rand(HEADS, device="cuda")), torch.ones(HEADS, device="cuda")
    replays = kernel_set.select("auto", CUDA, batch_invariant=True).replays
    assert replays is not None
    tokens = Mamba2Tokens(x, b, c, dt)
    step = WholeSequences.of(Sequences.of([length], CUDA), 16)
    ours = replays.mamba2_scan.run(
        tokens,
        Mamba2Constants(a, d, bias, (0.0, float("inf"))),
        torch.zeros(1, HEADS, HEAD_DIM, STATE, device="cuda"),
        tuple(kept.new_zeros(1, replays.chunk, *kept.shape[1:]) for kept in tokens.kept),
        replays.mamba2_scan.plan(step.prefill, replays.chunk, replays.chunk),
    )
    theirs = {
        chunk: mamba_chunk_scan_combined(
            x[None], dt[None], a, b[None], c[None], chunk, D=d, dt_bias=bias, dt_softplus=True
        )[0]
        for chunk in (64, 128, 256)
    }
    for chunk, y in theirs.items():
        numbers = apart([y], [ours])
        print("scan in chunks of", chunk, numbers)
        assert numbers["share"] > 0.01 and numbers["places"] <= 4
    assert not torch.equal(theirs[128], theirs[256])
    # In front of a rounding a gate gives other bits than behind it.
    z = randn(length, HEADS, HEAD_DIM)
    first = mamba_chunk_scan_combined(
        x[None], dt[None], a, b[None], c[None], 128, D=d, z=z[None], dt_bias=bias, dt_softplus=True
    )[0]
    behind = (theirs[128].float() * F.silu(z.float())).bfloat16()
    print("gate in the scan", numbers := apart([first], [behind]))
    assert numbers["share"] > 0.1


@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_megatron_s_own_product_has_our_bits(rows: int, columns: int) -> None:
    """Its Triton kernel: each output one sum over k, in order, in one accumulator, too."""
    theirs = batch_invariant_kernels()
    torch.manual_seed(1)
    w = randn(rows, columns, scale=columns**-0.5)
    for count in (1, 3, 64, 500, 2000):
        x = randn(count, columns)
        ours = in_order.multiply(x, w)
        print(count, rows, columns, "cuBLAS:", apart([F.linear(x, w)], [ours]))
        assert torch.equal(theirs.matmul_persistent(x, w.t()), ours), count


@pytest.mark.parametrize("columns", [256, 2688, 4096])
def test_megatron_s_norm_and_log_softmax_are_close(columns: int) -> None:
    theirs = batch_invariant_kernels()
    torch.manual_seed(2)
    kernels = kernel_set.select("auto", CUDA, batch_invariant=True)
    x, weight = randn(300, columns), 1 + randn(columns, scale=0.2)
    ours = kernels.norm.rms_norm(x, weight, 1e-5)
    numbers = apart([theirs.rmsnorm_batch_invariant(x, weight, 1e-5)], [ours])
    print("norm", columns, numbers)
    assert numbers["share"] > 0.1 and numbers["places"] <= 1  # ours is rounded twice
    logits = 3 * torch.randn(50, 16 * columns, device="cuda")
    numbers = apart([theirs.log_softmax(logits)], [kernels.sampling.log_softmax(logits)])
    print("log_softmax", 16 * columns, numbers)
    assert numbers["largest"] < 1e-5
