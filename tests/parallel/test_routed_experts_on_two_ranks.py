"""Which experts tokens had, where two ranks have halves of each layer, or are two replicas that
share the experts: those of transformers' routers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.parallel.ranks import run_on_two_ranks
from tests.parallel.routed_worker import PROMPTS
from tests.routers import Routers
from tests.thorough import usually


@pytest.mark.parametrize("split", usually(["expert"], ["tensor", "expert"]))
def test_both_ranks_know_all_of_them(tmp_path: Path, split: str) -> None:
    routers = Routers.of("nemotron_h_moe", tmp_path / "model")
    flag = f"{split}_model_parallel_size"
    found = run_on_two_ranks("tests.parallel.routed_worker", tmp_path, flag, str(routers.folder))[
        "found"
    ]
    assert len(found) == 2 * len(PROMPTS)
    for tokens, experts in found:
        routers.check_ids(tokens, np.asarray(experts, dtype=np.uint8))
