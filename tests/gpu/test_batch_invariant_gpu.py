"""Whole engines in batch-invariant mode on a GPU: every tiny family has the bits of requests alone,
in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
from tests.engine.bits import DRAFTS, TOKENS, Known, params  # noqa: E402
from tests.tiny_models import FAMILIES  # noqa: E402

pytestmark = pytest.mark.gpu
GRAPHS = "inference_dynamic_batching_num_cuda_graphs"
OPTIONS = {"dtype": "bfloat16", GRAPHS: 3, "inference_dynamic_batching_buffer_size_gb": 0.3}


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_have_the_bits_of_requests_alone(family: str, tmp_path: Path) -> None:
    known = Known.of(family, tmp_path)
    known.options = OPTIONS
    wanted = params()
    known.learn(known.prompts, wanted)
    llm = known.llm()
    for _ in range(2):  # cold, warm
        outputs = llm.generate(known.prompts, wanted, progress=False)
        known.check(outputs, wanted)
    assert sum(output.cached_tokens for output in outputs) > 0
    for options in ({TOKENS: 53}, {GRAPHS: 0}):
        known.check(known.llm(**options).generate(known.prompts, wanted, progress=False), wanted)
    repeated = [prompt * 3 for prompt in known.prompts]
    known.check(known.llm(**{DRAFTS: 3}).generate(repeated, wanted, progress=False), wanted)
