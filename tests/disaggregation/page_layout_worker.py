"""One rank of a tensor-parallel run: what a prompt leaves in its pages.

    python -m tests.disaggregation.page_layout_worker OUTPUT_FOLDER MODEL_FOLDER...

The environment is torchrun's: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megatron_hybrid.cache.host_tier import Copy
from megatron_hybrid.disaggregation.page_layout import Bytes, PageLayout, layout_of
from megatron_hybrid.execution.host_copies import HostCopier
from megatron_hybrid.execution.page_parts import PageParts
from megatron_hybrid.layers.inputs import LayerCaches
from megatron_hybrid.models.checkpoints.weights import load_model
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext, initialize
from tests.models.driver import Driver, Segment

BLOCK_SIZE, PAGES_PER_STATE, TOKENS = 8, 3, 37


class Pages(NamedTuple):
    """What a HostCopier makes of a rank's caches."""

    layout: str  # PageLayout.dump
    blocks: list[Bytes]  # a page each
    state: Bytes


def pages_of(
    model: HybridModel, caches: LayerCaches, blocks: list[int], slot: int, block_size: int
) -> Pages:
    """Of these blocks, and of the state in this slot."""
    page_bytes = PageParts.of(caches).page_bytes(PAGES_PER_STATE)
    layout = layout_of(
        model, caches, page_bytes=page_bytes, pages_per_state=PAGES_PER_STATE, block_size=block_size
    )
    first = len(blocks) + 1
    pages, state_pages = list(range(1, first)), [first + 2, first, first + 1]
    copier = HostCopier(caches, first + PAGES_PER_STATE, page_bytes)
    copier.write(Copy(blocks, pages, slot, state_pages))
    found = [np.array(view, dtype=np.uint8) for view in copier.views([*pages, *state_pages])]
    return Pages(layout.dump(), found[: len(blocks)], np.concatenate(found[len(blocks) :]))


def after_a_prompt(folder: str, parallel: ParallelContext) -> Pages:
    """Of a sequence of TOKENS tokens."""
    model = load_model(
        folder, device=torch.device("cpu"), dtype=None, parallel=parallel, progress=False
    )
    driver = Driver(model, block_size=BLOCK_SIZE)
    sequence, generator = driver.sequence(), torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 160, (TOKENS,), generator=generator).tolist()
    driver.step([Segment(sequence, tokens)])
    return pages_of(model, driver.caches, sequence.blocks, sequence.slot, BLOCK_SIZE)


def floats(memory: Bytes, end: int) -> torch.Tensor:
    """The bytes before `end`, as the numbers that they are in these models."""
    return torch.from_numpy(memory[:end].copy()).view(torch.float32)


def layouts(pages: list[Pages]) -> list[PageLayout]:
    return [PageLayout.load(one.layout) for one in pages]


def main() -> None:
    torch.set_num_threads(1)
    parallel = initialize(int(os.environ["WORLD_SIZE"]))
    output, *folders = sys.argv[1:]
    for folder in folders:
        found = after_a_prompt(folder, parallel)
        torch.save(tuple(found), f"{output}/{Path(folder).name}.{parallel.tensor.rank}")
    parallel.destroy()


if __name__ == "__main__":
    main()
