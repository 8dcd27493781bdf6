"""Drafts on a GPU: the tokens of the reference without them, from graphs and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_hybrid import LLM, SamplingParams
from tests.gpu.test_engine_gpu import GRAPHS, OPTIONS, prompts
from tests.knowing_drafter import Knowing, with_drafts, without_clock
from tests.mtp_models import MTP_FAMILIES, make_mtp_model
from tests.tiny_models import FAMILIES, make_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
ROOM = {"inference_dynamic_batching_buffer_size_gb": 0.1}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_what_is_cached_are_those_without_drafts(family: str, tmp_path: Path) -> None:
    make_tiny_model(family, tmp_path)
    plain = LLM(str(tmp_path), device="cuda", **(OPTIONS | ROOM))  # type: ignore[arg-type]
    expected = [plain.generate(prompts(), PARAMS, progress=False) for _ in range(2)]
    texts = [output.prompt_token_ids + output.token_ids for output in expected[0]]
    for drafts, graphs in ((1, 6), (3, 6), (8, 6), (4, 0)):
        options = OPTIONS | ROOM | {"num_speculative_tokens": drafts, GRAPHS: graphs}
        llm = LLM(str(tmp_path), device="cuda", **options)  # type: ignore[arg-type]
        with_drafts(llm, Knowing(texts, wrong_every=7))
        for right in expected:
            found = llm.generate(prompts(), PARAMS, progress=False)
            assert [o.token_ids for o in found] == [o.token_ids for o in right], (drafts, graphs)
            assert [o.cached_tokens for o in found] == [o.cached_tokens for o in right]
        assert llm.stats()["accepted_tokens"] > 50
        llm.engine.check_integrity()


@pytest.mark.parametrize("family", MTP_FAMILIES)
def test_drafts_of_a_head_are_those_of_the_reference(family: str, tmp_path: Path) -> None:
    """As many of them hold as on a CPU, and the tokens are those without drafts."""
    make_mtp_model(family, tmp_path, agrees=True)
    plain = LLM(str(tmp_path), device="cuda", **(OPTIONS | ROOM))  # type: ignore[arg-type]
    expected = [plain.generate(prompts(), PARAMS, progress=False) for _ in range(2)]
    for drafts, graphs in ((1, 6), (4, 6), (8, 6), (4, 0)):
        options = OPTIONS | ROOM | {"num_speculative_tokens": drafts, "drafter": "heads"}
        reference = LLM(str(tmp_path), device="cpu", **options)  # type: ignore[arg-type]
        reference.engine.runner.asynchronous = True
        llm = LLM(str(tmp_path), device="cuda", **(options | {GRAPHS: graphs}))  # type: ignore[arg-type]
        without_clock(llm)
        for right in expected:
            reference.generate(prompts(), PARAMS, progress=False)
            found = llm.generate(prompts(), PARAMS, progress=False)
            assert [o.token_ids for o in found] == [o.token_ids for o in right], (drafts, graphs)
            assert [o.cached_tokens for o in found] == [o.cached_tokens for o in right]
        held = llm.stats()["accepted_tokens"]
        assert held > 50
        # one that rounding decides changes how many drafts the next steps have
        assert held == pytest.approx(reference.stats()["accepted_tokens"], rel=0.05)
        llm.engine.check_integrity()


def test_samples_are_those_without_drafts(tmp_path: Path) -> None:
    make_tiny_model("nemotron_h", tmp_path)
    plain = LLM(str(tmp_path), device="cuda", **(OPTIONS | ROOM))  # type: ignore[arg-type]
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=4, max_tokens=24, ignore_eos=True)
    expected = plain.generate(prompts(), params, progress=False)
    texts = [output.prompt_token_ids + output.token_ids for output in expected]
    options = OPTIONS | ROOM | {"num_speculative_tokens": 4}
    llm = LLM(str(tmp_path), device="cuda", **options)  # type: ignore[arg-type]
    with_drafts(llm, Knowing(texts, wrong_every=7))
    found = llm.generate(prompts(), params, progress=False)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    assert llm.stats()["accepted_tokens"] > 50
