"""A rank's pages, filled from those of ranks that split the model in another way, are the ones that
it would have written itself."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_hybrid.disaggregation.page_layout import PageGather, PageLayout
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.kernels.contract import FP8
from megatron_hybrid.layers import inputs
from megatron_hybrid.layers.attention import Attention
from megatron_hybrid.layers.convolutions import DynamicConvolutions
from megatron_hybrid.layers.convolved_attention import ConvolvedAttention, ConvolvedProjection
from megatron_hybrid.layers.inputs import LayerCaches, StateSpec, allocate_caches
from megatron_hybrid.layers.lightning_attention import LightningAttention
from megatron_hybrid.layers.mlstm import MLSTM
from megatron_hybrid.layers.sink_attention import SinkAttention
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import initialize
from tests.disaggregation.page_layout_worker import (
    Pages,
    after_a_prompt,
    floats,
    layouts,
    pages_of,
)
from tests.mtp_models import make_mtp_model
from tests.parallel.pretend import first_of
from tests.parallel.ranks import start_ranks
from tests.thorough import A_THIRD, thorough, usually
from tests.tiny_models import FAMILIES, make_tiny_model

BLOCKS, BLOCK_SIZE, SLOTS, PACKED = 3, 4, 3, 3
_DELTA = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
# With two ranks: whole groups and KV heads a rank; with four: two ranks share each.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA,
    "qwen3_5": _DELTA,
    "qwen3_5_moe": _DELTA,
    "qwen4_exp": _DELTA,
    "falcon_h1": {"mamba_n_groups": 1},
    "bamba": {"mamba_n_groups": 1, "num_key_value_heads": 1},
    "inkling": {"swa_num_attention_heads": 4, "num_key_value_heads": 1},
    "inkling2": {"swa_num_attention_heads": 4, "num_key_value_heads": 1},
    "zaya": {"num_attention_heads": 8, "num_key_value_heads": 4, "cca_time1": 3},
}
USUAL = ("nemotron_h", "bamba", "falcon_h1", "zamba2", "mamba", "jamba", "qwen3_next", "lfm2")
NAMES = usually((*USUAL, "llama", "bailing_hybrid", "inkling", "zaya"), FAMILIES)
SIZES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))  # tensor, pipeline
Size = tuple[int, int]


class Tiny:
    """A model's ranks, whatever it is split over, with caches that are parts of the same ones."""

    def __init__(self, folder: Path, *, mtp: bool = False, **options: Any) -> None:
        """`options`: conv, kv, packed: types."""
        self._config = ModelFolder.open(folder).config
        self._mtp, self._options = mtp, options
        self._whole: dict[tuple[int, str], Tensor] = {}
        self._known: dict[Size, list[Pages]] = {}

    def pages(self, size: Size) -> list[Pages]:
        """Of each rank."""
        if size not in self._known:
            self._known[(1, 1)] = [self._pages((1, 1), 0)]  # which draws the whole ones
            self._known[size] = [self._pages(size, rank) for rank in range(size[0] * size[1])]
        return self._known[size]

    def _pages(self, size: Size, rank: int) -> Pages:
        model = self._model(size, rank)
        caches = self.caches(model)
        rows_of = _rows_by_weights(model)
        for layer, name, tensor, axis in _tensors(caches):
            if (layer, name) not in self._whole:
                assert size == (1, 1)
                self._whole[layer, name] = _random_bits(tensor)
            rows = rows_of.get((layer, name), torch.arange(tensor.shape[axis]))
            tensor.copy_(_select(self._whole[layer, name], axis, rows))
        return pages_of(model, caches, [2, 1], SLOTS + 1 if caches.packed else 2, BLOCK_SIZE)

    def caches(self, model: HybridModel) -> LayerCaches:
        packed = self._options.get("packed")
        return allocate_caches(
            model.kv_specs, model.state_specs, BLOCKS, BLOCK_SIZE, SLOTS, torch.device("cpu"),
            self._config.vocab_size if model.is_last_stage else 0,
            num_packed=PACKED if packed else 0, packed_dtype=packed,
        )  # fmt: skip

    def _model(self, size: Size, rank: int) -> HybridModel:
        parallel = first_of(initialize(), size[0])
        parallel.tensor.rank = rank % size[0]
        pipeline = copy.copy(parallel.pipeline)
        pipeline.size, pipeline.rank = size[1], rank // size[0]
        parallel = replace(parallel, pipeline=pipeline)
        conv, kv = (self._options.get(kind, torch.float32) for kind in ("conv", "kv"))
        types = torch.float32, conv, torch.float32, kv
        return HybridModel(self._config, parallel, *types, mtp=self._mtp)


def _rows_by_weights(model: HybridModel) -> dict[tuple[int, str], Tensor]:
    """Of each tensor of a rank's caches which rows of the whole it has: by the places where its
    weights are loaded to, which each get the number of their row."""
    channels: Counter[int | None] = Counter()  # of convolutions, one behind the other
    for block, part in model.weight_parts():
        target, axis = part.target, 2 if len(part.shape) == 4 else 0
        assert isinstance(target, Tensor)
        if is_static := part.role.endswith("static_weight"):
            axis = 1
        numbers = torch.arange(part.shape[axis])[part.source[axis]]
        if is_static or re.search(r"\b([qkv]_conv1d|([kv]_)?sconv)\.(weight|bias)$", part.role):
            numbers += channels[block]
            channels[block] += part.shape[axis]
        wide = numbers.view(*[1] * axis, -1, *[1] * (target.ndim - axis - 1))
        target.copy_(wide.expand(target.shape))
    found: dict[tuple[int, str], Tensor] = {}
    attentions = {index: block.attention for index, block in model.own_blocks()}
    recurrent = {index: block.mixer.recurrent for index, block in model.own_blocks()}
    if model.mtp is not None:
        attentions[model.mtp.first] = model.mtp.attention
    for index, attention in attentions.items():
        if isinstance(attention, Attention):  # of latents every rank has all
            dim, weight = attention.config.head_dim, attention.qkv_proj.weight
            assert isinstance(weight, Tensor)
            first = attention.heads * dim
            heads = weight[first : first + attention.kv_heads * dim : dim, 0].long() // dim
            found[index, "key"] = found[index, "value"] = heads
        elif isinstance(attention, SinkAttention):
            found[index, "key"] = found[index, "value"] = _heads_of_keys(attention)
        elif isinstance(attention, ConvolvedAttention):
            found[index, "key"] = found[index, "value"] = attention.temperature.long()
    for index, layer in recurrent.items():
        if isinstance(layer, ConvolvedProjection):
            found[index, "conv"] = _convolved_rows(layer)
        elif isinstance(layer, DynamicConvolutions):
            found[index, "conv"] = _rows_by_lag(layer)
        elif layer is not None:
            if any(re.search(r"\b([qkv]_)?s?conv", part.role) for part in layer.weight_parts()):
                found[index, "conv"] = layer.conv_weight[:, 0].long()
            names = [n for n in ("A_log", "time_decay", "recurrent_param") if hasattr(layer, n)]
            if names or isinstance(layer, MLSTM):
                gates = layer.gates.weight[: layer.heads] if isinstance(layer, MLSTM) else None
                weight = getattr(layer, names[0]) if gates is None else gates
                rows = weight.view(len(weight), -1)[:, 0].long()
                found |= {(index, name): rows for name in ("ssm", "values", "scales")}
            elif isinstance(layer, LightningAttention):
                dim = layer.config.head_dim
                heads = layer.norm.weight[::dim].long() // dim
                found |= {(index, name): heads for name in ("ssm", "values", "scales")}
    return found


def _heads_of_keys(attention: SinkAttention) -> Tensor:
    dim = attention.config.head_dim
    for rows, layer in zip(attention._rows(), attention.projections, strict=True):
        first = 0
        for row in rows:
            if row.role == "k_proj":
                weight = layer.weight
                assert isinstance(weight, Tensor)
                return weight[first : first + row.size : dim, 0].long() // dim
            first += row.size
    raise AssertionError("no keys")


def _rows_by_lag(layer: DynamicConvolutions) -> Tensor:
    """| keys and values of one token before | of two | of three | what the layer gives |"""
    own, hidden = layer.static[0].long(), layer.conv_weight.shape[0] - 3 * layer.kv_size
    total = sum(one.total for one in layer._kv)
    return torch.cat((own, own + total, own + 2 * total, torch.arange(hidden) + 3 * total))


def _convolved_rows(layer: ConvolvedProjection) -> Tensor:
    """| q | k | v of the token itself | v of the one before | q | k | q | k |"""
    weight, (queries, keys, _) = layer.proj.weight, (128, 64, 64)
    assert isinstance(weight, Tensor)
    own, ranks = weight[:, 0].long(), layer.parallel.size
    own[queries // ranks :] += queries
    own[(queries + keys) // ranks :] += keys
    if layer.parallel.rank >= ranks / 2:
        own[(queries + keys) // ranks :] += keys // 2
    elif ranks == 1:
        own[-keys // 2 :] += keys // 2
    qk = own[: (queries + keys) // ranks] + queries + 2 * keys
    return torch.cat((own, qk, qk + queries + keys))


def _tensors(caches: LayerCaches) -> Iterator[tuple[int, str, Tensor, int]]:
    """Layer, name, [blocks or slots, ...] and the dimension that ranks share."""
    for layer, cache in caches.kv.items():
        yield layer, "key", cache.key, 2
        yield layer, "value", cache.value, 2
    for layer, state in caches.state.items():
        if not caches.packed:
            yield layer, "conv", state.conv, 1
            yield layer, "ssm", state.ssm, 1
        for packed in caches.packed:
            for row, full in enumerate(packed.full_conv):
                if full.data_ptr() == state.conv.data_ptr():
                    yield layer, "conv", packed.conv[row], 1
                    yield layer, "values", packed.values[row], 1
                    if packed.scales is not None:
                        yield layer, "scales", packed.scales[row], 1
    if caches.end_logits.numel():
        yield -1, "logits", caches.end_logits, 1


def _random_bits(like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(like.numel())
    size = like.numel() * like.itemsize
    bits = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return bits.view(like.dtype).view(like.shape)


def _select(whole: Tensor, axis: int, rows: Tensor) -> Tensor:
    if not whole.numel():
        return whole
    if axis == whole.ndim - 1:
        return whole.index_select(axis, rows)
    return whole.view(torch.uint8).index_select(axis, rows).view(whole.dtype)


def filled(own: PageLayout, peers: list[Pages], nearest: int = 0) -> tuple[list[Any], Any]:
    """Pages of blocks and of a state."""
    gather = PageGather(own, layouts(peers), nearest)
    blocks = []
    for i in range(len(peers[0].blocks)):
        page = np.zeros(own.page_bytes, dtype=np.uint8)
        gather.fill_block(page, {rank: peers[rank].blocks[i] for rank in gather.block_ranks})
        blocks.append(page)
    state = np.zeros(own.page_bytes * own.pages_per_state, dtype=np.uint8)
    gather.fill_state(state, {rank: peers[rank].state for rank in gather.state_ranks})
    return blocks, state


def check(prefill: list[Pages], decode: list[Pages]) -> None:
    for rank, own in enumerate(decode):
        layout = PageLayout.load(own.layout)
        blocks, state = filled(layout, prefill, rank % len(prefill))
        end = layout.blocks[-1].end if layout.blocks else 0
        for page, wanted in zip(blocks, own.blocks, strict=True):
            assert np.array_equal(page[:end], wanted[:end])
        assert np.array_equal(state[: layout.state_bytes], own.state[: layout.state_bytes])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in NAMES:
        make_tiny_model(name, root / name, **_OVERRIDES.get(name, {}))
    return {name: root / name for name in NAMES}


@A_THIRD
@pytest.mark.parametrize("name", NAMES)
def test_pages_of_any_split_become_those_of_any_other(name: str, folders: dict[str, Path]) -> None:
    tiny = Tiny(folders[name])
    for prefill, decode in product(SIZES, SIZES):
        check(tiny.pages(prefill), tiny.pages(decode))


@A_THIRD
@pytest.mark.parametrize(
    "options",
    [{"packed": torch.int8}, {"packed": torch.bfloat16}, {"conv": torch.bfloat16, "kv": FP8}],
    ids=str,
)
@pytest.mark.parametrize("name", ["nemotron_h", "jamba", "qwen3_next"])
def test_in_any_types(name: str, options: dict[str, Any], folders: dict[str, Path]) -> None:
    tiny = Tiny(folders[name], **options)
    for prefill, decode in product(((1, 1), (4, 1), (2, 2)), repeat=2):
        check(tiny.pages(prefill), tiny.pages(decode))


@pytest.mark.parametrize("packed", [torch.int8, torch.bfloat16])
def test_recurrent_layers_of_two_shapes_are_packed_apart(
    packed: torch.dtype, tmp_path: Path
) -> None:
    make_mtp_model("qwen3_next", tmp_path, **_DELTA)
    tiny = Tiny(tmp_path, mtp=True, packed=packed)
    for prefill, decode in product(((1, 1), (2, 1), (4, 1)), repeat=2):
        check(tiny.pages(prefill), tiny.pages(decode))


def test_with_a_head_for_drafts(tmp_path: Path) -> None:
    make_mtp_model("qwen3_next", tmp_path, **_DELTA)
    tiny = Tiny(tmp_path, mtp=True)
    for prefill, decode in product(((1, 1), (2, 1), (4, 1)), repeat=2):
        check(tiny.pages(prefill), tiny.pages(decode))
    parts = PageLayout.load(tiny.pages((2, 1))[1].layout).states
    assert [p.runs for p in parts if p.layer == 8] == [((0, 64),)]  # a delay, whole on each rank
    # A server without the head takes what it needs; the other way round that is missing.
    without = Tiny(tmp_path)
    filled(layouts(without.pages((2, 1)))[1], tiny.pages((2, 1)))
    with pytest.raises(ConfigurationError, match="nothing of key of layer 8.* head on both"):
        filled(layouts(tiny.pages((2, 1)))[1], without.pages((2, 1)))


def test_channels_lie_side_by_side_on_a_gpu(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of them, and between one and a CPU."""

    def conv_states(slots: tuple[int, ...], spec: StateSpec, *_: Any) -> Tensor:
        shape = (*slots, *reversed(spec.conv_shape))
        return torch.zeros(shape, dtype=spec.conv_dtype).transpose(-1, -2)

    on_cpu = Tiny(folders["nemotron_h"], conv=torch.bfloat16)
    cpu = {size: on_cpu.pages(size) for size in SIZES}
    monkeypatch.setattr(inputs, "_conv_states", conv_states)
    on_gpu = Tiny(folders["nemotron_h"], conv=torch.bfloat16)
    on_gpu._whole = on_cpu._whole
    gpu = {size: on_gpu.pages(size) for size in SIZES}
    assert not np.array_equal(cpu[1, 1][0].state, gpu[1, 1][0].state)
    for prefill, decode in product(SIZES, SIZES):
        check(gpu[prefill], gpu[decode])
        check(gpu[prefill], cpu[decode])
        check(cpu[prefill], gpu[decode])


def test_of_the_same_split_a_page_is_taken_whole(folders: dict[str, Path]) -> None:
    tiny = Tiny(folders["nemotron_h"])
    for size in SIZES:
        peers = layouts(tiny.pages(size))
        for rank, own in enumerate(peers):
            gather = PageGather(own, peers, nearest=0)
            assert gather.same_rank == rank and gather.needed_ranks == (rank,)
    other = PageGather(layouts(tiny.pages((2, 1)))[1], layouts(tiny.pages((4, 1))))
    assert other.same_rank is None and other.needed_ranks == (2, 3)


def test_the_fewest_ranks_are_read(folders: dict[str, Path]) -> None:
    """Of two KV heads each is on two of four ranks; logits are on all of the last stage's."""
    tiny = Tiny(folders["llama"])
    four, (whole,) = layouts(tiny.pages((4, 1))), layouts(tiny.pages((1, 1)))
    for nearest, ranks in enumerate([(0, 2), (1, 2), (0, 2), (0, 3)]):
        gather = PageGather(whole, four, nearest)
        assert gather.block_ranks == ranks and gather.state_ranks == (nearest,)
    # What is on one rank alone decides, whichever is nearest, be it of blocks or of states.
    last = layouts(tiny.pages((2, 2)))[3]
    gather = PageGather(last, layouts(tiny.pages((2, 1))), nearest=0)
    assert gather.block_ranks == gather.state_ranks == (1,)
    bamba = Tiny(folders["bamba"])
    gather = PageGather(layouts(bamba.pages((2, 1)))[1], layouts(bamba.pages((4, 1))), nearest=0)
    assert (gather.block_ranks, gather.state_ranks) == ((2,), (2, 3))
    tiny = Tiny(folders["nemotron_h"])
    gather = PageGather(layouts(tiny.pages((1, 2)))[1], layouts(tiny.pages((2, 2))), nearest=3)
    assert gather.needed_ranks == (2, 3)
    # A stage that has no attention reads nothing of blocks.
    first = layouts(tiny.pages((1, 2)))[0]
    assert not first.blocks and PageGather(first, layouts(tiny.pages((2, 1)))).block_ranks == ()


def test_what_one_page_holds(folders: dict[str, Path]) -> None:
    """x, B and C are split, or B and C shared by two ranks of four."""
    tiny = Tiny(folders["nemotron_h"])
    runs = {
        size: [part.runs for part in layouts(tiny.pages((size, 1)))[-1].states if part.layer == 0]
        for size in (1, 2, 4)
    }
    assert runs[1] == [((0, 128), (128, 32), (160, 32)), ((0, 8),)]
    assert runs[2] == [((64, 64), (144, 16), (176, 16)), ((4, 4),)]
    assert runs[4] == [((96, 32), (144, 16), (176, 16)), ((6, 2),)]
    blocks = layouts(tiny.pages((4, 1)))[1].blocks
    assert [(part.layer, part.name, part.runs, part.start) for part in blocks] == [
        (2, "key", ((0, 1),), 0),
        (2, "value", ((0, 1),), 4 * BLOCK_SIZE * 16),
    ]


def test_caches_that_are_not_the_same_are_refused(folders: dict[str, Path]) -> None:
    tiny = Tiny(folders["nemotron_h"])
    (own,) = layouts(tiny.pages((1, 1)))
    two = layouts(tiny.pages((2, 1)))

    def refused(message: str, peers: list[PageLayout]) -> None:
        with pytest.raises(ConfigurationError, match=f"--disaggregation-peers: .*{message}"):
            PageGather(own, peers)

    refused(r"Rows 0 to 1 of key of layer 2 are on none of its ranks", two[1:])
    refused("A KV block is 4 tokens here, and 8 there", [replace(own, block_size=8)])
    refused("nothing of key of layer 2", [replace(own, blocks=())])
    refused("nothing of logits", [replace(own, states=own.states[:-1])])
    other = Tiny(folders["nemotron_h"], kv=torch.bfloat16).pages((2, 1))
    refused(
        r"key of layer 2 is 2 x \[4, 16\] in float32 here, and 2 x \[4, 16\] in bfloat16 there",
        layouts(other),
    )
    packed = Tiny(folders["nemotron_h"], packed=torch.int8).pages((2, 1))
    refused("nothing of ssm of layer 0", layouts(packed))
    refused("", layouts(Tiny(folders["bamba"]).pages((2, 1))))


def test_a_layout_travels_as_text(folders: dict[str, Path]) -> None:
    (own,) = layouts(Tiny(folders["nemotron_h"]).pages((1, 1)))
    assert PageLayout.load(own.dump()) == own and hash(own)
    said = json.loads(own.dump())
    for wrong in ("", "[]", "{}", "7", json.dumps(said | {"colour": 1}),
                  json.dumps(said | {"page_bytes": 8}), json.dumps(said | {"blocks": [{}]}),
                  own.dump().replace("[0,8]", "[0,7]")):  # fmt: skip
        with pytest.raises(ConfigurationError, match="--disaggregation-peers.* same version"):
            PageLayout.load(wrong)


@thorough  # test_other_sizes.py has whole engines
def test_what_two_ranks_computed_is_what_one_would_have(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """In both directions: so rows that have the same number mean the same."""
    names = ["nemotron_h", "qwen3_next", "jamba", "lfm2"]
    start_ranks(
        2, "tests.disaggregation.page_layout_worker", tmp_path, *(str(folders[n]) for n in names)
    )
    for name in names:
        one = [after_a_prompt(str(folders[name]), initialize())]
        two = [
            Pages(*torch.load(tmp_path / f"{name}.{rank}", weights_only=False)) for rank in range(2)
        ]
        for prefill, decode in ((two, one), (one, two)):
            for own in decode:
                layout = PageLayout.load(own.layout)
                blocks, state = filled(layout, prefill)
                end = layout.blocks[-1].end
                pairs = [(state, own.state, layout.state_bytes)]
                pairs += [(*pair, end) for pair in zip(blocks, own.blocks, strict=True)]
                for found, wanted, size in pairs:
                    torch.testing.assert_close(
                        floats(found, size), floats(wanted, size),
                        atol=2e-5, rtol=2e-5, equal_nan=True,
                    )  # fmt: skip
