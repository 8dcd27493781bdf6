"""Embeddings of n-grams: where a checkpoint has their table, what hashes are made of, texts that
end within a text, and what stays on the host."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine import build_tables
from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.weight_shares import weight_shares
from megatron_hybrid.parallel import ParallelContext
from tests.models.conftest import TinyModel, load, random_tokens
from tests.models.driver import run_in_segments
from tests.tiny_models import make_tiny_model

Tiny = Callable[[str], TinyModel]
TABLE = "model.layers.0.ple.ple_embedding.ngram_embedding"
END = 7  # of the tiny model
FP8 = torch.float8_e4m3fn


def close(actual: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual, expected, atol=2e-5 * scale, rtol=2e-5)


def changed(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    make_tiny_model("qwen4_exp", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("lengths", [[], [20, 28, 1], [1] * 12, [2, 3, 5, 7, 11, 13]])
def test_nothing_is_seen_past_an_end_within_a_text(tiny: Tiny, lengths: list[int]) -> None:
    """In whole prompts, and where they are cut and a step has one token: before, at, and behind
    such an end."""
    model, tokens = tiny("qwen4_exp"), random_tokens(75)
    for place in (0, 1, 5, 8, 9, 19, 20, 21, 47, 48, 49, 60, 61, 62):
        tokens[place] = END
    close(run_in_segments(model.ours, tokens, lengths), model.expected(tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ids_are_kept_exactly_in_windows_of_any_type(
    tmp_path: Path, parallel: ParallelContext, dtype: torch.dtype
) -> None:
    """Ids of up to three bytes: other n-grams would give other numbers altogether."""
    model = TinyModel("qwen4_exp", tmp_path, parallel, vocab_size=70_000, eos_token_id=65_543)
    ours = load(tmp_path, parallel, conv_states_dtype=dtype)
    tokens = [(9973 * i * i + 77) % 70_000 for i in range(40)]
    tokens[8] = tokens[19] = 65_543
    found, expected = run_in_segments(ours, tokens, [1] * 39), model.expected(tokens)
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, atol=0.03 * scale, rtol=0)


def test_a_table_in_one_piece_is_that_of_its_shards(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext
) -> None:
    """... whose last one is smaller than the others."""

    def join(tensors: dict[str, Tensor]) -> None:
        for layer in (0, 2):
            table = TABLE.replace("0", str(layer), 1)
            names = [f"{table}.shard_{i}.weight" for i in range(5)]
            assert len(tensors[names[4]]) < len(tensors[names[0]])
            tensors[f"{table}.weight"] = torch.cat([tensors.pop(name) for name in names])

    changed(tmp_path, join)
    model, tokens = tiny("qwen4_exp"), random_tokens(30)
    close(run_in_segments(load(tmp_path, parallel), tokens, []), model.expected(tokens))


def test_a_table_in_fp8_has_one_scale(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext
) -> None:
    """As the released checkpoints in FP8 have it; the same numbers in 32 bits are the oracle."""

    def rounded(tensors: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        names = [name for name in tensors if ".shard_" in name]
        scales = {name: torch.tensor([0.013 + 0.1 * ("layers.2" in name)]) for name in names}
        return {n: ((tensors[n] / scales[n]).to(torch.float8_e4m3fn), scales[n]) for n in names}

    def in_fp8(tensors: dict[str, Tensor]) -> None:
        for name, (codes, scale) in rounded(tensors).items():
            tensors[name] = codes
            tensors[re.sub(r"shard_\d+\.weight", "weight_scale", name)] = scale

    def in_32_bits(tensors: dict[str, Tensor]) -> None:
        for name, (codes, scale) in rounded(tensors).items():
            tensors[name] = codes.float() * scale

    tokens, found = random_tokens(30), []
    for i, change in enumerate((in_fp8, in_32_bits)):
        (tmp_path / str(i)).mkdir()
        changed(tmp_path / str(i), change)
        found.append(run_in_segments(load(tmp_path / str(i), parallel), tokens, []))
    assert torch.equal(*found)
    with pytest.raises(AssertionError):
        close(found[0], tiny("qwen4_exp").expected(tokens))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{TABLE}.shard_3.weight"), "shard_3.weight' is missing"),
        (
            lambda t: t.update({f"{TABLE}.shard_3.weight": torch.zeros(9, 12)}),
            r"shard_3.weight' has shape \[9, 12\]",
        ),
        (
            lambda t: t.update({f"{TABLE}.weight_scale": torch.ones(1)}),
            "weight_scale' .* has no place",
        ),
        (
            lambda t: t.update({f"{TABLE}.shard_3.weight": t[f"{TABLE}.shard_3.weight"].to(FP8)}),
            "shard_3.weight' .* is torch.float8_e4m3fn, but it has no scale",
        ),
        (
            lambda t: t[TABLE.replace("ngram_embedding", "layer_multipliers")].add_(2),
            "layer_multipliers' .* holds other numbers than the configuration",
        ),
        (
            lambda t: t[TABLE.replace("ngram_embedding", "ngram_heads_offsets")].add_(1),
            "ngram_heads_offsets' .* holds other numbers",
        ),
    ],
)
def test_what_does_not_fit_the_configuration_is_refused(
    change: Callable[[dict[str, Tensor]], None],
    message: str,
    tmp_path: Path,
    parallel: ParallelContext,
) -> None:
    changed(tmp_path, change)
    with pytest.raises(WeightsError, match=message):
        load(tmp_path, parallel)


def test_hashes_need_not_be_in_the_checkpoint(
    tiny: Tiny, tmp_path: Path, parallel: ParallelContext
) -> None:
    def leave_out(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if re.search("multipliers|ngram_heads", n)]:
            del tensors[name]

    changed(tmp_path, leave_out)
    model, tokens = tiny("qwen4_exp"), random_tokens(30)
    close(run_in_segments(load(tmp_path, parallel), tokens, []), model.expected(tokens))


def test_tables_on_the_host_are_no_weights_of_the_device(
    tiny: Tiny, parallel: ParallelContext
) -> None:
    config, sizes = ModelFolder.open(tiny("qwen4_exp").folder).config, []
    for on_host in (False, True):
        with torch.device("meta"):
            kinds = (torch.float32,) * 3
            model = HybridModel(config, parallel, *kinds, tables_on_host=on_host)
        found = model.weight_bytes()
        sizes.append(sum(weight.nbytes for weight in model.parameters()))
        name = "float32, tables of n-grams" + " on the host" * on_host
        assert sum("tables" in kind for kind in found) == 1
        assert sizes[0] == sizes[-1] + on_host * found[name]
        assert sum(found.values()) == sizes[0]
        shares = list(weight_shares(model))
        assert sum(one.bytes for one in shares) == sizes[0]
        rows = [one for one in shares if one.chosen == 8]  # of a token
        assert [one.read_by(1) for one in rows] == [pytest.approx(8 * 12 * 4)] * 2


def test_the_flag_is_refused_where_it_means_nothing_or_does_not_fit(
    tiny: Tiny, parallel: ParallelContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shapes(family: str) -> HybridModel:
        config = ModelFolder.open(tiny(family).folder).config
        with torch.device("meta"):
            return HybridModel(config, parallel, *(torch.float32,) * 3, tables_on_host=True)

    config = EngineConfig(ngram_embeddings_on_host=True)
    build_tables.check_tables(config, shapes("qwen4_exp"))
    with pytest.raises(ConfigurationError, match=r"\(llama\) has no embeddings of n-grams"):
        build_tables.check_tables(config, shapes("llama"))
    build_tables.check_tables(EngineConfig(), shapes("llama"))
    monkeypatch.setattr(build_tables, "available_memory", lambda: 1000)
    with pytest.raises(ConfigurationError, match=r"0\.00 GB of the host's memory are left"):
        build_tables.check_tables(config, shapes("qwen4_exp"))
    both = EngineConfig(ngram_embeddings_on_host=True, prefix_caching_host_gb=2.5)
    monkeypatch.setattr(build_tables, "available_memory", lambda: 2**31)
    build_tables.check_tables(config, shapes("qwen4_exp"))
    with pytest.raises(ConfigurationError, match=r"GB and --prefix-caching-host-gb 2\.5; 2\.00 GB"):
        build_tables.check_tables(both, shapes("qwen4_exp"))
    assert build_tables.on_host(config, torch.device("cuda"))
    assert not build_tables.on_host(config, torch.device("cpu"))
