"""Sliding windows on a GPU: kernels against float64, and what LFM3-1.7B's shape holds of a long
request.

    python -m pytest -m gpu -s tests/gpu/test_windows_gpu.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hybrid import LLM, EngineConfig, SamplingParams
from megatron_hybrid.cache.geometry import GIB
from tests.kernels.attention_cases import WINDOW_LENGTHS, check_windows

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
CONFIG = Path(__file__).parents[2] / "configs/lfm3-1.7b.yaml"
LONG = 65_536


def make(name: str) -> Any:
    if name == "by split":
        from megatron_hybrid.kernels.paged_attention.triton_by_split import SplitAttention

        return SplitAttention()
    from tests.gpu.test_attention_gpu import make as others

    return others(name)


@pytest.mark.parametrize("name", ["flashinfer", "3 own", "triton", "by split"])
@pytest.mark.parametrize("kv_dtype", [BF16, torch.float8_e4m3fn])
def test_a_token_sees_a_window(name: str, kv_dtype: torch.dtype) -> None:
    """Decodes, prompts and both; beside shapes without a window, whose plans the same kernels
    have."""
    attention = make(name)
    lengths = [*WINDOW_LENGTHS[:7], *WINDOW_LENGTHS[7:], (700, 3000)]
    sizes = {"heads": 16, "kv_heads": 4, "head_dim": 128, "block_size": 64, "kv_dtype": kv_dtype}
    where = {"tolerance": 2e-2, "device": "cuda", "dtype": BF16}
    for windows in ([256], [1, 64, 100], [4096]):
        check_windows(attention, lengths, windows, decodes=7, **where, **sizes)
        check_windows(attention, lengths[:7], windows, decodes=7, **where, **sizes)
        check_windows(attention, lengths[7:], windows, decodes=0, **where, **sizes)


def test_what_a_request_of_65536_tokens_holds() -> None:
    """Of LFM3-1.7B's shape: KV of all tokens, and a few blocks of its windows."""
    llm = LLM(config=EngineConfig.from_yaml(CONFIG))
    engine, geometry = llm.engine, llm.engine.context.geometry
    prompt = torch.randint(0, 120_000, (LONG,)).tolist()
    engine.add_request("long", prompt, SamplingParams(temperature=0.0, max_tokens=40))
    most = 0
    while engine.has_work():
        engine.step()
        use = engine.context.cache.occupancy()
        if engine.context.rows.decoding.any():
            most = max(most, use.window_used)
            kv = use.kv_used
    whole, windows = kv * geometry.bytes_per_block, most * geometry.bytes_per_window_block
    print(f"{LONG} tokens: {whole / GIB:.3f} GiB of KV, {windows / GIB:.4f} GiB of windows")
    in_full = LONG // geometry.block_size * geometry.bytes_per_window_block
    print(f"windows in ordinary blocks: {in_full / GIB:.3f} GiB")
    assert 0 < most <= geometry.window_quota and kv >= LONG // geometry.block_size
    answer = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=4), progress=False)
    assert answer[0].cached_tokens == LONG
