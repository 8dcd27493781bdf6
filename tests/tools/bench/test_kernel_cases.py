"""What tools/benchmark_kernels.py times."""

from __future__ import annotations

import numpy as np
import pytest

from bench.kernel_cases import kernel_cases
from bench.recurrent_kinds import recurrent_kinds
from tests.tools.bench.benches import CONFIGS, bench_of


def test_a_model_with_shared_transformers_has_all_its_cases() -> None:
    names = {case.name for case in kernel_cases(bench_of("zamba2-2.7b"))}
    assert names >= {"scan", "layer prefill", "spared writes", "draw"}


def test_a_layer_without_a_convolution_has_the_cases_of_its_scan() -> None:
    names = {case.name for case in kernel_cases(bench_of("ring-mini-linear-2.0"))}
    assert "scan" in names and "layer prefill" not in names
    assert not any(name.startswith("conv") for name in names)


def test_heads_of_convolved_attention_have_theirs() -> None:
    cases = list(kernel_cases(bench_of("zaya1-8b")))
    assert [case.shape for case in cases if case.name == "convolved heads"] == [
        "1 tokens", "20 tokens",
    ]  # fmt: skip


@pytest.mark.parametrize("model", sorted(folder.name for folder in CONFIGS.iterdir()))
def test_the_layers_of_a_kind_are_counted_in_all_their_blocks(model: str) -> None:
    bench = bench_of(model)
    pattern = bench.model.pattern
    for kind in recurrent_kinds(bench.model, bench.kernels, bench.device, bench.dtype):
        without = pattern
        for letter in "MHZ" if kind.letter == "M" else kind.letter:
            without = without.replace(letter, "")
        assert kind.layers(pattern) == len(pattern) - len(without) > 0


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8, 256])
def test_a_usual_step_has_sequences_in_all_phases(batch: int) -> None:
    runs = bench_of("nemotron-h-8b").usual_runs(batch, 4)
    unfolded = runs.unfolded.numpy()
    assert ((runs.write_slot > 0).numpy() == (unfolded == 3)).all()
    assert runs.most_unfolded == 3
    counts = np.bincount(unfolded, minlength=4)
    assert counts.max() - counts.min() <= 1
    assert abs(unfolded.mean() - 1.5) <= 0.5
