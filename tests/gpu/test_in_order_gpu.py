"""What batch-invariant mode rests on: tensor cores give the same sums in any tile, by either kind
of instruction and with the weight on either side; and products, whatever their number of rows."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from megatron_hybrid.kernels.activation import triton as activation  # noqa: E402
from megatron_hybrid.kernels.linear import few_rows  # noqa: E402
from megatron_hybrid.kernels.linear import triton_in_order as in_order  # noqa: E402

pytestmark = pytest.mark.gpu
COUNTS = (1, 2, 3, 16, 17, 33, 64, 65, 100, 128, 129, 200, 256, 300, 512, 700, 1500, 2500)
SIZES = [(4096, 4096), (1000, 512), (2056, 1536), (160, 64), (4096, 8240)]


@triton.jit
def _product_kernel(
    x, w, y, tokens, rows, columns,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, WEIGHT_FIRST: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, TOKENS) if WEIGHT_FIRST else (TOKENS, ROWS), tl.float32)
    for start in range(0, columns, DEPTH):
        a = tl.load(x + m[:, None] * columns + (start + k)[None, :], (m < tokens)[:, None], 0.0)
        b = tl.load(w + n[:, None] * columns + (start + k)[None, :], (n < rows)[:, None], 0.0)
        total = tl.dot(b, a.T, total) if WEIGHT_FIRST else tl.dot(a, b.T, total)
    if WEIGHT_FIRST:
        total = total.T
    place = y + m[:, None] * rows + n[None, :]
    tl.store(place, total, (m < tokens)[:, None] & (n < rows)[None, :])


@pytest.mark.parametrize("columns", [4096, 21504])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_tiles_instructions_and_sides_change_no_bits(columns: int, scale: float) -> None:
    torch.manual_seed(0)
    x = (torch.randn(256, columns, device="cuda") * scale).bfloat16()
    w = torch.randn(256, columns, device="cuda").bfloat16()
    kinds, results = set(), []
    for tokens, rows, depth, warps, weight_first in (
        (128, 128, 64, 4, False), (128, 256, 64, 8, False), (64, 64, 128, 4, False),
        (16, 64, 64, 4, False), (16, 32, 16, 1, False), (32, 32, 32, 2, False),
        (16, 64, 64, 4, True), (16, 16, 64, 1, True), (32, 128, 64, 4, True),
    ):  # fmt: skip
        y = torch.empty(256, 256, device="cuda")
        grid = triton.cdiv(256, rows), triton.cdiv(256, tokens)
        kernel = _product_kernel[grid](
            x, w, y, 256, 256, columns, tokens, rows, depth, weight_first, num_warps=warps
        )
        kinds |= {kind for kind in ("wgmma", "mma.sync") if kind in kernel.asm["ptx"]}
        results.append(y)
    assert all(torch.equal(y, results[0]) for y in results)
    if torch.cuda.get_device_capability()[0] == 9:
        assert kinds == {"wgmma", "mma.sync"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), SIZES)
def test_a_row_s_product_is_its_own(rows: int, columns: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    w = torch.randn(rows, columns, device="cuda").to(dtype)
    bias = torch.randn(rows, device="cuda").to(dtype)
    x = torch.randn(600 if dtype == torch.float32 else 2500, columns, device="cuda").to(dtype)
    whole = in_order.multiply(x, w, bias)
    for count in (count for count in COUNTS if count <= len(x)):
        for first in (0, len(x) - count):
            part = in_order.multiply(x[first : first + count], w, bias)
            assert torch.equal(part, whole[first : first + count]), (count, first)
    wide = torch.randn(50, columns + 64, device="cuda").to(dtype)
    wide[:, 8 : 8 + columns] = x[:50]
    assert torch.equal(in_order.multiply(wide[:, 8 : 8 + columns], w, bias), whole[:50])
    exact = x[:100].double() @ w.double().T + bias
    tolerance = 1e-3 if dtype == torch.float32 else 2.0 * columns**0.5 * torch.finfo(dtype).eps
    assert (whole[:100].double() - exact).abs().max() < tolerance * 4


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", ["silu", "gelu", "relu2"])
def test_activated_products_are_those_of_two_kernels(name: str, gated: bool) -> None:
    torch.manual_seed(2)
    w = torch.randn(2048, 1024, device="cuda").bfloat16()
    x = torch.randn(100, 1024, device="cuda").bfloat16()
    y = activation.activate(in_order.multiply(x, w), name, gated)
    for count in (1, 5, few_rows.LARGEST):
        fused = in_order.multiply_activated(x[:count], w, None, name, gated)
        assert fused is not None and torch.equal(fused, y[:count])


def test_what_cublas_is_asked_for_has_the_same_bits() -> None:
    """Only sizes that were learned; of others the kernel computes."""
    torch.manual_seed(3)
    w = torch.randn(4096, 2048, device="cuda").bfloat16()
    x = torch.randn(600, 2048, device="cuda").bfloat16()
    before = in_order.multiply(x[:256].clone(), w)
    in_order.learn([(w, False)], (64, 256, 512))
    for count in (256, 300, 512, 600):
        assert torch.equal(in_order.multiply(x[:count].clone(), w)[:256], before)


@pytest.mark.parametrize("rows", [15, 192])
def test_few_results_of_another_order_are_found(rows: int) -> None:
    """Of small products at random mostly none shows it."""
    torch.manual_seed(5)
    w = torch.randn(rows, 192, device="cuda").bfloat16()
    counts = 72, 128, 256, 384, 512
    in_order.learn([(w, False)], counts)
    for count in counts:
        for _ in range(200):
            x = torch.randn(count, 192, device="cuda").bfloat16()
            parts = [in_order.multiply(part.clone(), w) for part in x.split(64)]
            assert torch.equal(in_order.multiply(x, w), torch.cat(parts))
