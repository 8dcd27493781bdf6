"""LLM and how an engine is built: options, memory, errors, streaming."""

from __future__ import annotations

import dataclasses
import gc
import logging

import pytest

from megatron_hybrid import (
    LLM,
    ConfigurationError,
    FinishReason,
    InvalidRequestError,
    SamplingParams,
)
from megatron_hybrid.cache.geometry import GIB
from megatron_hybrid.engine.build import build_engine
from megatron_hybrid.engine.garbage import BEFORE_A_FULL_ONE
from tests.tiny_models import make_tiny_model

SMALL = {
    "inference_dynamic_batching_block_size": 16,
    "inference_dynamic_batching_buffer_size_gb": 0.02,
    "inference_dynamic_batching_max_requests": 8,
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bamba")
    make_tiny_model("bamba", path)
    return str(path)


@pytest.fixture(scope="module")
def llm(folder: str) -> LLM:
    return LLM(folder, **SMALL)


def test_a_single_prompt_and_a_list_give_the_same(llm: LLM):
    one = llm.generate([1, 2, 3], PARAMS)
    many = llm.generate([[1, 2, 3], [4, 5]], PARAMS, progress=False)
    assert len(one) == 1 and one[0].token_ids == many[0].token_ids
    assert one[0].finish_reason is FinishReason.LENGTH
    assert llm.generate([], PARAMS) == []


def test_each_prompt_may_have_its_own_params(llm: LLM):
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (1, 4)]
    outputs = llm.generate([[1, 2], [3, 4]], params, progress=False)
    assert [len(output.token_ids) for output in outputs] == [1, 4]
    with pytest.raises(InvalidRequestError, match="2 prompts but 1"):
        llm.generate([[1, 2], [3, 4]], params[:1])


def test_a_bad_prompt_generates_nothing_and_leaves_the_engine_clean(llm: LLM):
    with pytest.raises(InvalidRequestError, match="token id 160"):
        llm.generate([[1, 2], [160]], PARAMS)
    assert llm.generate([[1, 2]], PARAMS)[0].token_ids
    assert llm.engine.context.rows.num_free == 8


def test_while_it_generates_objects_are_all_looked_at_seldom(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    seen, step = [], llm._step

    def observed() -> object:
        seen.append(gc.get_threshold())
        return step()

    monkeypatch.setattr(llm, "_step", observed)
    before = gc.get_threshold()
    llm.generate([[1, 2]], PARAMS)
    assert set(seen) == {(*before[:2], BEFORE_A_FULL_ONE)}
    assert gc.get_threshold() == before
    with pytest.raises(InvalidRequestError):
        llm.generate([[160]], PARAMS)
    assert gc.get_threshold() == before


def test_text_needs_a_tokenizer(llm: LLM):
    with pytest.raises(ConfigurationError, match="tokenizer"):
        llm.generate("hello", PARAMS)


def test_streaming_yields_growing_output_and_equals_generate(llm: LLM):
    whole = llm.generate([5, 6, 7], PARAMS)[0].token_ids
    lengths, last = [], None
    for last in llm.stream([5, 6, 7], PARAMS):
        lengths.append(len(last.token_ids))
    assert lengths == [1, 2, 3, 4, 5] and last is not None and last.token_ids == whole


def test_leaving_a_stream_aborts_its_request(llm: LLM):
    stream = llm.stream([5, 6, 7], SamplingParams(temperature=0.0, max_tokens=500))
    next(stream)
    stream.close()
    llm.engine.step()
    assert not llm.engine.has_work()
    assert llm.engine.context.rows.num_free == 8


def test_sampling_with_a_seed_is_the_same_alone_and_in_a_batch(llm: LLM):
    params = SamplingParams(temperature=1.0, top_k=20, max_tokens=12, seed=42)
    alone = llm.generate([9, 8, 7], params)[0].token_ids
    others = [SamplingParams(temperature=1.5, max_tokens=12) for _ in range(5)]
    batch = llm.generate(
        [[i, i + 1] for i in range(5)] + [[9, 8, 7]], [*others, params], progress=False
    )
    assert batch[-1].token_ids == alone
    other_seed = SamplingParams(temperature=1.0, top_k=20, max_tokens=12, seed=43)
    assert llm.generate([9, 8, 7], other_seed)[0].token_ids != alone


def test_choices_differ_and_the_first_is_that_of_a_single_one(llm: LLM):
    params = SamplingParams(temperature=1.0, top_k=20, max_tokens=12, seed=42)
    alone = llm.generate([9, 8, 7], params)[0]
    several = dataclasses.replace(params, n=4)
    (output,) = llm.generate([9, 8, 7], several, progress=False)
    answers = [tuple(choice.token_ids) for choice in output.choices]
    assert len(answers) == len(set(answers)) == 4
    assert output.token_ids == alone.token_ids
    others = llm.generate([[1, 2], [9, 8, 7]], several, progress=False)[1].choices
    assert [tuple(choice.token_ids) for choice in others] == answers
    assert llm.engine.context.rows.num_free == 8


def test_choices_share_one_prefill(folder: str):
    llm = LLM(folder, **SMALL)
    prompt = list(range(1, 90))
    (output,) = llm.generate([prompt], SamplingParams(max_tokens=4, n=6), progress=False)
    assert len(output.choices) == 6
    assert llm.stats()["computed_tokens"] == len(prompt)
    assert output.cached_tokens == 0


def test_requests_without_a_seed_differ_but_a_rerun_repeats_them(folder: str):
    params = SamplingParams(temperature=1.0, max_tokens=12)
    runs = []
    for _ in range(2):
        outputs = LLM(folder, seed=5, **SMALL).generate([[1, 2]] * 3, params, progress=False)
        runs.append([tuple(output.token_ids) for output in outputs])
    assert runs[0] == runs[1] and len(set(runs[0])) == 3


def test_the_budget_for_states_decides_the_number_of_slots(folder: str, llm: LLM):
    size = llm.engine.context.geometry.bytes_per_slot
    for slots in (1, 3):
        made = LLM(
            folder, inference_dynamic_batching_prefix_caching_mamba_gb=slots * size / GIB, **SMALL
        )
        assert made.engine.context.geometry.num_cached_slots == slots
        assert made.stats()["state_slots"] == slots + 8


def test_a_budget_without_a_single_slot_is_warned_about_and_skips_nothing(folder, caplog):
    with caplog.at_level(logging.WARNING):
        llm = LLM(folder, inference_dynamic_batching_prefix_caching_mamba_gb=1e-9, **SMALL)
    assert "one state takes" in caplog.text
    with pytest.raises(ConfigurationError, match="one state takes"):
        build_engine(llm.config, refuse_useless_budget=True)
    for _ in range(2):
        assert llm.generate([list(range(40))], PARAMS)[0].cached_tokens == 0


def test_the_start_log_says_what_was_chosen(folder, caplog):
    with caplog.at_level(logging.INFO):
        LLM(folder, **SMALL)
    for words in ("block size 16", "grid 16", "bytes per state", "smallest prefix"):
        assert words in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inference_dynamic_batching_buffer_size_gb": 1e-5}, "buffer-size-gb is 0.0000"),
        ({"inference_max_seq_length": 10**9}, "made for at most 2048"),
        ({"tensor_model_parallel_size": 2}, "torchrun"),
        ({"load": "/nowhere"}, "--load names /nowhere"),
    ],
)
def test_what_does_not_fit_is_refused_by_flag(folder, options, message):
    with pytest.raises(ConfigurationError, match=message):
        LLM(**({"load": folder} | SMALL | options))


def test_a_folder_and_a_config_together_are_refused(llm: LLM):
    with pytest.raises(ConfigurationError, match="not both"):
        LLM("x", config=llm.config)


def test_without_max_tokens_an_answer_fills_the_kv_blocks(folder, llm, caplog):
    geometry = llm.engine.context.geometry
    budget = 8 * geometry.bytes_per_slot + 7 * geometry.bytes_per_block
    options = {**SMALL, "inference_dynamic_batching_buffer_size_gb": budget / GIB}
    with caplog.at_level(logging.INFO):
        llm = LLM(folder, **options)
    limit = 6 * 16 + 1
    assert llm.engine.max_seq_length == limit
    assert f"up to {limit} tokens each (--inference-dynamic-batching-buffer-size-gb)" in caplog.text
    endless = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    for prompt in ([1, 2, 3], list(range(limit - 1)), [1, 2, 3]):
        (output,) = llm.generate(prompt, endless)
        assert len(prompt) + len(output.token_ids) == limit
        assert output.finish_reason is FinishReason.LENGTH
    # 128 tokens, as many as nobody has asked for, do not fit
    (output,) = llm.generate([1] * (limit - 3))
    assert len(output.token_ids) == 3
