"""Models with several kinds of recurrent layers, and the states that chunked prefill leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_hybrid import LLM, RequestOutput, SamplingParams
from megatron_hybrid.layers.attention import AttentionConfig
from megatron_hybrid.layers.gated_delta_net import GatedDeltaNetConfig
from megatron_hybrid.layers.mamba1 import Mamba1Config
from megatron_hybrid.layers.mamba2 import Mamba2Config
from megatron_hybrid.layers.mlp import MLPConfig
from megatron_hybrid.layers.short_conv import ShortConvConfig
from megatron_hybrid.models.config import HybridModelConfig
from megatron_hybrid.models.families import registry as families
from megatron_hybrid.models.families.family import Family, Location
from megatron_hybrid.models.families.raw_config import RawConfig
from tests.thorough import A_THIRD, combined
from tests.tiny_models import make_tiny_model

PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=1)
OPTIONS = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_buffer_size_gb": 0.02,
    "inference_dynamic_batching_max_requests": 24,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.02,
}


class EveryKind(Family):
    """One layer of each kind. Kernel chunks of 16, 24 and 12 tokens."""

    model_types = ("every_kind",)

    def config(self, raw: RawConfig) -> HybridModelConfig:
        return HybridModelConfig(
            **raw.common(),
            pattern=str(raw.require("pattern")),
            norm_eps=1e-5,
            attention=AttentionConfig(4, 2, 16, scale=0.25),
            mlp=MLPConfig(96, gated=True, activation="silu"),
            mamba1=Mamba1Config(inner_size=128, state_size=16, dt_rank=4, conv_width=4),
            mamba=Mamba2Config(8, 16, 16, 2, conv_width=3, kernel_chunk=24),
            gated_delta_net=GatedDeltaNetConfig(2, 4, 16, 16, conv_width=4, kernel_chunk=12),
            short_conv=ShortConvConfig(conv_width=3),
        )

    def locate(self, config: HybridModelConfig, block: int, role: str) -> list[Location]:
        raise AssertionError("weights are random")


def model_folder(folder: Path, pattern: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(families.BY_MODEL_TYPE, "every_kind", EveryKind())
    values = {"model_type": "every_kind", "vocab_size": 160, "hidden_size": 64, "pattern": pattern}
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 160, (count,), generator=generator).tolist()


@pytest.fixture(scope="module")
def known() -> dict[str, list[RequestOutput]]:
    """What an engine without a cache answers, by pattern."""
    return {}


PATTERNS = [("S*M-GC", 48), ("SC", 16), ("GC", 48), ("CM-", 48), ("C-", 16)]
WAYS: dict[str, dict[str, object]] = {
    "extract": {},
    "break": {"prefill_checkpoint_mode": "break"},
    "chunked": {"inference_dynamic_batching_max_tokens": 41},
    "on the grid": {"inference_dynamic_batching_prefix_caching_exact_ends": False},
}


@A_THIRD
@pytest.mark.parametrize(("of", "way"), combined(3, PATTERNS, WAYS), ids=str)
def test_kinds_share_slots_on_their_common_grid(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of: tuple[str, int],
    way: str,
    known: dict[str, list[RequestOutput]],
) -> None:
    pattern, grid = of
    folder = model_folder(tmp_path, pattern, monkeypatch)
    text = random_tokens(150)
    prompts = [text[: 90 + n] for n in range(0, 48, 5)] + [text[:60] + random_tokens(40, 1)]

    def make(**options: object) -> LLM:
        return LLM(folder, load_format="dummy", **(OPTIONS | options))  # type: ignore[arg-type]

    if pattern not in known:
        plain = make(inference_dynamic_batching_prefix_caching=False)
        known[pattern] = [plain.generate([prompt], PARAMS)[0] for prompt in prompts]
    expected = known[pattern]
    llm = make(**WAYS[way])
    geometry = llm.engine.context.geometry
    assert geometry.grid == grid
    assert geometry.has_attention == ("*" in pattern)
    for _ in range(2):
        outputs = llm.generate(prompts, PARAMS)
        llm.engine.check_integrity()
        for output, truth in zip(outputs, expected, strict=True):
            assert output.token_ids == truth.token_ids
            for one, other in zip(output.logprobs or [], truth.logprobs or [], strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    on_grid = "inference_dynamic_batching_prefix_caching_exact_ends" in WAYS[way]
    for output in outputs:  # the second time
        length = len(output.prompt_token_ids)
        assert output.cached_tokens == ((length - 1) // grid * grid if on_grid else length)


@A_THIRD
@pytest.mark.parametrize("family", ["falcon_mamba", "jamba", "mamba2", "qwen3_5", "lfm2"])
def test_a_prompt_in_two_chunks_leaves_the_state_of_one_pass(tmp_path: Path, family: str) -> None:
    """2,966 tokens as 1,866 and 1,100, in blocks of 2,048: the state at 2,048 lies in the second
    chunk, which begins inside a kernel chunk."""
    make_tiny_model(family, tmp_path, max_position_embeddings=4096)
    prompt = random_tokens(2966)
    key, found = None, []
    for budget in (4096, 1866):
        llm = LLM(
            str(tmp_path),
            inference_dynamic_batching_block_size=2048,
            inference_dynamic_batching_buffer_size_gb=0.05,
            inference_dynamic_batching_max_tokens=budget,
            inference_dynamic_batching_max_requests=4,
            inference_dynamic_batching_prefix_caching_mamba_gb=0.02,
            inference_dynamic_batching_prefix_caching_exact_ends=False,
        )
        llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
        cache, caches = llm.engine.context.cache, llm.engine.runner._caches  # type: ignore[attr-defined]
        (state,) = (state for state in cache.states.cached() if state.position == 2048)
        key = key or state.key
        assert state.key == key
        found.append(
            [
                getattr(layer, name)[state.slot].clone()
                for layer in caches.state.values()
                for name in ("conv", "ssm")
            ]
        )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
        assert one.numel() == 0 or one.abs().max() > 0.01
