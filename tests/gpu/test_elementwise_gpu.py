"""The Triton convolution, norms and activations on a GPU, at the sizes of real models, against
float64 and, where it is installed, against causal_conv1d."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatron_hybrid.kernels.contract import DecodeSlots
from tests.kernels.activation_cases import CAPPED, check_activate, check_gate
from tests.kernels.conv_cases import Conv, check_decode, check_prefill, check_runs, close, on
from tests.kernels.norm_cases import (
    check_add_rms_norm,
    check_gated_rms_norm,
    check_l2_clip,
    check_rms_norm,
    check_rms_norm_parts,
)
from tests.kernels.runs_cases import Play
from tests.kernels.segments import Segment, int64, prefill_segments

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from megatron_hybrid.kernels.activation import triton as activation  # noqa: E402
from megatron_hybrid.kernels.causal_conv1d import triton as conv  # noqa: E402
from megatron_hybrid.kernels.norm import triton as norm  # noqa: E402

DTYPES = [torch.bfloat16, torch.float32]
NEMOTRON, GRANITE, LFM2 = 10240, 3328, 2048  # channels of the convolution


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """Tensors are allocated full of NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "strided"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [NEMOTRON, GRANITE, 100])
def test_conv_prefill(channels: int, dtype: torch.dtype, packed: bool) -> None:
    lengths = [700, 1, 2, 0, 3, 129, 16, 15, 17, 300, 1, 1, 40]
    options = {"channels": channels, "dtype": dtype, "packed": packed, "device": "cuda"}
    check_prefill(conv, lengths, padding=20, **options)
    check_prefill(conv, [1], **options)
    check_prefill(conv, [0], **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "silu"), [(2, True), (3, True), (3, False), (4, False)])
def test_conv_of_other_widths_and_without_silu(width: int, silu: bool, dtype: torch.dtype) -> None:
    options = {"channels": LFM2, "width": width, "dtype": dtype, "device": "cuda", "bias": False}
    check_prefill(conv, [100, 1, 40, 700, 2], padding=20, silu=silu, **options)
    check_decode(conv, 20, silu, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "silu"), [(4, True), (3, False)])
@pytest.mark.parametrize("lengths", [[1] * 99, [33, 1, 50, 15], [20, 79], [98, 1]])
def test_conv_outputs_have_the_same_bits_however_the_sequence_is_cut(
    lengths: list[int], width: int, silu: bool, dtype: torch.dtype
) -> None:
    case = Conv.random(99, 2, set(), channels=GRANITE, width=width, dtype=dtype, device="cuda")
    whole = on(prefill_segments([Segment(0, 99, 0, 0)]), "cuda")
    expected = conv.prefill(case.x, case.constants(silu), case.state, whole)
    position = 0
    for length in lengths:
        segment = Segment(position, length, 1 if position else 0, 1)
        step = on(prefill_segments([segment]), "cuda")
        part = slice(position, position + length)
        y = conv.prefill(case.x[part], case.constants(silu), case.state, step)
        assert torch.equal(y, expected[part])
        position += length


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "strided"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [NEMOTRON, GRANITE, 100])
@pytest.mark.parametrize("rows", [1, 32, 256])
def test_conv_decode(rows: int, channels: int, dtype: torch.dtype, packed: bool) -> None:
    check_decode(conv, rows, channels=channels, dtype=dtype, packed=packed, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gates", ["before", "after", "before after"])
@pytest.mark.parametrize("channels", [LFM2, 100])
def test_conv_with_gates_has_the_bits_of_kernels_apart(
    channels: int, gates: str, dtype: torch.dtype
) -> None:
    options = {"channels": channels, "width": 3, "dtype": dtype, "device": "cuda", "silu": False}
    options |= {"gates": gates, "activation": activation}
    check_prefill(conv, [700, 1, 2, 0, 3, 129, 16, 15, 17, 40], padding=20, **options)
    check_prefill(conv, [1], **options)
    for rows in (1, 32, 300):
        check_decode(conv, rows, **options)
    check_runs(conv, Play(1), **options)
    check_runs(conv, Play(2, count=5, ring_length=4, most=1), **options)


def test_conv_equals_causal_conv1d() -> None:
    library = pytest.importorskip("causal_conv1d")
    case = Conv.random(
        1000, 2, set(), channels=NEMOTRON, device="cuda", dtype=torch.bfloat16, packed=False
    )
    step = on(prefill_segments([Segment(0, 1000, 0, 1)]), "cuda")
    y = conv.prefill(case.x, case.constants(), case.state, step)
    theirs = library.causal_conv1d_fn(
        case.x.t()[None].contiguous(), case.weight, case.bias, activation="silu"
    )
    torch.testing.assert_close(y, theirs[0].t(), atol=1e-2, rtol=1e-2)


def test_a_captured_decode_follows_its_slots() -> None:
    case = Conv.random(8, 9, set(range(1, 9)), channels=NEMOTRON, device="cuda")
    slots = on(DecodeSlots(int64([1] * 8), int64([0] * 8)), "cuda")
    decode = conv.decode
    decode(case.x, case.constants(), case.state, slots)  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = decode(case.x, case.constants(), case.state, slots)
    slots.read_slot.copy_(torch.arange(1, 9))
    slots.write_slot.copy_(torch.arange(1, 9))
    expected = [case.by_hand(i, 1, i + 1) for i in range(8)]
    graph.replay()
    close(y, torch.cat([e[0] for e in expected]))
    for i, (_, rows) in enumerate(expected):
        assert torch.equal(case.state[i + 1], rows[1:].t())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1536, 4096, 8192, 100])
@pytest.mark.parametrize("tokens", [1, 32, 3000])
def test_norms(tokens: int, size: int, dtype: torch.dtype) -> None:
    check_rms_norm(norm, (tokens, size), dtype, device="cuda")
    check_rms_norm(norm, (tokens, size), torch.float32, dtype, device="cuda")
    check_add_rms_norm(norm, tokens, size, dtype, device="cuda")
    check_add_rms_norm(norm, tokens, size, dtype, torch.float32, device="cuda")


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("size", [2048, 100])
@pytest.mark.parametrize("tokens", [1, 3000])
def test_norms_with_float32_weights_of_a_narrow_model(
    tokens: int, size: int, out_dtype: torch.dtype | None
) -> None:
    narrow, wide = torch.bfloat16, torch.float32
    check_rms_norm(norm, (tokens, size), narrow, wide, out_dtype, device="cuda")
    check_rms_norm(norm, (tokens, 18, 256), narrow, wide, out_dtype, device="cuda")
    check_add_rms_norm(norm, tokens, size, narrow, narrow, wide, out_dtype, device="cuda")
    check_add_rms_norm(norm, tokens, size, narrow, wide, wide, out_dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim"), [(32, 128), (8, 64), (1, 96)])
def test_norm_of_heads(heads: int, head_dim: int, dtype: torch.dtype) -> None:
    check_rms_norm(norm, (777, heads, head_dim), dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("groups", "size"), [(8, 1024), (1, 3072), (8, 512), (32, 128), (3, 80)])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("tokens", [1, 32, 3000])
def test_gated_norm(
    tokens: int, norm_first: bool, groups: int, size: int, dtype: torch.dtype
) -> None:
    for gate in ("silu", "sigmoid"):
        check_gated_rms_norm(norm, tokens, groups, size, dtype, norm_first, "cuda", gate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", activation.ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "columns"), [(1, 21504), (32, 512), (3000, 21504), (7, 100)])
def test_activate(name: str, gated: bool, tokens: int, columns: int, dtype: torch.dtype) -> None:
    check_activate(activation, name, gated, tokens, columns, dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_and_what_they_are_multiplied_with_may_be_capped(dtype: torch.dtype) -> None:
    check_activate(activation, CAPPED, True, 3000, 2304, dtype, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vectors_are_shortened(dtype: torch.dtype) -> None:
    for heads, size in ((48, 128), (48, 16), (3, 100)):
        check_l2_clip(norm, (3000, heads, size), dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", activation.ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "columns"), [(1, 4096), (3000, 4096), (7, 100)])
def test_gate(name: str, tokens: int, columns: int, dtype: torch.dtype) -> None:
    check_gate(activation, name, tokens, columns, dtype, device="cuda")


@pytest.mark.parametrize("sections", [(256, 16, 16), (128, 16, 16), (12, 5, 7)])
@pytest.mark.parametrize("tokens", [1, 300])
def test_norms_of_parts(tokens: int, sections: tuple[int, int, int]) -> None:
    check_rms_norm_parts(norm, tokens, sections, torch.bfloat16, "cuda")
