"""Pipeline stages: which blocks each computes, and what all of them have to know of the whole.

The first stage has the embedding, the last one the final norm and the head. The rule: each stage
has a contiguous run of blocks, the stage with the most bytes of weights has as few as can be, and
among such splits the sum of the stages' squared bytes is the least. The embedding and the head
count; a head that is tied to the embedding is a second copy of it, and a transformer that blocks
share is there once in every stage that uses it.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn

from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.layers.inputs import KVSpec, StateSpec
from megatron_hybrid.models.blocks import Block, BlockBuilder, SharedTransformerBlock
from megatron_hybrid.models.config import (
    INDEXED_LATENT_ATTENTION,
    SHARED_INDEX,
    SHARED_TRANSFORMER,
)

# Blocks that share an index which none of those before them has.
_WITHOUT_ITS_INDEX = f"[^{INDEXED_LATENT_ATTENTION}]*{SHARED_INDEX}"
Size = Callable[[int, int], Any]  # of the blocks [start, end)


@dataclass(frozen=True, slots=True)
class ModelStages:
    """The same on every rank. The specs are those of all blocks, by their index, each as a rank of
    its stage keeps it: ranks that decide alike decide by these, not by what they hold."""

    blocks: tuple[range, ...]  # of each stage
    kv_specs: dict[int, KVSpec]
    state_specs: dict[int, StateSpec]
    last_routed: int = -1  # the last block of which the experts of every token are kept

    @property
    def last_mixing(self) -> int:
        """Past this block tokens do not see each other any more, and only those whose logits are
        wanted are computed."""
        own = [*self.kv_specs, *self.state_specs] or [self.blocks[-1].stop - 1]
        return max(*own, self.last_routed)

    def with_head(
        self, kv_specs: dict[int, KVSpec], state_specs: dict[int, StateSpec]
    ) -> ModelStages:
        """Of the model with an MTPHead, which needs every token's hidden state."""
        return replace(
            self, kv_specs=self.kv_specs | kv_specs, state_specs=self.state_specs | state_specs
        )

    def without_head(self) -> ModelStages:
        """Of the model alone."""
        end = self.blocks[-1].stop
        return replace(
            self,
            kv_specs={i: spec for i, spec in self.kv_specs.items() if i < end},
            state_specs={i: spec for i, spec in self.state_specs.items() if i < end},
        )

    @classmethod
    def of(cls, builder: BlockBuilder, vocabulary_bytes: int) -> ModelStages:
        """Of a model on so many stages as the builder's pipeline has ranks. `vocabulary_bytes`:
        this rank's part of the embedding, or of the head. Raises ConfigurationError when there are
        fewer blocks than stages."""
        pattern, stages = builder.config.pattern, builder.parallel.pipeline.size
        if stages > len(pattern):
            raise ConfigurationError(
                f"--pipeline-model-parallel-size is {stages}, but the model has only "
                f"{len(pattern)} blocks ({pattern}), and every stage needs at least one."
            )
        with torch.device("meta"):  # one of each kind tells how large they are
            kinds = {
                letter: builder.block(pattern.index(letter)) for letter in dict.fromkeys(pattern)
            }
        own = {letter: _bytes(block) - _shared_bytes(block) for letter, block in kinds.items()}
        before = [0, *accumulate(own[letter] for letter in pattern)]
        uses = [0, *accumulate(letter == SHARED_TRANSFORMER for letter in pattern)]
        shared_bytes, num_shared = 0, 0
        if (user := kinds.get(SHARED_TRANSFORMER)) is not None:
            assert builder.config.shared_transformer is not None
            shared_bytes = _shared_bytes(user)
            num_shared = builder.config.shared_transformer.num_blocks

        def size(start: int, end: int) -> float:
            """Bytes of a stage with the blocks [start, end); inf: it can't be one."""
            if re.match(_WITHOUT_ITS_INDEX, pattern[start:end]):
                return math.inf
            total = before[end] - before[start]
            total += shared_bytes * min(uses[end] - uses[start], num_shared)
            return total + vocabulary_bytes * ((start == 0) + (end == len(pattern)))

        blocks = split_evenly(len(pattern), stages, size)
        if any(math.isinf(size(own.start, own.stop)) for own in blocks):
            raise ConfigurationError(
                f"--pipeline-model-parallel-size is {stages}, but then some stage would begin with "
                "attention that shares an index of a layer on the stage before; use fewer."
            )
        attentions = {letter: block.attention for letter, block in kinds.items()}
        recurrents = {letter: block.mixer.recurrent for letter, block in kinds.items()}
        return cls(
            blocks,
            {i: a.kv_spec() for i, c in enumerate(pattern) if (a := attentions[c]) is not None},
            {i: r.spec for i, c in enumerate(pattern) if (r := recurrents[c]) is not None},
        )


def split_evenly(count: int, stages: int, size: Size) -> tuple[range, ...]:
    """[0, count) in so many contiguous ranges, none of them empty: the largest `size` of any is as
    small as can be, and then the sum of their squares."""
    limit, _ = _cheapest(count, stages, size, max)

    def squared(start: int, end: int) -> float:
        value = size(start, end)
        return math.inf if value > limit else value * value

    _, bounds = _cheapest(count, stages, squared, operator.add)
    return tuple(range(start, end) for start, end in pairwise(bounds))


def _cheapest(
    count: int, stages: int, cost: Size, combine: Callable[[Any, Any], Any]
) -> tuple[Any, tuple[int, ...]]:
    """The least combined cost of a split, and its bounds; of equally good ones the same on every
    rank. O(count^2 * stages)."""
    best: dict[int, tuple[Any, tuple[int, ...]]] = {0: (0, (0,))}  # by the end so far
    for stage in range(1, stages + 1):
        # those that leave a block for each later stage
        ends = range(stage, count - (stages - stage) + 1) if stage < stages else (count,)
        best = {
            end: min(
                (combine(so_far, cost(start, end)), (*bounds, end))
                for start, (so_far, bounds) in best.items()
                if start < end
            )
            for end in ends
        }
    return best[count]


def _bytes(module: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def _shared_bytes(block: Block) -> int:
    """Of the transformer that it shares with other blocks."""
    return _bytes(block.transformer.shared) if isinstance(block, SharedTransformerBlock) else 0
