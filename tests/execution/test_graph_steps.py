"""Steps of CUDA graphs, without CUDA: what a graph does is imitated by calling, for every step of a
size, the same function on the same tensors, on kernels that read everything from tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.interpreter  # noqa: F401

if torch.cuda.is_available():
    pytest.skip("the GPU tests replay real graphs", allow_module_level=True)
pytest.importorskip("triton")

from megatron_hybrid.execution.cuda_graphs import GraphSize, smallest_fit  # noqa: E402
from megatron_hybrid.execution.plan import CatchUp, StepDemand, StepResult  # noqa: E402
from megatron_hybrid.execution.runner import ModelRunner  # noqa: E402
from megatron_hybrid.kernels import kernel_set  # noqa: E402
from megatron_hybrid.kernels.experts import few  # noqa: E402
from megatron_hybrid.parallel import ParallelContext  # noqa: E402
from tests.execution.steps import Steps, chunk  # noqa: E402
from tests.models.conftest import TinyModel, load, random_tokens  # noqa: E402
from tests.mtp_models import MTP_FAMILIES, make_mtp_model  # noqa: E402
from tests.thorough import thorough, usually  # noqa: E402

SIZES = [
    GraphSize(2),
    GraphSize(5),
    GraphSize(0, 16, 2, 4),
    GraphSize(4, 16, 2, 4),
    GraphSize(0, 48, 3, 6),
    GraphSize(6, 48, 3, 6),
]
DRAFTS = 3
WITH_DRAFTS = [GraphSize(2), GraphSize(4, drafts=4 * DRAFTS)]


# As few layers and heads as have all that a step has: each takes the interpreter its time.
MIXER = {"mamba_num_heads": 4, "mamba_head_dim": 32}
SMALL: dict[str, dict[str, Any]] = {
    "bamba": {
        "num_hidden_layers": 2,
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
    },
    "nemotron_h_moe": {
        "layers_block_type": ["linear_attention", "moe", "full_attention"],
        **MIXER,
    },
    "nemotron_h": {  # the experts are of a head that drafts
        "layers_block_type": ["linear_attention", "full_attention"],
        "moe_intermediate_size": 8,
        "moe_shared_expert_intermediate_size": 8,
        **MIXER,
    },
    "llama": {"num_hidden_layers": 1},
}


@pytest.fixture(scope="module")
def tiny(
    tmp_path_factory: pytest.TempPathFactory, parallel: ParallelContext
) -> Callable[[str], TinyModel]:
    """The small model of a family, made once."""
    made: dict[str, TinyModel] = {}

    def get(family: str) -> TinyModel:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = TinyModel(family, folder, parallel, **SMALL.get(family, {}))
        return made[family]

    return get


@pytest.fixture(autouse=True)
def large_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer programs of experts: tests/kernels has the sizes that a GPU gets."""
    tiles = few.Tiles(few.Tile(16, 64, 1), few.Tile(64, 64, 4))
    monkeypatch.setattr(few, "choose_tiles", lambda *_: tiles)


class Imitation:
    """Of CudaGraphs."""

    def __init__(self, runner: ModelRunner, sizes: Sequence[GraphSize]) -> None:
        self.steps: dict[GraphSize, Callable[[], Tensor]] = {
            size: runner._prepare_dummy(size) for size in sizes
        }
        self.replays: list[GraphSize] = []

    def choose(self, demand: StepDemand) -> GraphSize | None:
        return smallest_fit(self.steps, demand)

    def replay(self, size: GraphSize) -> Tensor:
        self.replays.append(size)
        return self.steps[size]()


class Both:
    """Every step on the reference without graphs, and on padded steps of the Triton kernels."""

    def __init__(
        self,
        tiny: TinyModel,
        parallel: ParallelContext,
        sizes: Sequence[GraphSize] = SIZES,
        num_drafts: int = 0,
        write_interval: int = 1,
    ) -> None:
        model = copy.copy(tiny.ours)
        model.kernels = kernel_set._gpu()
        self.plain = Steps(tiny.ours, parallel, num_drafts, write_interval)
        self.padded = Steps(model, parallel, num_drafts, write_interval)
        with torch.inference_mode():
            self.graphs = Imitation(self.padded.runner, sizes)
        self.padded.runner._graphs = self.graphs  # type: ignore[assignment]

    def row(self, *args: object, **options: object) -> None:
        self.plain.row(*args, **options)  # type: ignore[arg-type]
        self.padded.row(*args, **options)  # type: ignore[arg-type]

    def step(self, expected: GraphSize | None, **plan: object) -> StepResult:
        self.graphs.replays.clear()
        truth = self.plain.step(**plan)  # type: ignore[arg-type]
        found = self.padded.step(**plan)  # type: ignore[arg-type]
        assert self.graphs.replays == ([] if expected is None else [expected])
        assert found.tokens.tolist() == truth.tokens.tolist()
        assert set(found.logprobs) == set(truth.logprobs)
        for row, entries in found.logprobs.items():
            for entry, other in zip(entries, truth.logprobs[row], strict=True):
                assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
        for ours, theirs in zip(self.tensors(self.padded), self.tensors(self.plain), strict=True):
            torch.testing.assert_close(ours[1:], theirs[1:], atol=2e-4, rtol=2e-4, equal_nan=True)
        return found

    @staticmethod
    def tensors(steps: Steps) -> Iterator[Tensor]:
        """Every cache; block 0 and slot 0 may hold anything."""
        for kv in steps.caches.kv.values():
            yield from (kv.key, kv.value)
        for state in steps.caches.state.values():
            yield from (state.conv, state.ssm)
        yield steps.caches.end_logits


@pytest.mark.parametrize("family", usually(["nemotron_h_moe"], ["bamba", "nemotron_h_moe"]))
def test_padded_steps_compute_what_unpadded_ones_do(
    tiny: Callable[[str], TinyModel], parallel: ParallelContext, family: str
) -> None:
    """One after the other in the same tensors, whose contents are those of the step before."""
    both = Both(tiny(family), parallel)
    prompt, other = random_tokens(37), random_tokens(23, seed=1)
    both.row(0, [3, 9, 4, 0], slot=20)
    end = chunk(0, 0, 37, prompt=prompt, write_slot=20, logits_slot=20, checkpoints=((16, 19),))
    both.step(SIZES[4], prefills=[end])
    for row in range(1, 6):
        both.row(row, [8 + 4 * row, 9 + 4 * row])
    both.row(3, [3, 21])  # the first block is shared with row 0
    both.step(SIZES[0], decodes=[0])
    short = [chunk(1, 0, 9, prompt=other, samples=False), chunk(2, 0, 7, prompt=other)]
    both.step(SIZES[3], decodes=[0], prefills=short)
    # one goes on from its state, one ends and is kept, one is resumed, and a block is copied
    following = chunk(1, 9, 23, prompt=other, read_slot=2, checkpoints=((16, 18),))
    kept = chunk(3, 0, 19, prompt=prompt, logits_slot=17, write_from=16)
    both.step(
        SIZES[5],
        decodes=[0, 2],
        prefills=[following, kept],
        resumed=[(4, 20)],
        copies=[(4, 25, 5)],
    )
    both.row(4, [3, 9, 25], slot=20, position=37)
    both.step(SIZES[1], decodes=[0, 1, 2, 3, 4], resumed=[(5, 17)], copies=[(5, 30, 3)])
    assert both.padded.runner.replayed == {"decode": 2, "mixed": 3}


@thorough  # with drafts of a head, below, and with spared writes
@pytest.mark.parametrize("family", ["bamba", "qwen3_next", "falcon_mamba", "zamba2"])
def test_padded_steps_with_drafts_compute_what_unpadded_ones_do(
    tiny: Callable[[str], TinyModel], parallel: ParallelContext, family: str
) -> None:
    """Accepted drafts and others, a checkpoint that is passed, a step without drafts
    that takes up those before, and a row that ends and takes up its own."""
    both = Both(tiny(family), parallel, WITH_DRAFTS, DRAFTS)
    prompts = [random_tokens(n, seed=n) for n in (28, 11, 19)]
    texts = [greedy(tiny(family), prompt, 16) for prompt in prompts]
    for row, prompt in enumerate(prompts):
        both.row(row, [8 + 4 * row, 9 + 4 * row, 10 + 4 * row])
        both.step(None, prefills=[chunk(row, 0, len(prompt), prompt=prompt)])
    done, wrong = [1, 1, 1], 150

    def step(drafts: list[list[int]], **options: object) -> None:
        found = both.step(WITH_DRAFTS[1], decodes=[0, 1, 2], drafts=drafts, **options)
        for row, tokens in enumerate(found.tokens_by_row()):
            assert tokens == texts[row][done[row] : done[row] + len(tokens)]
            done[row] += len(tokens)

    def right(row: int, count: int) -> list[int]:
        return texts[row][done[row] : done[row] + count]

    step([right(0, 3), [wrong], right(2, 1)])
    assert done == [5, 2, 3]
    step([right(0, 1) + [wrong, wrong], right(1, 2), []], checkpoint=(32, 21))
    assert done == [7, 5, 4]
    step([[], [], right(2, 2) + [wrong]])
    assert both.padded.rows.accepted[:3].tolist() == [0, 0, 2]
    both.step(WITH_DRAFTS[0], decodes=[0, 1])
    position = int(both.plain.rows.next_position(np.asarray([2]))[0])
    both.step(WITH_DRAFTS[0], decodes=[0, 1], catch_ups=[CatchUp(2, position, 2, 3, 0, 0)])
    # the state that was passed is that of its prefix
    text = prompts[0] + texts[0]
    both.row(5, [8, 9, 30], slot=21, position=32)
    both.plain.rows.last_token[5] = both.padded.rows.last_token[5] = text[32]
    for steps in (both.plain, both.padded):
        entry = steps.step(decodes=[5]).logprobs[5][0]
        expected = tiny(family).expected(text[:33])[-1]
        assert entry.token_id == int(expected.argmax())


@pytest.mark.parametrize(
    "family",
    usually(["bamba"], ["bamba", "qwen3_next", "falcon_mamba", "zamba2", "lfm2"]),
)
def test_padded_steps_that_spare_writes_of_states(
    tiny: Callable[[str], TinyModel], parallel: ParallelContext, family: str
) -> None:
    """Beside prompts and drafts, and a row that ends before its state is written."""
    both = Both(tiny(family), parallel, [*WITH_DRAFTS, SIZES[3]], DRAFTS, write_interval=4)
    prompts = [random_tokens(n, seed=n) for n in (28, 11)]
    texts = [greedy(tiny(family), prompt, 14) for prompt in prompts]
    for row, (prompt, size) in enumerate(zip(prompts, (None, SIZES[3]), strict=True)):
        both.row(row, [8 + 4 * row, 9 + 4 * row, 10 + 4 * row])
        both.step(size, prefills=[chunk(row, 0, len(prompt), prompt=prompt)])
    both.row(2, [30])
    done = [1, 1]

    def step(size: GraphSize, **options: object) -> None:
        found = both.step(size, decodes=[0, 1], **options)
        for row, tokens in enumerate(found.tokens_by_row()[:2]):
            assert tokens == texts[row][done[row] : done[row] + len(tokens)]
            done[row] += len(tokens)

    single, drafting = WITH_DRAFTS
    step(single, writes=[True, True])
    for writes in ((False, True), (False, False)):
        step(single, writes=writes)
    step(SIZES[3], writes=[False, False], prefills=[chunk(2, 0, 9, samples=False)])
    step(single, writes=[True, False])
    assert both.plain.rows.unfolded[:2].tolist() == [0, 3]
    step(drafting, drafts=[texts[0][done[0] :][:2], [150]])  # which writes what is pending
    step(drafting, drafts=[[], []])
    step(single, writes=[False, True])
    step(single, writes=[False, False])
    position = int(both.plain.rows.position[0])
    both.step(single, decodes=[1], catch_ups=[CatchUp(0, position, 2, 1, 0, 0)], writes=[True])
    both.row(5, [8, 9, 10], slot=1, position=position)
    for steps in (both.plain, both.padded):
        steps.rows.last_token[5] = texts[0][done[0] - 1]
        (tokens,) = steps.step(decodes=[5]).tokens_by_row()
        assert tokens == texts[0][done[0] :][:1]


@pytest.mark.parametrize("family", usually(["nemotron_h"], MTP_FAMILIES))
def test_padded_steps_with_drafts_of_a_head_compute_what_unpadded_ones_do(
    tmp_path: Path, parallel: ParallelContext, family: str
) -> None:
    """A graph makes as many drafts for every row, padding included, as one may have. Before the
    last steps some states are not written."""
    oracle = make_mtp_model(family, tmp_path, agrees=True, **SMALL.get(family, {}))
    ours: Any = SimpleNamespace(ours=load(tmp_path, parallel, mtp=True))
    both = Both(ours, parallel, WITH_DRAFTS, DRAFTS, write_interval=4)
    prompts = [random_tokens(n, seed=n) for n in (15, 1, 9)]
    texts = [list(prompt) for prompt in prompts]
    for row, prompt in enumerate(prompts):
        both.row(row, [8 + 4 * row, 9 + 4 * row, 10 + 4 * row])
        texts[row] += both.step(
            None, prefills=[chunk(row, 0, len(prompt), prompt=prompt)]
        ).tokens.tolist()
    held = 0

    def step(counts: list[int]) -> None:
        nonlocal held
        drafts = [[0] * count for count in counts]  # which ones is not ours to say
        found = both.step(WITH_DRAFTS[1], decodes=[0, 1, 2], drafts=drafts).tokens_by_row()
        for text, tokens, count in zip(texts, found, counts, strict=True):
            expected, _ = oracle.chain(text, count) if count else ([], None)
            text += tokens
            assert len(tokens) == 1 + agreed(tokens, expected)
            held += len(tokens) - 1

    for counts in usually([[3, 3, 2]], [[3, 3, 2], [1, 3, 0], [0, 0, 0], [2, 0, 3], [3, 3, 1]]):
        step(counts)
    step([0, 0, 0])  # takes up what held
    for row, writes in ((0, False), (1, True)):
        tokens = both.step(WITH_DRAFTS[0], decodes=[row], writes=[writes]).tokens.tolist()
        texts[row] += tokens
    step([3, 1, 3])
    assert held > 2
    for text, prompt in zip(texts, prompts, strict=True):
        own = oracle.logits(oracle.hidden(text)).argmax(1).tolist()
        assert text[len(prompt) :] == own[len(prompt) - 1 : -1]


def agreed(tokens: list[int], drafts: list[int]) -> int:
    """How many of the drafts are what was written."""
    pairs = zip(drafts, [*tokens, *[-1] * len(drafts)], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(drafts))


def greedy(tiny: TinyModel, prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(tiny.expected(text)[-1].argmax()))
    return text[len(prompt) :]


def test_what_no_graph_has_room_for_runs_without_one(
    tiny: Callable[[str], TinyModel], parallel: ParallelContext
) -> None:
    both = Both(tiny("llama"), parallel, [SIZES[1], SIZES[5]])  # each takes a step to prepare
    text = random_tokens(60)
    for row in range(8):
        both.row(row, [4 * row, 4 * row + 1, 4 * row + 2, 4 * row + 3])
    both.row(0, [31, 1, 2, 3])
    many = [chunk(row, 0, 3, prompt=text) for row in range(4)]
    both.step(None, prefills=many)
    targets = np.asarray(text[1:5], dtype=np.int32)
    both.step(None, prefills=[chunk(4, 0, 5, prompt=text, logprob_targets=targets)])
    both.step(None, decodes=[0, 1], prefills=[chunk(5, 0, 49, prompt=text)])
    both.step(SIZES[5], decodes=[0, 1, 2, 3, 4, 5], prefills=[chunk(6, 0, 3, prompt=text)])
    both.step(None, decodes=[0, 1, 2, 3, 4, 5])


def test_idle_steps_change_nothing(
    tiny: Callable[[str], TinyModel], parallel: ParallelContext
) -> None:
    both = Both(tiny("bamba"), parallel, [SIZES[0], SIZES[2]])
    both.row(0, [3, 9, 4, 0])
    both.step(SIZES[2], prefills=[chunk(0, 0, 11, prompt=random_tokens(11))])
    both.padded.runner.dummy_forward()
    assert both.graphs.replays[-1] == SIZES[0]
    both.step(SIZES[0], decodes=[0])
