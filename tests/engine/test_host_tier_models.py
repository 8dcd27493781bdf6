"""Real caches that were in host memory: chats go on with the bits that they have alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_hybrid import LLM
from megatron_hybrid.cache.host_store import page_bytes
from megatron_hybrid.cache.host_tier import HostTier
from megatron_hybrid.cache.replay_cost import queue_of
from megatron_hybrid.engine.transfers import HostTransfers
from megatron_hybrid.execution.host_copies import CudaHostCopier, HostCopier
from tests.engine.bits import BLOCK_SIZE, Known, params
from tests.thorough import A_THIRD, usually
from tests.tiny_models import FAMILIES

CHATS = 9
PAGES = 3000
# Behind whose windows there is no such memory.
WINDOWED = {"lfm3", "recurrent_gemma", "inkling", "inkling2"}


def with_host_memory(llm: LLM) -> HostTransfers:
    engine, context = llm.engine, llm.engine.context
    geometry = context.geometry
    tier = HostTier(context.cache.store, PAGES, queue_of("replay_cost"), bytes_per_token=1e9)
    kind = CudaHostCopier if torch.cuda.is_available() else HostCopier
    copier = kind(engine.runner._caches, PAGES, page_bytes(geometry))
    context.transfers = HostTransfers(context.cache, tier, copier)
    context.transfers.attach(engine.scheduler.decodes)
    return context.transfers


@pytest.fixture(
    scope="module",
    params=usually(
        ["nemotron_h", "qwen3_next", "lfm2", "mamba", "llama"], sorted(set(FAMILIES) - WINDOWED)
    ),
)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    return Known.of(request.param, tmp_path_factory.mktemp(request.param))


@A_THIRD
@pytest.mark.parametrize("asynchronous", usually([True], [False, True]))
@pytest.mark.parametrize("block_size", usually([8], [8, 64]))
def test_chats_go_on_with_the_same_bits(known: Known, block_size: int, asynchronous: bool) -> None:
    known.asynchronous = asynchronous
    llm = known.small(
        blocks=30 * 8 // block_size + 4, states=3, requests=2, **{BLOCK_SIZE: block_size}
    )
    transfers, wanted = with_host_memory(llm), params(tokens=6)
    texts = [known.text[40 * i : 40 * i + 25 + 3 * i] for i in range(CHATS)]
    cached: list[list[int]] = []
    for _ in range(3):
        cached.append([])
        for chat, text in enumerate(texts):
            (output,) = known.generate(llm, [text], wanted)
            cached[-1].append(output.cached_tokens)
            texts[chat] = text + output.token_ids + known.text[chat : chat + 3]
    assert not any(cached[0])
    assert transfers.tier.counts["tier_fetches"] > CHATS
    granule = llm.engine.context.geometry.granule
    for turn, skipped in enumerate(cached[1:]):
        whole = [25 + 3 * i + 9 * turn + 5 for i in range(CHATS)]  # all but the last, never fed
        full = [n >= most // granule * granule for n, most in zip(skipped, whole, strict=True)]
        assert sum(full) >= CHATS - 3, (skipped, whole)


def test_a_page_that_changed_is_noticed(tmp_path: Path) -> None:
    """Of what the test above compares."""
    known = Known.of("nemotron_h", tmp_path)
    llm = known.small(blocks=34, states=3, requests=2, **{BLOCK_SIZE: 8})
    transfers, wanted = with_host_memory(llm), params(tokens=6)
    texts = [known.text[40 * i : 40 * i + 30] for i in range(CHATS)]
    for chat, text in enumerate(texts):
        texts[chat] = text + known.generate(llm, [text], wanted)[0].token_ids + [7]
    copier = transfers.copier
    assert isinstance(copier, HostCopier)
    copier._pages.view(-1)[:] = 0
    outputs = llm.generate(texts[:3], wanted, progress=False)
    assert any(output.cached_tokens for output in outputs)
    assert list(known.differing(outputs, wanted))
