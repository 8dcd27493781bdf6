"""The engine against transformers' full recompute: same greedy tokens, same log-probabilities, for
prompts of every length modulo the grid, in every way that a prompt can be computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from megatron_hybrid import LLM, EngineConfig, RequestOutput, SamplingParams
from megatron_hybrid.cache.geometry import GIB
from tests.tiny_models import FAMILIES, make_tiny_model

GRID = 16
ANSWER = 6
TOLERANCE = 2e-3
OPTIONS = {
    "inference_dynamic_batching_block_size": GRID,
    "inference_dynamic_batching_buffer_size_gb": 0.02,
    "inference_dynamic_batching_max_requests": 20,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.01,
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=3)


@dataclass
class Oracle:
    """A tiny model, prompts of every length modulo the grid, and transformers' answers."""

    folder: Path
    model: PreTrainedModel
    prompts: list[list[int]]
    answers: list[list[int]]
    known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)

    def llm(self, **options: object) -> LLM:
        return LLM(str(self.folder), **(OPTIONS | options))  # type: ignore[arg-type]

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocabulary], from one forward pass without a cache."""
        key = tuple(tokens)
        if key not in self.known:
            with torch.no_grad():
                logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
            self.known[key] = torch.log_softmax(logits.float(), dim=-1)
        return self.known[key]

    def greedy(self, prompt: list[int], count: int = ANSWER) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logprobs(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    def check(self, outputs: list[RequestOutput], answers: list[list[int]] | None = None) -> None:
        """Tokens equal, and log-probabilities within tolerance, to transformers'."""
        expected = self.answers if answers is None else answers
        assert [output.token_ids for output in outputs] == expected
        for output in outputs:
            assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
            truth = self.logprobs(output.prompt_token_ids + output.token_ids)
            for i, entry in enumerate(output.logprobs):
                row = truth[len(output.prompt_token_ids) - 1 + i]
                assert entry.token_id == output.token_ids[i]
                assert abs(entry.logprob - float(row[entry.token_id])) < TOLERANCE
                for token, logprob in entry.top:
                    assert abs(logprob - float(row[token])) < TOLERANCE


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_tiny_model(request.param, folder, chunk_size=GRID)
    generator = torch.Generator().manual_seed(5)
    vocab = model.config.vocab_size
    shared = torch.randint(0, vocab, (200,), generator=generator).tolist()
    # lengths 1 to 3 are shorter than the convolution's window; 33 to 48 cover the grid
    prompts = [shared[:n] for n in (1, 2, 3)]
    for n in range(2 * GRID + 1, 3 * GRID + 1):
        fork = n - n % 5 * 4
        prompts.append(
            shared[:fork] + torch.randint(0, vocab, (n - fork,), generator=generator).tolist()
        )
    made = Oracle(folder, model, prompts, [])
    made.answers = [made.greedy(prompt) for prompt in prompts]
    return made


@pytest.mark.parametrize("mode", ["extract", "break"])
def test_batched_cold_and_warm_equal_transformers(oracle: Oracle, mode: str):
    llm = oracle.llm(prefill_checkpoint_mode=mode)
    oracle.check(llm.generate(oracle.prompts, PARAMS, progress=False))
    warm = llm.generate(oracle.prompts, PARAMS, progress=False)
    oracle.check(warm)
    llm.engine.check_integrity()
    for output in warm:
        length = len(output.prompt_token_ids)
        assert output.cached_tokens == (length - 1) // GRID * GRID


@pytest.mark.parametrize("mode", ["extract", "break"])
@pytest.mark.parametrize("budget", [21, 50])
def test_prompts_cut_into_chunks_equal_transformers(oracle: Oracle, mode: str, budget: int):
    llm = oracle.llm(prefill_checkpoint_mode=mode, inference_dynamic_batching_max_tokens=budget)
    oracle.check(llm.generate(oracle.prompts, PARAMS, progress=False))
    oracle.check(llm.generate(oracle.prompts, PARAMS, progress=False))
    llm.engine.check_integrity()


def test_one_at_a_time_without_a_cache_equals_transformers(oracle: Oracle):
    llm = oracle.llm(inference_dynamic_batching_prefix_caching=False)
    outputs = [llm.generate(prompt, PARAMS, progress=False)[0] for prompt in oracle.prompts]
    oracle.check(outputs)
    assert all(output.cached_tokens == 0 for output in outputs)


@pytest.mark.parametrize("mode", ["extract", "break"])
def test_the_next_turn_equals_transformers(oracle: Oracle, mode: str):
    llm = oracle.llm(prefill_checkpoint_mode=mode)
    prompts = oracle.prompts[3::3]
    first = llm.generate(prompts, PARAMS, progress=False)
    turns = [o.prompt_token_ids + o.token_ids + [7, 8, 9, 10, 11, 12] for o in first]
    answers = [oracle.greedy(turn) for turn in turns]
    second = llm.generate(turns, PARAMS, progress=False)
    oracle.check(second, answers)
    assert all(output.cached_tokens >= 32 for output in second)
    oracle.check(llm.generate(turns, PARAMS, progress=False), answers)


def test_a_cache_too_small_for_all_still_gives_the_right_answers(oracle: Oracle):
    geometry = oracle.llm().engine.context.geometry
    kv = 13 * geometry.bytes_per_block  # one is the dummy block
    llm = oracle.llm(
        inference_dynamic_batching_max_requests=3,
        inference_dynamic_batching_buffer_size_gb=(kv + 3 * geometry.bytes_per_state) / GIB,
        inference_dynamic_batching_prefix_caching_mamba_gb=2 * geometry.bytes_per_state / GIB,
        inference_dynamic_batching_max_tokens=40,
    )
    for _ in range(2):
        oracle.check(llm.generate(oracle.prompts, PARAMS, progress=False))
    stats = llm.stats()
    assert stats["kv_blocks"] == 12 and stats["kv_evictions"] > 0
    if geometry.has_recurrent:
        assert stats["state_slots"] == 5 and stats["state_evictions"] > 0
    llm.engine.check_integrity()


def test_prompt_logprobs_equal_transformers_and_skip_nothing(oracle: Oracle):
    llm = oracle.llm(inference_dynamic_batching_max_tokens=29)
    prompts = oracle.prompts[:6]
    params = SamplingParams(
        temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    for _ in range(2):
        outputs = llm.generate(prompts, params, progress=False)
        oracle.check(outputs, oracle.answers[:6])
        for output in outputs:
            assert output.cached_tokens == 0
            assert output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
            truth = oracle.logprobs(output.prompt_token_ids)
            assert output.prompt_logprobs[0] is None
            for i, entry in enumerate(output.prompt_logprobs[1:], start=1):
                assert entry is not None and entry.token_id == output.prompt_token_ids[i]
                assert abs(entry.logprob - float(truth[i - 1, entry.token_id])) < TOLERANCE
                assert len(entry.top) == 2


def test_an_idle_step_changes_nothing(oracle: Oracle):
    llm = oracle.llm()
    llm.generate(oracle.prompts, PARAMS, progress=False)
    before = llm.stats()
    llm.engine.dummy_forward()
    assert llm.stats() == before
    oracle.check(llm.generate(oracle.prompts, PARAMS, progress=False))


def test_bfloat16_answers_differ_little(oracle: Oracle):
    llm = oracle.llm(dtype="bfloat16")
    for _ in range(2):
        outputs = llm.generate(oracle.prompts[3:], PARAMS, progress=False)
        for output in outputs:
            assert output.logprobs is not None
            truth = oracle.logprobs(output.prompt_token_ids + output.token_ids)
            first = output.logprobs[0]
            row = truth[len(output.prompt_token_ids) - 1]
            assert abs(first.logprob - float(row[first.token_id])) < 0.25


def test_engine_config_can_be_given_whole(oracle: Oracle):
    config = EngineConfig.from_mapping({"load": str(oracle.folder), **OPTIONS}, "test")
    oracle.check(LLM(config=config).generate(oracle.prompts, PARAMS, progress=False))
