"""Which blocks each pipeline stage has, what they hand on, and how their memory is divided: all
stages in one process."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_hybrid import EngineConfig
from megatron_hybrid.cache.geometry import GIB, CacheGeometry
from megatron_hybrid.engine.sizing import StageLayers, derive_geometry
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.execution.pipeline import PipelineStage
from megatron_hybrid.kernels.norm import reference as norm
from megatron_hybrid.layers.inputs import KVSpec, StateSpec
from megatron_hybrid.models import stages
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.checkpoints.weights import load_model
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.stages import split_evenly
from megatron_hybrid.parallel import ParallelContext, initialize
from tests.models.driver import Driver, Segment
from tests.parallel.worker import mixed_steps
from tests.thorough import A_THIRD
from tests.tiny_models import make_tiny_model

# ------------------------------------------------------------------- the split


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 4), st.integers(0, 30))
def test_the_largest_stage_is_as_small_as_can_be(sizes: list[int], stages: int, ends: int) -> None:
    count = len(sizes)
    stages = min(stages, count)

    def size(start: int, end: int) -> int:
        return sum(sizes[start:end]) + ends * ((start == 0) + (end == count))

    def merit(bounds: tuple[int, ...]) -> tuple[int, int]:
        each = [size(start, end) for start, end in itertools.pairwise(bounds)]
        return max(each), sum(one * one for one in each)

    found = split_evenly(count, stages, size)
    assert len(found) == stages and all(found)
    assert [*itertools.chain(*found)] == list(range(count))
    every = (
        merit((0, *cuts, count)) for cuts in itertools.combinations(range(1, count), stages - 1)
    )
    assert merit((0, *(blocks.stop for blocks in found))) == min(every)


@pytest.fixture(scope="module")
def alone() -> ParallelContext:
    """The groups stay: other tests of this process use them too."""
    return initialize()


def places(alone: ParallelContext, stages: int) -> list[ParallelContext]:
    """Of each stage of a pipeline, in groups that nobody else is in."""
    found = []
    for rank in range(stages):
        group = copy(alone.pipeline)
        group.rank, group.size = rank, stages
        found.append(replace(alone, pipeline=group))
    return found


def shapes(folder: Path, place: ParallelContext) -> HybridModel:
    config = ModelFolder.open(folder).config
    with torch.device("meta"):
        return HybridModel(config, place, torch.float32, torch.float32, torch.float32)


def test_no_stage_begins_with_attention_that_shares_an_index(
    tmp_path: Path, alone: ParallelContext
) -> None:
    layers = ["indexed_attention"] * 5
    indexers = ["full", "shared", "shared", "full", "shared"]
    make_tiny_model(
        "glm5_next", tmp_path, num_hidden_layers=5, layer_types=layers, indexer_types=indexers
    )
    for count in (1, 2, 3):
        blocks = shapes(tmp_path, places(alone, count)[0]).stages.blocks
        pattern = ModelFolder.open(tmp_path).config.pattern
        assert pattern == "D-JEJEDEJE"
        for own in blocks:
            assert pattern[own.start : own.stop].strip("-E")[:1] in ("D", "")
    with pytest.raises(ConfigurationError, match=r"is 9, but then some stage would begin with"):
        shapes(tmp_path, places(alone, 9)[0])


def bytes_of(model: HybridModel) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters())


def test_embedding_and_head_count(tmp_path: Path, alone: ParallelContext) -> None:
    """With a large vocabulary most blocks are in the middle, with a small one they are not."""
    lengths = {}
    for vocab in (16, 4000):
        make_tiny_model("llama", tmp_path, num_hidden_layers=6, vocab_size=vocab)
        models = [shapes(tmp_path, place) for place in places(alone, 3)]
        lengths[vocab] = [len(model.stage) for model in models]
        assert sum(map(bytes_of, models)) == bytes_of(shapes(tmp_path, alone))
        assert [model.embedding is not None for model in models] == [True, False, False]
        assert [model.lm_head is not None for model in models] == [False, False, True]
    assert lengths == {16: [4, 4, 4], 4000: [1, 10, 1]}


@pytest.mark.parametrize("family", ["zamba2", "granite_moe_hybrid", "nemotron_h"])
def test_stages_are_weighed_by_what_they_hold(
    family: str, tmp_path: Path, alone: ParallelContext
) -> None:
    """Copies of shared blocks and tied heads too; only the final norm is left out."""
    make_tiny_model(family, tmp_path)
    with patch.object(stages, "split_evenly", wraps=split_evenly) as split:
        for place in places(alone, 2):
            model = shapes(tmp_path, place)
            size = split.call_args.args[2]
            norm = 64 * 4 if model.is_last_stage else 0
            assert size(model.stage.start, model.stage.stop) == bytes_of(model) - norm


def test_more_stages_than_blocks_are_refused(tmp_path: Path, alone: ParallelContext) -> None:
    make_tiny_model("nemotron_h", tmp_path)
    shapes(tmp_path, places(alone, 5)[4])
    with pytest.raises(
        ConfigurationError, match=r"-size is 6, but the model has only 5 blocks \(M"
    ):
        shapes(tmp_path, places(alone, 6)[0])


# ------------------------------------------------------------------- the weights


@pytest.mark.parametrize("family", ["zamba2", "granite_moe_hybrid"])
def test_stages_hold_the_weights_of_the_whole(
    family: str, tmp_path: Path, alone: ParallelContext
) -> None:
    """Copies too: of a head that is tied to the embedding, and of blocks that several layers share,
    which each stage that uses them has once."""
    make_tiny_model(family, tmp_path)
    whole = weights(dummy(tmp_path, alone))
    stages = [weights(dummy(tmp_path, place)) for place in places(alone, 2)]
    for stage in stages:
        for name, weight in stage.items():
            assert torch.equal(weight, whole[name]), name
    assert set().union(*stages) == set(whole)
    both = set(stages[0]) & set(stages[1])
    assert (None, "embedding") in both
    assert any(name.startswith("transformer.mlp.up_proj") for _, name in both) == (
        family == "zamba2"
    )


def dummy(folder: Path, place: ParallelContext, dtype: str = "float32") -> HybridModel:
    return load_model(
        folder, device=torch.device("cpu"), dtype=dtype, parallel=place, load_format="dummy"
    )


def weights(model: HybridModel) -> dict[tuple[int | None, str], Tensor]:
    found: dict[tuple[int | None, str], list[Tensor]] = {}
    for block, part in model.weight_parts():
        found.setdefault((block, part.role), []).append(part.target)
    return {name: torch.cat([p.flatten() for p in parts]) for name, parts in found.items()}


# ------------------------------------------------------------------- a step


class Mailbox:
    """The pipeline's group as one stage sees it, all of whose messages are kept in order."""

    def __init__(self, rank: int, messages: dict[tuple[int, int], deque[Tensor]]) -> None:
        self.rank = rank
        self._messages = messages

    def send(self, tensor: Tensor, destination: int) -> None:
        assert tensor.numel() > 0
        self._messages.setdefault((self.rank, destination), deque()).append(tensor.clone())

    def receive(self, tensor: Tensor, source: int) -> Tensor:
        return tensor.copy_(self._messages[source, self.rank].popleft())


class AllStages:
    """What the tests' driver takes for a model: every stage in turn, in one process."""

    def __init__(self, models: list[HybridModel]) -> None:
        messages: dict[tuple[int, int], deque[Tensor]] = {}
        self.stages = []
        for rank, model in enumerate(models):
            stage = PipelineStage(model, torch.device("cpu"), 200)
            stage._ranks = Mailbox(rank, messages)  # type: ignore[assignment]
            self.stages.append((model, stage))
        self.kv_specs: dict[int, KVSpec] = {}
        self.state_specs: dict[int, StateSpec] = {}
        for model in models:
            self.kv_specs |= model.kv_specs
            self.state_specs |= model.state_specs

    @torch.inference_mode()
    def forward(self, inputs: Any, caches: Any) -> Tensor:
        logits = torch.empty(0)
        for model, stage in self.stages:
            step = model.plan(inputs, caches)
            stage.receive(inputs)
            logits = stage.compute(inputs, step)
            stage.send(inputs)
            assert logits.shape == (len(inputs.logits_index), 160 if model.is_last_stage else 0)
        return logits


class Overwriting:
    """Norms that leave the sum where the residual was, as the GPU's do."""

    rms_norm = staticmethod(norm.rms_norm)
    gated_rms_norm = staticmethod(norm.gated_rms_norm)

    @staticmethod
    def add_rms_norm(x: Tensor, residual: Tensor, *constants: Any) -> tuple[Tensor, Tensor]:
        normed, total = norm.add_rms_norm(x, residual, *constants)
        return normed, residual.copy_(total)


@A_THIRD
@pytest.mark.parametrize(
    ("family", "dtype", "overrides"),
    [
        ("nemotron_h", "bfloat16", {"residual_in_fp32": True}),
        ("granite_moe_hybrid", "float32", {}),
        ("qwen4_exp", "float32", {}),
        # whose routers hand states over, in whatever stages they are
        ("zaya", "bfloat16", {"residual_in_fp32": True, "num_hidden_layers": 3}),
        (
            "zamba2",
            "float32",
            {"layers_block_type": ["linear_attention"] * 3 + ["hybrid", "linear_attention"]},
        ),
    ],
)
def test_any_number_of_stages_gives_the_logits_of_one(
    family: str, dtype: str, overrides: dict[str, Any], tmp_path: Path, alone: ParallelContext
) -> None:
    """Bit by bit; also where norms overwrite the residual, which may be the embeddings."""
    make_tiny_model(family, tmp_path, **({"num_hidden_layers": 5} if overrides else {}) | overrides)
    model = dummy(tmp_path, alone, dtype)
    expected = mixed_steps(model)
    assert expected.float().std() > 0.1
    assert model.config.residual_in_fp32 == ("residual_in_fp32" in overrides)
    for count in (1, 2, 3, len(model.config.pattern)):
        models = [dummy(tmp_path, place, dtype) for place in places(alone, count)]
        for stage in models:
            stage.kernels = replace(stage.kernels, norm=Overwriting)
        assert torch.equal(mixed_steps(AllStages(models)), expected), count  # type: ignore[arg-type]


def test_only_the_rows_asked_for_are_handed_on_past_the_last_mixing_block(
    tmp_path: Path, alone: ParallelContext
) -> None:
    """No message at all where none is."""
    make_tiny_model("nemotron_h", tmp_path)  # M-*M-
    models = [dummy(tmp_path, place) for place in places(alone, 5)]
    stages = AllStages(models)
    sent: list[list[int]] = []
    for _, stage in stages.stages[:-1]:
        box: Any = stage._ranks
        sizes: list[int] = []
        sent.append(sizes)

        def noted(tensor: Tensor, destination: int, box: Any = box, sizes: Any = sizes) -> None:
            sizes.append(tensor.numel() // (2 * 64 * 4))
            Mailbox.send(box, tensor, destination)

        box.send = noted
    driver = Driver(stages)  # type: ignore[arg-type]
    for wanted in ([19], []):
        driver.step([Segment(driver.sequence(), list(range(20)))], wanted)
    assert sent == [[20, 20], [20, 20], [20, 20], [1]]


# ------------------------------------------------------------------- the memory


KV = KVSpec(num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
STATE = StateSpec((10240, 3), torch.bfloat16, (128, 64, 128), torch.float32, kernel_chunk=128)
OTHER = replace(STATE, kernel_chunk=96)
VOCABULARY = 131072
BUFFER = "inference_dynamic_batching_buffer_size_gb"
STATES = "inference_dynamic_batching_prefix_caching_mamba_gb"


def together(
    stages: list[StageLayers], memory: list[int | None], **options: Any
) -> list[CacheGeometry | ConfigurationError]:
    """What each stage makes of its memory, with the smallest values of all."""
    barrier, values = threading.Barrier(len(stages), timeout=20), [0] * len(stages)
    whole_kv = [spec for stage in stages for spec in stage.kv_specs]
    whole_states = [spec for stage in stages for spec in stage.state_specs]
    found: list[Any] = [None] * len(stages)

    def run(rank: int) -> None:
        def minimum(value: int) -> int:
            values[rank] = value
            barrier.wait()
            least = min(values)
            barrier.wait()
            return least

        try:
            found[rank] = derive_geometry(
                EngineConfig(**options),
                whole_kv,
                whole_states,
                VOCABULARY,
                memory[rank] or 64 * GIB,
                on_gpu=memory[rank] is not None,
                minimum=minimum,
                stage=stages[rank],
            )
        except ConfigurationError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(stages))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


MIXED = [StageLayers([KV] * 2, [STATE] * 14, False), StageLayers([KV] * 2, [OTHER] * 10, True)]
APART = [StageLayers([], [STATE] * 4, False), StageLayers([KV] * 4, [], True)]
APART_TOO = [StageLayers([KV] * 4, [], False), StageLayers([], [STATE] * 4, True)]
ATTENTION = [StageLayers([KV] * 8, [], False), StageLayers([KV] * 8, [], True)]
RECURRENT = [StageLayers([], [STATE] * 8, False), StageLayers([], [STATE] * 8, True)]


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("layers", [MIXED, APART, APART_TOO, ATTENTION, RECURRENT])
def test_all_stages_decide_by_one_geometry_that_fits_each(
    layers: list[StageLayers], gpu: bool
) -> None:
    gigabytes = [60, 50] if gpu else [None, None]
    memory = [None if size is None else size * GIB for size in gigabytes]
    sizes = {} if gpu else {BUFFER: 20.0, STATES: 10.0}
    first, second = together(layers, memory, **sizes)
    assert isinstance(first, CacheGeometry) and first == second
    has_kv = any(stage.kv_specs for stage in layers)
    has_states = any(stage.state_specs for stage in layers)
    assert (first.has_attention, first.has_recurrent) == (has_kv, has_states)
    assert first.kernel_chunk == (384 if layers is MIXED else 128 if has_states else 1)
    assert first.bytes_per_logits == 4 * VOCABULARY
    assert first.num_cached_slots > 0 and (first.num_blocks > 1000) == has_kv
    left = []  # of the memory for KV and live states, in blocks
    for stage, limit in zip(layers, memory, strict=True):
        block = 64 * sum(spec.bytes_per_token() for spec in stage.kv_specs)
        slot = sum(spec.bytes_per_slot() for spec in stage.state_specs)
        slot += first.bytes_per_logits * stage.has_logits
        used = (first.num_blocks + 1) * block + first.num_slots * slot
        assert used <= (30 * GIB if limit is None else limit)
        if limit is None and block:
            kept = first.num_slots if not has_states else first.max_requests
            left.append((20 * GIB - kept * slot) / block - first.num_blocks - 1)
    assert not left or 0 <= min(left) < 1


def test_a_stage_without_room_says_so_and_the_others_refuse_with_it() -> None:
    requests = {"inference_dynamic_batching_max_requests": 4}
    stages = [StageLayers([KV], [STATE], False), StageLayers([KV] * 9, [STATE] * 100, True)]
    first, second = together(stages, [None, None], **requests, **{BUFFER: 1.0})
    assert "no KV block on another rank" in str(first)
    assert "is 1.0000, which leaves no KV block beside the live states of 4" in str(second)
    larger = together(stages, [None, None], **requests, **{BUFFER: 3.0})
    assert all(isinstance(geometry, CacheGeometry) for geometry in larger)
