"""Our calls of mamba-ssm and causal-conv1d, with stand-ins for these, against our reference.

tests/gpu/test_libraries_gpu.py has the same with the libraries themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.engine import build
from megatron_hybrid.kernels import kernel_set
from megatron_hybrid.kernels.contract import DecodeSlots
from megatron_hybrid.kernels.protocols import Gates
from megatron_hybrid.kernels.refused_runs import refuse_runs
from megatron_hybrid.kernels.whole_segments import UpdatedSlots, WholeSegments
from tests.kernels import library_stand_ins
from tests.kernels.library_cases import (
    IN_PLACE,
    KINDS,
    MIXED,
    SEGMENTS,
    Case,
    check_decode,
    check_prefill,
)
from tests.kernels.segments import Segment, int64, prefill_segments
from tests.tiny_models import make_tiny_model

BF16, FP32 = torch.bfloat16, torch.float32
# inputs, states, tolerance relative to the largest value
PRECISIONS = pytest.mark.parametrize(
    ("dtype", "state_dtype", "tolerance"),
    [(FP32, FP32, 1e-5), (BF16, FP32, 1e-2), (BF16, BF16, 1e-2), (FP32, BF16, 1e-2)],
)


FAMILIES = ("bamba", "falcon_mamba", "lfm2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of models, by family."""
    found = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, folder in found.items():
        make_tiny_model(family, folder)
    return found


@pytest.fixture(scope="module")
def libraries(folders: dict[str, Path]) -> Iterator[SimpleNamespace]:
    """After transformers' models were made, which would keep the stand-ins for other tests."""
    with pytest.MonkeyPatch.context() as patch:
        yield library_stand_ins.install(patch)


def kernel_of(libraries: SimpleNamespace, kind: str) -> Any:
    names = {"conv": "causal_conv1d", "mamba1": "mamba1_scan"}
    return getattr(libraries, names.get(kind, "mamba2_scan"))


@PRECISIONS
@pytest.mark.parametrize("kind", KINDS)
def test_prompts(
    libraries: SimpleNamespace, kind: str, dtype: torch.dtype, state_dtype: torch.dtype,
    tolerance: float,
) -> None:  # fmt: skip
    case = Case(kind, "cpu", dtype)
    check_prefill(kernel_of(libraries, kind), case, state_dtype, tolerance)


@PRECISIONS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pairs", [IN_PLACE, MIXED], ids=["in place", "mixed"])
def test_decodes(
    libraries: SimpleNamespace, kind: str, pairs: list[tuple[int, int]], dtype: torch.dtype,
    state_dtype: torch.dtype, tolerance: float,
) -> None:  # fmt: skip
    case = Case(kind, "cpu", dtype)
    check_decode(kernel_of(libraries, kind), case, pairs, state_dtype, tolerance)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gates_of_a_convolution_are_products_around_it(
    libraries: SimpleNamespace, dtype: torch.dtype
) -> None:
    """Padding gives zeros all the same."""
    conv, case = libraries.causal_conv1d, Case("conv", "cpu", dtype)
    count = sum(segment.length for segment in SEGMENTS)
    x, before, after = (case.tokens(count + 2) for _ in range(3))
    after[count:] = float("nan")
    state = case.states(dtype)
    other, constants = state.clone(), case.constants
    plan = conv.plan(prefill_segments(SEGMENTS, 1), 4)
    y = conv.prefill(x, constants, state, plan, None, Gates(before, after))
    expected = conv.prefill(x * before, constants, other, plan)
    assert torch.equal(y[:count], expected[:count] * after[:count])
    assert (y[count:] == 0).all()
    assert torch.equal(state[1:], other[1:])

    x, before, after = (case.tokens(len(MIXED)) for _ in range(3))
    after[MIXED.index((0, 0))] = float("nan")
    slots = UpdatedSlots.of(DecodeSlots(int64([r for r, _ in MIXED]), int64([w for _, w in MIXED])))
    y = conv.decode(x, constants, state, slots, None, Gates(before, after))
    expected = conv.decode(x * before, constants, other, slots)
    assert torch.equal(y, (expected * after).nan_to_num())
    assert torch.equal(state[1:], other[1:])


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_refused_by_name(libraries: SimpleNamespace, kind: str) -> None:
    with pytest.raises(NotImplementedError, match="leave out --num-speculative-tokens"):
        kernel_of(libraries, kind).decode_runs(None, None, None, None, None)
    with pytest.raises(NotImplementedError, match="--kernels libraries"):
        refuse_runs(None, 4)


def test_a_state_in_the_middle_of_a_segment_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="after position 16 of a segment that ends at 20"):
        WholeSegments.of(prefill_segments([Segment(0, 20, 0, 1, [(16, 2)])]), 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_breaks_prompts_where_states_are_kept(
    family: str,
    libraries: SimpleNamespace,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the CPU, and so with the stand-ins: the same greedy tokens as the reference's, cold and
    with what is cached."""
    text = torch.randint(0, 160, (70,), generator=torch.Generator().manual_seed(3)).tolist()
    prompts = [text[:50], text, text[:64] + [1, 2, 3], text[:3]]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    options: dict[str, Any] = {
        "inference_dynamic_batching_block_size": 16,
        "inference_dynamic_batching_buffer_size_gb": 0.02,
        "inference_dynamic_batching_max_requests": 8,
        "inference_dynamic_batching_prefix_caching_mamba_gb": 0.02,
        "device": "cpu",
    }

    def answers(llm: LLM) -> list[list[int]]:
        return [output.token_ids for output in llm.generate(prompts, params)]

    expected = answers(LLM(str(folders[family]), **options))
    kernels = replace(
        kernel_set.REFERENCE,
        conv=libraries.causal_conv1d,
        mamba1_scan=libraries.mamba1_scan,
        mamba2_scan=libraries.mamba2_scan,
        plan_decode=UpdatedSlots.of,
        plan_runs=refuse_runs,
        stores_checkpoints=False,
        has_runs=False,
    )
    monkeypatch.setattr(build.kernel_set, "select", lambda *_, **__: kernels)
    llm = LLM(str(folders[family]), **options)
    assert answers(llm) == expected
    assert answers(llm) == expected
    warm = llm.generate([prompts[1]], params)[0]
    assert warm.token_ids == expected[1] and warm.cached_tokens >= 48
