"""Copies between a GPU's caches and host memory, beside other work, and engines that make them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
from megatron_hybrid.cache.host_tier import Copy  # noqa: E402
from megatron_hybrid.execution import batch_copies, long_rows  # noqa: E402
from megatron_hybrid.execution.host_copies import CudaHostCopier, HostCopier  # noqa: E402
from megatron_hybrid.execution.page_parts import HostForm, PageParts  # noqa: E402
from megatron_hybrid.layers.inputs import (  # noqa: E402
    KVSpec,
    LayerCaches,
    StateSpec,
    allocate_caches,
)
from tests.engine.bits import BLOCK_SIZE, DRAFTS, Known, params  # noqa: E402
from tests.engine.test_host_tier_models import with_host_memory  # noqa: E402
from tests.gpu.test_batch_invariant_gpu import OPTIONS  # noqa: E402

pytestmark = pytest.mark.gpu
BLOCKS, SIZE, SLOTS = 200, 64, 4
STATE = StateSpec((384, 3), torch.bfloat16, (4, 64, 128), torch.float32, 128)


def wait(job) -> None:
    end = time.monotonic() + 20
    while not job.is_done():
        assert time.monotonic() < end


@pytest.mark.parametrize("piece", [3, 1000])
@pytest.mark.parametrize("packed", [None, torch.int8])
@pytest.mark.parametrize("long_row", [0, 2**40])
def test_what_comes_back_is_what_went_whatever_runs_beside_it(
    long_row: int,
    piece: int,
    packed: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """long_row: rows are copied by themselves, or gathered. piece: so many at once."""
    monkeypatch.setattr(long_rows, "LONG_ROW", long_row)
    monkeypatch.setattr(batch_copies, "AT_ONCE", piece)
    caches = allocate_caches(
        {1: KVSpec(4, 128, torch.bfloat16), 3: KVSpec(4, 128, torch.bfloat16)},
        {0: STATE, 2: STATE}, BLOCKS, SIZE, SLOTS, torch.device("cuda"), 1000,
        num_packed=3 if packed else 0, packed_dtype=packed,
    )  # fmt: skip
    parts = [t for one in caches.packed for t in (one.conv, one.values, one.scales)]
    states = [t for part in parts for t in part] if packed else []
    states = states or [t for one in caches.state.values() for t in (one.conv, one.ssm)]
    kv = [t for one in caches.kv.values() for t in (one.key, one.value)]
    for tensor in [*kv, *states, caches.end_logits]:
        tensor.copy_(torch.randn(tensor.shape, device="cuda") * 50)
    before = [t.clone() for t in [*kv, *states]]
    logits = caches.end_logits.clone()
    page = sum(t[0].numel() * t.element_size() for t in kv)
    state = sum(t[0].numel() * t.element_size() for t in [*states, caches.end_logits])
    per_state = -(-state // page)
    copier = CudaHostCopier(caches, 150, page)
    copier.piece = piece
    is_new = int((torch.version.cuda or "0").split(".")[0]) >= 13
    assert (copier._block_rows is not None) == (is_new and not long_row)
    first = SLOTS if packed else 0
    blocks, pages = list(range(1, 90)), [*range(50, 100), *range(149, 110, -1)]
    state_pages = list(range(1, 1 + per_state))
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(20):  # what the copy has to wait for
        a = torch.tanh(a @ a)
    kv[0][1:90] = before[0][1:90].flip(0)
    write = copier.write(Copy(blocks, pages, 1 + first, state_pages))
    wait(write)
    for tensor in kv:
        tensor[1:90] = 0
    there = list(range(100, 189))
    for _ in range(20):
        a = torch.tanh(a @ a)
    wait(copier.fetch(Copy(there, pages, 2 + first, state_pages)))
    before[0][1:90] = before[0][1:90].flip(0)
    for tensor, old in zip(kv, before, strict=False):
        assert torch.equal(tensor[100:189], old[1:90])
        assert torch.equal(tensor[189:], old[189:]) and torch.equal(tensor[90:100], old[90:100])
    for tensor, old in zip(states, before[4:], strict=True):
        assert torch.equal(tensor[2], old[1]) and torch.equal(tensor[1], old[1])
    assert torch.equal(caches.end_logits[2 + first], logits[1 + first])


def test_rounded_pages_are_those_of_a_cpu() -> None:
    form = HostForm(torch.float8_e4m3fn, torch.int8, {0: STATE.scaled_over, 2: STATE.scaled_over})
    kv = KVSpec(4, 128, torch.bfloat16)
    sizes = {1: kv, 3: kv}, {0: STATE, 2: STATE}, BLOCKS, SIZE, SLOTS
    gpu, cpu = (allocate_caches(*sizes, torch.device(one), 1000) for one in ("cuda", "cpu"))
    for here, there in zip(_tensors(gpu), _tensors(cpu), strict=True):
        there.copy_(torch.randn(there.shape) * 50)
        here.copy_(there)
    page = PageParts.of(gpu, form).page_bytes(3)
    copiers = CudaHostCopier(gpu, 150, page, form), HostCopier(cpu, 150, page, form)
    for copier in copiers:
        write = copier.write(Copy(list(range(1, 90)), list(range(40, 129)), 1, [130, 7, 9]))
        wait(write)
    own, other = ([bytes(view) for view in one.views(range(40, 129))] for one in copiers)
    assert own == other  # those of states are in another order where convolutions' windows are
    for copier in copiers:
        wait(copier.fetch(Copy(list(range(100, 189)), list(range(40, 129)), 2, [130, 7, 9])))
    for here, there in zip(_tensors(gpu), _tensors(cpu), strict=True):
        assert torch.equal(here.cpu(), there)


def _tensors(caches: LayerCaches) -> list[torch.Tensor]:
    kv = [t for one in caches.kv.values() for t in (one.key, one.value)]
    return kv + [t for one in caches.state.values() for t in (one.conv, one.ssm)]


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_next", "lfm2", "falcon_mamba", "llama"])
def test_chats_that_were_in_host_memory_go_on_with_the_same_bits(
    family: str, tmp_path: Path
) -> None:
    known = Known.of(family, tmp_path)
    known.options, wanted, number = OPTIONS, params(tokens=12), 9
    # States of the last three chats stay until they are written, in the next ones' first steps.
    sizes = {"blocks": 90, "states": 6, "requests": 3, BLOCK_SIZE: 8, DRAFTS: 2}
    llm = known.small(**sizes)  # type: ignore[arg-type]
    transfers = with_host_memory(llm)
    texts = [known.text[60 * i : 60 * i + 41 + 3 * i] for i in range(number)]
    found = []
    for _ in range(3):
        for chat in range(0, number, 3):
            outputs = known.generate(llm, texts[chat : chat + 3], wanted)
            found.append(sum(output.cached_tokens > 30 for output in outputs))
            for i, output in enumerate(outputs):
                texts[chat + i] += output.token_ids + known.text[chat : chat + 3]
    assert sum(found) > number, found
    assert transfers.tier.counts["tier_fetches"] > number


def test_a_copy_waits_for_the_steps_that_may_touch_it_and_no_other() -> None:
    caches = allocate_caches(
        {1: KVSpec(4, 128, torch.bfloat16)}, {0: STATE}, BLOCKS, SIZE, SLOTS, torch.device("cuda"),
        1000,
    )  # fmt: skip
    copier = CudaHostCopier(caches, 150, PageParts.of(caches, HostForm()).page_bytes(3))
    copy = Copy(list(range(1, 9)), list(range(1, 9)), 1, [130, 7, 9])
    for begin in (copier.write, copier.fetch):  # what they need is made
        wait(begin(copy))
    copier.begin_step(1)
    torch.cuda._sleep(2 * 10**9)  # a second; of step 1
    computed = torch.cuda.current_stream().record_event()
    copier.begin_step(2)
    for begin in (copier.write, copier.fetch):
        wait(begin(copy._replace(touched=0)))
    assert not computed.query()
    waiting = [begin(copy._replace(touched=1)) for begin in (copier.write, copier.fetch)]
    waiting.append(copier.write(copy))
    assert not any(job.is_done() for job in waiting)
    for job in waiting:
        wait(job)
        assert computed.query()
