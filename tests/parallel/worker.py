"""One rank of a tensor-parallel run: loads each folder and saves its logits.

    python -m tests.parallel.worker OUTPUT_FOLDER MODEL_FOLDER...

The environment is torchrun's: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from megatron_hybrid.models.checkpoints.weights import load_model
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.parallel import ParallelContext, RankGroup, initialize
from tests.models.driver import Driver, Segment


def mixed_steps(model: HybridModel) -> Tensor:
    """Logits of a cold batch, then of a step with a decode, a continuation and a new prompt."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, 160, (3, 40), generator=generator).tolist()
    driver = Driver(model)
    a, b, c = (driver.sequence() for _ in texts)
    first = driver.step([Segment(a, texts[0][:30]), Segment(b, texts[1][:17])])
    second = driver.step(
        [Segment(a, texts[0][30:31]), Segment(b, texts[1][17:40]), Segment(c, texts[2][:9])]
    )
    return torch.cat(first + second)


def check_collectives(parallel: RankGroup) -> None:
    rank, size = parallel.rank, parallel.size
    assert parallel.is_first == (rank == 0)
    ones = torch.full((2,), float(rank))
    assert parallel.all_reduce(ones).tolist() == [sum(range(size))] * 2
    part = torch.tensor([[10.0 * rank, 10.0 * rank + 1], [0.0, rank]])
    everything = parallel.all_gather(part)
    assert everything[0].tolist() == [10.0 * r + i for r in range(size) for i in (0, 1)]
    assert everything[1].tolist() == [float(v) for r in range(size) for v in (0, r)]
    assert parallel.broadcast(torch.tensor([rank + 5])).item() == 5
    message = {"step": 3} if parallel.is_first else None
    assert parallel.broadcast_object(message) == {"step": 3}
    assert parallel.minimum(7 - rank) == 8 - size
    parallel.barrier()


class Captures:
    """CUDA graphs, as it were."""

    def __init__(self, parallel: ParallelContext) -> None:
        self._parallel = parallel
        self.cleared = False

    def clear(self) -> None:
        self._parallel.tensor.barrier()  # the groups still exist
        self.cleared = True


def main(ranks: int, output: Path, folders: list[str]) -> None:
    torch.set_num_threads(1)
    parallel = initialize(ranks)
    check_collectives(parallel.tensor)
    for folder in folders:
        model = load_model(
            folder, device=torch.device("cpu"), dtype=None, parallel=parallel, progress=False
        )
        shapes = {
            "kv_heads": {spec.num_kv_heads for spec in model.kv_specs.values()},
            "ssm": {spec.ssm_shape for spec in model.state_specs.values()},
            "conv": {spec.conv_shape for spec in model.state_specs.values()},
        }
        result = {"logits": mixed_steps(model), **shapes}
        torch.save(result, output / f"{Path(folder).name}.{parallel.tensor.rank}")
    captures = Captures(parallel)
    parallel.clear_first(captures)
    parallel.destroy()
    assert captures.cleared
    # After leaving the groups a process can make others, here one of its own.
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    own = initialize()
    assert (own.tensor.size, own.tensor.rank) == (1, 0)
    own.destroy()


if __name__ == "__main__":
    main(int(os.environ["WORLD_SIZE"]), Path(sys.argv[1]), sys.argv[2:])
