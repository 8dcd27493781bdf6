"""The engine against transformers' full recompute: same greedy tokens, same log-probabilities, for
prompts of every length modulo the grid, in every way that a prompt can be computed.

The test_oracle_*.py files run these tests on their families, so that they can run side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from megatron_hybrid import LLM, EngineConfig, RequestOutput, SamplingParams
from megatron_hybrid.cache.block_hash import SequenceKeys
from megatron_hybrid.cache.geometry import GIB
from megatron_hybrid.execution.random_streams import stream_seed
from megatron_hybrid.scoring import AnswerScore
from tests.knowing_drafter import Knowing, with_drafts
from tests.thorough import EVERYTHING, usually
from tests.tiny_models import ATTENTION_ONLY, FAMILIES, make_tiny_model

# What each test_oracle_*.py runs.
KINDS = {
    "mamba2": ("nemotron_h", "nemotron_h_moe", "bamba", "granite_moe_hybrid", "mamba2"),
    "blocks": ("falcon_h1", "zamba2", "in_flight", "recurrent_only", "llama", "qwen3"),
    "mamba1": ("zamba", "mamba", "falcon_mamba", "jamba", "lfm2", "lfm2_moe"),
    "plain_torch": ("recurrent_gemma", "rwkv", "xlstm"),
    "gated_delta_net": ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid"),
    "latent": ("kimi_linear", "bailing_hybrid"),
    "indexed": ("glm5_next",),
    "lightning": ("minimax", "bailing_moe_linear", "bailing_moe_v2_5"),
    "inkling": ("inkling",),
    "inkling2": ("inkling2",),
    "convolved": ("zaya", "zaya_sliding"),
    "streams": ("qwen4_exp",),
    "windows": ("lfm3", "window_alone", "window_and_conv", "window_and_full"),
}
ZAYA_SLIDING = ["hybrid", "hybrid_sliding", "hybrid"]
# An LFM3's layers.
WINDOWED = {
    "window_alone": ["sliding_attention"] * 3,
    "window_and_conv": ["sliding_attention", "conv"],
    "window_and_full": ["full_attention", "sliding_attention"],
}
assert set(FAMILIES) <= {kind for kinds in KINDS.values() for kind in kinds}

GRID = 16
ANSWER = 6
TOLERANCE = 2e-3
OPTIONS = {
    "inference_dynamic_batching_block_size": GRID,
    "inference_dynamic_batching_buffer_size_gb": 0.01,
    "inference_dynamic_batching_max_requests": 40,
    "inference_dynamic_batching_prefix_caching_mamba_gb": 0.01,
}
EXACT_ENDS = "inference_dynamic_batching_prefix_caching_exact_ends"
INTERVAL = "inference_dynamic_batching_prefix_caching_checkpoint_interval"
POLICY = "inference_dynamic_batching_prefix_caching_eviction_policy"
WRITE_INTERVAL = "mamba_inference_state_write_interval"
PARAMS = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=3)
MODES = pytest.mark.parametrize("mode", ["extract", "break"])  # where chunks of prompts end

Prompt = list[int]


# Two kinds go through every test, the others through ESSENTIAL, which is what each family's
# layers do by themselves: who shares what, who waits and who is sampled does not depend on the
# family. test_logits.py has every family's logits in chunks, from a checkpoint and in bfloat16.
# TESTS=all: all of them, everything.
FULLY_TESTED = ("nemotron_h", "in_flight")
ESSENTIAL = {
    "test_batched_cold_and_warm_equal_transformers",
    "test_prompts_cut_into_tiny_chunks_equal_transformers",
    "test_the_next_turns_compute_exactly_what_is_new",
    "test_drafts_change_neither_answers_nor_what_is_cached",
    "test_every_kept_state_is_that_of_a_prompt_that_ends_there",
}


# Of the same layers as another kind: one test shows that their weights are in place.
LIKE_OTHERS = {
    *("nemotron_h_moe", "granite_moe_hybrid", "recurrent_only", "qwen3", "falcon_mamba"),
    *("lfm2_moe", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "bailing_moe_v2_5"),
    *("window_and_conv", "window_and_full", "zaya_sliding"),
}
# Whose answers are compared with drafts, too; test_logits.py has all families' logits with them.
DRAFTED = {
    *("qwen3_next", "falcon_h1", "jamba", "lfm2", "bailing_hybrid", "minimax", "lfm3", "inkling"),
    *("inkling2", "zaya", "glm5_next", "qwen4_exp"),
}
SMALLER_BUDGETS = {3, 41}  # of the two of each test


def is_thorough(test: str, oracle: str, mode: str = "", **others: object) -> bool:
    """Whether CI leaves out `test` of the kind `oracle` (tests/engine/conftest.py asks)."""
    if test == "test_preempted_requests_give_the_right_answers":
        return oracle not in PREEMPTED
    if oracle in FULLY_TESTED:
        if test in OF_ONE:
            return oracle != OF_ONE[test]
        return is_other_half(oracle, mode, **others)
    if oracle in LIKE_OTHERS and test != "test_batched_cold_and_warm_equal_transformers":
        return True
    if test not in ESSENTIAL or mode == "break" or not others.get("exact_ends", True):
        return True
    if test == "test_drafts_change_neither_answers_nor_what_is_cached":
        return oracle not in DRAFTED
    return others.get("budget") in SMALLER_BUDGETS


# Tests without modes of which one of both kinds is enough: where requests are one after the other,
# and where drafts, preemption or a prompt's log-probabilities have a step in flight.
OF_ONE = {
    "test_one_at_a_time_without_a_cache_equals_transformers": "nemotron_h",
    "test_a_prompt_that_branches_off_anywhere_resumes_from_an_interval": "nemotron_h",
    "test_n_sampled_answers_are_those_of_their_own_streams": "nemotron_h",
    "test_bfloat16_answers_differ_little": "nemotron_h",
    "test_engine_config_can_be_given_whole": "nemotron_h",
    "test_preempted_samples_are_those_of_an_engine_with_room": "in_flight",
    "test_samples_with_drafts_are_those_without": "in_flight",
    "test_prompt_logprobs_equal_transformers_and_skip_nothing": "in_flight",
}
LATTER = {"exact_ends": False, "budget": 50}  # of each parameter's values


def is_other_half(oracle: str, mode: str, **others: object) -> bool:
    """Whether this kind leaves the case to the others: it has half of a test's cases, with every
    pair of parameters if there are three. nemotron_h and in_flight, of the same model, have one
    half each: of a test with modes alone one each."""
    signs = [mode == "break"] if mode else []
    signs += [others[name] == value for name, value in LATTER.items() if name in others]
    if not signs:
        return False
    return bool(sum(signs) % 2) == (oracle != "in_flight")


def write_interval(kind: str) -> int:
    """Of a family's engines: 1 to 4 tokens from one write of a state to the next."""
    every = [one for kinds in KINDS.values() for one in kinds]
    return 1 + (every.index(kind) + 2) % 4


@dataclass
class Oracle:
    """A tiny model, a crowd of prompts of every length modulo the grid, and transformers' answers
    to some: in CI to those of every second length, and the next kind has the others."""

    kind: str
    folder: Path
    model: PreTrainedModel
    has_recurrent: bool
    asynchronous: bool
    text: Prompt  # random
    crowd: list[Prompt]
    prompts: list[Prompt]  # of the crowd
    answers: list[list[int]]
    tolerance: float = TOLERANCE  # of log-probabilities
    options: dict[str, object] = field(default_factory=dict)  # of all engines
    known: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    built: dict[tuple[tuple[str, object], ...], LLM] = field(default_factory=dict)

    def llm(self, **options: object) -> LLM:
        """An engine with these options and nothing in its cache. The same options give the same
        engine: what one test left behind must not change what the next one gets."""
        llm = self.built.get(key := tuple(sorted(options.items())))
        if llm is None:
            every = OPTIONS | {WRITE_INTERVAL: write_interval(self.kind)} | self.options | options
            llm = self.built[key] = LLM(str(self.folder), **every)  # type: ignore[arg-type]
            llm.engine.runner.asynchronous = self.asynchronous
        llm.engine.reset()
        return llm

    @property
    def own(self) -> Prompt:
        """Tokens that no prompt begins with."""
        return self.text[200:]

    def logprobs(self, tokens: Prompt) -> torch.Tensor:
        """[tokens, vocabulary], from one forward pass without a cache."""
        self.learn([tokens])
        return self.known[tuple(tokens)]

    def learn(self, texts: Sequence[Prompt]) -> None:
        """The log-probabilities of those that are not known yet, in one forward pass: what stands
        behind the end of the shorter ones changes nothing before it."""
        new = [key for key in dict.fromkeys(map(tuple, texts)) if key not in self.known]
        if not new:
            return
        batch = torch.zeros(len(new), max(map(len, new)), dtype=torch.long)
        for row, key in zip(batch, new, strict=True):
            row[: len(key)] = torch.tensor(key)
        with torch.no_grad():
            logits = self.model(batch, use_cache=False).logits
        for row, key in zip(logits, new, strict=True):
            self.known[key] = torch.log_softmax(row[: len(key)].float(), dim=-1)

    def greedy(self, prompts: Sequence[Prompt], count: int = ANSWER) -> list[list[int]]:
        """The answers, of one forward pass for each of their tokens."""
        texts = [list(prompt) for prompt in prompts]
        for _ in range(count):
            self.learn(texts)
            for text in texts:
                text.append(int(self.logprobs(text)[-1].argmax()))
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]

    def check(
        self, outputs: Sequence[RequestOutput], answers: list[list[int]] | None = None
    ) -> None:
        """Tokens equal, and log-probabilities within tolerance, to transformers'.

        Every token is the most likely one after all before it; with `answers`, known from as many
        passes as there are tokens, they are compared as well.
        """
        if answers is not None:
            assert [output.token_ids for output in outputs] == answers
        self.learn([output.prompt_token_ids + output.token_ids for output in outputs])
        for output in outputs:
            assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
            truth = self.logprobs(output.prompt_token_ids + output.token_ids)
            truth = truth[len(output.prompt_token_ids) - 1 : -1]
            assert output.token_ids == truth.argmax(dim=-1).tolist()
            for row, token, entry in zip(truth, output.token_ids, output.logprobs, strict=True):
                assert entry.token_id == token
                assert abs(entry.logprob - float(row[token])) < self.tolerance
                for other, logprob in entry.top:
                    assert abs(logprob - float(row[other])) < self.tolerance


def generate(
    llm: LLM, prompts: list[Prompt], params: SamplingParams = PARAMS
) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, progress=False)
    llm.engine.check_integrity()
    stats = llm.stats()
    assert stats["computed_tokens"] + stats["skipped_tokens"] == stats["prompt_tokens"]
    assert stats["kv_used"] == stats["state_used"] == 0
    return outputs


def computed_tokens(outputs: Sequence[RequestOutput]) -> list[int]:
    return [len(output.prompt_token_ids) - output.cached_tokens for output in outputs]


def make_oracle(
    kind: str, folder: Path, prepare: Callable[[PreTrainedModel], None] = lambda model: None
) -> Oracle:
    """`kind`: a family, or "recurrent_only" (a Nemotron without attention) or "in_flight" (one that
    runs with a step in flight, as on a GPU). `prepare`: what to do with transformers' model before
    it is asked."""
    asynchronous = kind == "in_flight"
    if kind == "recurrent_only":
        layers = ["linear_attention", "mlp", "linear_attention"]
        model = make_tiny_model("nemotron_h", folder, chunk_size=GRID, layers_block_type=layers)
    elif kind == "zaya_sliding":
        model = make_tiny_model("zaya", folder, layer_types=ZAYA_SLIDING, sliding_window=21)
    elif (layers := WINDOWED.get(kind)) is not None:
        size = {"num_hidden_layers": len(layers), "layer_types": layers}
        model = make_tiny_model("lfm3", folder, **size)
    else:
        family = "nemotron_h" if asynchronous else kind
        model = make_tiny_model(family, folder, chunk_size=GRID)
    prepare(model)
    generator = torch.Generator().manual_seed(5)
    vocab = model.config.vocab_size
    text = torch.randint(0, vocab, (1200,), generator=generator).tolist()
    # lengths 1 to 3 are shorter than the convolution's window; 33 to 48 cover the grid
    crowd = [text[:n] for n in (1, 2, 3)]
    for n in range(2 * GRID + 1, 3 * GRID + 1):
        fork = n - n % 5 * 4
        crowd.append(
            text[:fork] + torch.randint(0, vocab, (n - fork,), generator=generator).tolist()
        )
    every = [one for kinds in KINDS.values() for one in kinds]
    prompts = usually(crowd[:3] + crowd[3 + every.index(kind) % 2 :: 2], crowd)
    has_recurrent = kind not in ATTENTION_ONLY
    made = Oracle(kind, folder, model, has_recurrent, asynchronous, text, crowd, prompts, [])
    made.answers = made.greedy(prompts)
    return made


@MODES
@pytest.mark.parametrize("exact_ends", [True, False])
def test_batched_cold_and_warm_equal_transformers(oracle: Oracle, mode: str, exact_ends: bool):
    llm = oracle.llm(prefill_checkpoint_mode=mode, **{EXACT_ENDS: exact_ends})
    oracle.check(generate(llm, oracle.prompts), oracle.answers)
    warm = generate(llm, oracle.prompts)
    oracle.check(warm, oracle.answers)
    for output in warm:
        length = len(output.prompt_token_ids)
        on_grid = (length - 1) // GRID * GRID
        assert output.cached_tokens == (length if exact_ends else on_grid)


@MODES
@pytest.mark.parametrize("budget", [41, 50])
@pytest.mark.parametrize("exact_ends", [True, False])
def test_prompts_cut_into_chunks_equal_transformers(
    oracle: Oracle, mode: str, budget: int, exact_ends: bool
):
    llm = oracle.llm(
        prefill_checkpoint_mode=mode,
        inference_dynamic_batching_max_tokens=budget,
        inference_dynamic_batching_max_requests=19,
        **{EXACT_ENDS: exact_ends},
    )
    oracle.check(generate(llm, oracle.prompts), oracle.answers)
    oracle.check(generate(llm, oracle.prompts), oracle.answers)


@MODES
@pytest.mark.parametrize("budget", [3, 7])
def test_prompts_cut_into_tiny_chunks_equal_transformers(oracle: Oracle, mode: str, budget: int):
    """Chunks shorter than the convolution's window; each is cut off the grid."""
    llm = oracle.llm(
        prefill_checkpoint_mode=mode,
        inference_dynamic_batching_max_tokens=budget,
        inference_dynamic_batching_max_requests=2,
    )
    prompts, answers = (every[: usually(8, 12)] for every in (oracle.prompts, oracle.answers))
    oracle.check(generate(llm, prompts), answers)
    warm = generate(llm, prompts)
    oracle.check(warm, answers)
    if oracle.has_recurrent:
        assert computed_tokens(warm) == [0] * len(prompts)
    else:  # logits are kept for as many prompts as run at a time
        assert max(computed_tokens(warm)) <= GRID


def test_one_at_a_time_without_a_cache_equals_transformers(oracle: Oracle):
    llm = oracle.llm(inference_dynamic_batching_prefix_caching=False)
    outputs = [generate(llm, [prompt])[0] for prompt in oracle.prompts]
    oracle.check(outputs, oracle.answers)
    assert all(output.cached_tokens == 0 for output in outputs)


@MODES
def test_the_next_turns_compute_exactly_what_is_new(oracle: Oracle, mode: str):
    """... and the last token, which was sampled but not fed."""
    llm = oracle.llm(prefill_checkpoint_mode=mode)
    outputs = generate(llm, oracle.prompts)
    for turn in range(usually(2, 3)):
        new = [oracle.own[50 * i + 10 * turn :][: 1 + (i + turn) % 7] for i in range(len(outputs))]
        prompts = [
            o.prompt_token_ids + o.token_ids + more for o, more in zip(outputs, new, strict=True)
        ]
        outputs = generate(llm, prompts)
        oracle.check(outputs)
        assert computed_tokens(outputs) == [len(more) + 1 for more in new]
        again = generate(llm, prompts)
        oracle.check(again, [output.token_ids for output in outputs])
        if oracle.has_recurrent:
            assert computed_tokens(again) == [0] * len(prompts)


@MODES
def test_without_exact_ends_the_next_turn_resumes_from_the_grid(oracle: Oracle, mode: str):
    llm = oracle.llm(prefill_checkpoint_mode=mode, **{EXACT_ENDS: False})
    first = generate(llm, oracle.prompts[3:])
    prompts = [o.prompt_token_ids + o.token_ids + [7, 8, 9, 10, 11, 12] for o in first]
    second = generate(llm, prompts)
    oracle.check(second)
    for before, output in zip(first, second, strict=True):
        fed = len(before.prompt_token_ids) + ANSWER - 1
        assert output.cached_tokens == fed // GRID * GRID


@MODES
@pytest.mark.parametrize("budget", [2048, 50])
def test_twins_at_once_compute_once(oracle: Oracle, mode: str, budget: int):
    llm = oracle.llm(
        prefill_checkpoint_mode=mode,
        inference_dynamic_batching_max_tokens=budget,
    )
    outputs = generate(llm, [prompt for prompt in oracle.prompts for _ in (0, 1)])
    oracle.check(outputs, [answer for answer in oracle.answers for _ in (0, 1)])
    assert computed_tokens(outputs[1::2]) == [0] * len(oracle.prompts)
    assert llm.stats()["twins_waited"] >= len(oracle.prompts)


@MODES
def test_prompts_that_part_anywhere_share_all_that_they_have_in_common(oracle: Oracle, mode: str):
    """Submitted together, without a hint: the first one leaves a state where they part."""
    llm = oracle.llm(prefill_checkpoint_mode=mode)
    for common in range(3 * GRID + 1, 4 * GRID + 1):
        llm.engine.reset()
        before = llm.stats()["computed_tokens"]
        prompts = [oracle.text[:common] + oracle.own[i * 40 :][: 30 + i] for i in range(3)]
        oracle.check(generate(llm, prompts))
        computed = llm.stats()["computed_tokens"] - before
        # KV alone is shared block by block
        again = 0 if oracle.has_recurrent else 2 * (common % GRID)
        assert computed == common + 30 + 31 + 32 + again


@MODES
def test_a_prompt_that_branches_off_at_a_named_position_resumes_there(oracle: Oracle, mode: str):
    llm = oracle.llm(prefill_checkpoint_mode=mode)
    positions = range(2 * GRID + 1, 3 * GRID + 1)
    checkpoints = tuple(positions)
    llm.generate(oracle.text[:100], PARAMS, cache_checkpoints=checkpoints, progress=False)
    for position in positions:
        (output,) = generate(llm, [oracle.text[:position] + oracle.own[position:][:9]])
        oracle.check([output])
        on_grid = position // GRID * GRID
        assert output.cached_tokens == (position if oracle.has_recurrent else on_grid)


def test_a_prompt_that_branches_off_anywhere_resumes_from_an_interval(oracle: Oracle):
    llm = oracle.llm(**{INTERVAL: 32, EXACT_ENDS: False})
    generate(llm, [oracle.text[:150]])
    (output,) = generate(llm, [oracle.text[:117] + oracle.own[:9]])
    oracle.check([output])
    assert output.cached_tokens == (96 if oracle.has_recurrent else 112)


def test_a_prompt_continues_an_answer_that_is_still_being_generated(oracle: Oracle):
    llm = oracle.llm()
    engine, prompt = llm.engine, oracle.text[:20]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    engine.add_request("long", prompt, params)
    said: list[int] = []
    while len(said) < 40:
        said += [token for event in engine.step() for token in event.token_ids]
    (output,) = llm.generate([prompt + said + oracle.own[:5]], PARAMS, progress=False)
    oracle.check([output])
    assert output.cached_tokens == 48
    engine.abort("long")
    while engine.has_work():
        engine.step()
    engine.check_integrity()


@MODES
def test_n_greedy_answers_are_the_same_and_prefill_once(oracle: Oracle, mode: str):
    llm = oracle.llm(prefill_checkpoint_mode=mode)
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=3, n=3)
    outputs = generate(llm, oracle.prompts, params)
    for index in range(3):
        oracle.check([output.choices[index] for output in outputs], oracle.answers)
    for output in outputs:
        length = len(output.prompt_token_ids)
        assert [choice.cached_tokens for choice in output.choices[1:]] == [length, length]


def test_n_sampled_answers_are_those_of_their_own_streams(oracle: Oracle):
    """Sampling from kept logits is sampling from computed ones."""
    llm = oracle.llm(inference_dynamic_batching_prefix_caching=False)
    prompt = oracle.prompts[-3]
    alone = []
    for index in range(4):
        seed = stream_seed(11, index) if index else 11
        params = SamplingParams(temperature=4.0, max_tokens=12, ignore_eos=True, seed=seed)
        alone.append(generate(llm, [prompt], params)[0].token_ids)
    params = SamplingParams(temperature=4.0, max_tokens=12, ignore_eos=True, seed=11, n=4)
    for _ in range(2):
        (output,) = generate(oracle.llm(), [prompt], params)
        assert [choice.token_ids for choice in output.choices] == alone
    assert len({tuple(tokens) for tokens in alone}) > 1


def small_llm(oracle: Oracle, blocks: int = 12, **options: object) -> LLM:
    """Three requests at a time, two cached states, and this many KV blocks."""
    engine = oracle.llm(**options).engine
    geometry, caches = engine.context.geometry, engine.runner._caches
    kv = (blocks + 1) * geometry.bytes_per_block  # one is the dummy block
    live = 3 * geometry.bytes_per_slot  # without recurrent layers: prompts' logits
    of_windows = 3 * geometry.window_quota + 40 // GRID + 2 if geometry.has_window else 0
    live += of_windows * geometry.bytes_per_window_block
    for rings in caches.rings.values():
        live += 3 * sum(ring[0].nbytes for ring in (rings.conv, *rings.inputs))
    kept = geometry.bytes_per_cached_slot + 1
    return oracle.llm(
        inference_dynamic_batching_max_requests=3,
        inference_dynamic_batching_buffer_size_gb=(kv + live + 1) / GIB,
        inference_dynamic_batching_prefix_caching_mamba_gb=2 * kept / GIB,
        inference_dynamic_batching_max_tokens=40,
        **options,
    )


@MODES
def test_a_cache_too_small_for_all_still_gives_the_right_answers(oracle: Oracle, mode: str):
    llm = small_llm(oracle, prefill_checkpoint_mode=mode)
    for _ in range(2):
        oracle.check(generate(llm, oracle.crowd))
    stats, geometry = llm.stats(), llm.engine.context.geometry
    if geometry.has_attention:
        assert stats["kv_blocks"] == 12 and stats["kv_evictions"] > 0
    if geometry.has_recurrent:
        assert stats["state_slots"] == 5 and stats["state_evictions"] > 0


# (checkpoint mode, exact ends, eviction policy)
PREEMPTIONS = [
    ("extract", True, "replay_cost"),
    ("break", True, "lru"),
    ("extract", False, "lru"),
    ("break", False, "replay_cost"),
    ("extract", True, "ref_zero"),
]


# Who is preempted in which of these ways; TESTS=all: every family in each.
PREEMPTED = {
    "nemotron_h": PREEMPTIONS[4:],
    "in_flight": PREEMPTIONS[2:3],
    "jamba": PREEMPTIONS[1:2],
    "lfm2": PREEMPTIONS[3:4],
    "lfm3": PREEMPTIONS[:1],
}


def test_preempted_requests_give_the_right_answers(oracle: Oracle):
    """Answers of 40 tokens in a pool that holds two of the longest requests and no third one."""
    ways = PREEMPTIONS if EVERYTHING else PREEMPTED[oracle.kind]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1)
    for mode, exact_ends, policy in ways:
        options = {"prefill_checkpoint_mode": mode, EXACT_ENDS: exact_ends, POLICY: policy}
        llm = small_llm(oracle, blocks=11, **options)
        if not llm.engine.context.geometry.has_attention:
            pytest.skip("A model without attention never runs out of KV blocks.")
        before = llm.stats()
        some = oracle.crowd[usually(6, 0) :]  # not the shortest
        for prompts in (some, some[::-1]):
            oracle.check(generate(llm, prompts, params))
        stats = llm.stats()
        assert stats["preemptions"] - before["preemptions"] > 5, options
        assert stats["recomputed_tokens"] > before["recomputed_tokens"], options
        if policy != "ref_zero":
            assert stats["kv_evictions"] - before["kv_evictions"] > 10, options
            if llm.engine.context.geometry.has_recurrent:
                assert stats["state_evictions"] - before["state_evictions"] > 10, options


def test_preempted_samples_are_those_of_an_engine_with_room(oracle: Oracle):
    params = SamplingParams(temperature=4.0, seed=5, max_tokens=40, ignore_eos=True, n=3)
    roomy = generate(oracle.llm(), oracle.prompts[-4:], params)
    llm = small_llm(oracle, blocks=11)
    tight = generate(llm, oracle.prompts[-4:], params)
    if llm.engine.context.geometry.has_attention:
        assert llm.stats()["preemptions"] > 0
    for one, other in zip(roomy, tight, strict=True):
        assert [c.token_ids for c in one.choices] == [c.token_ids for c in other.choices]


# All together every number of drafts from 1 to 8; TESTS=all: each family with each.
def numbers_of_drafts(kind: str) -> list[int]:
    if EVERYTHING:
        return list(range(1, 9))
    every = [one for kinds in KINDS.values() for one in kinds]
    return [1 + every.index(kind) % 8]


def test_drafts_change_neither_answers_nor_what_is_cached(oracle: Oracle):
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
    roomy = {"inference_dynamic_batching_buffer_size_gb": 0.03}  # for what is kept of drafts, too
    plain, prompts = oracle.llm(**roomy), oracle.prompts
    twins = [prompt for prompt in prompts[::3] for _ in (0, 1)]  # of prompts that are cached
    batches = usually([prompts, twins], [prompts, prompts, twins])
    expected = [generate(plain, batch, params) for batch in batches]
    oracle.check(expected[0])
    texts = [output.prompt_token_ids + output.token_ids for output in expected[0]]
    # the next turns, one after the other: from the exact ends of answers
    turns = [generate(plain, [text + oracle.own[:3]])[0] for text in texts[::4]]
    oracle.check(turns)
    for number in numbers_of_drafts(oracle.kind):
        llm = with_drafts(oracle.llm(num_speculative_tokens=number, **roomy), Knowing(texts))
        for batch, right in zip(batches, expected, strict=True):
            before = llm.stats()
            found = generate(llm, batch, params)
            assert [output.token_ids for output in found] == [output.token_ids for output in right]
            cached = [output.cached_tokens for output in right]
            assert [output.cached_tokens for output in found] == cached
            for output, truth in zip(found, right, strict=True):
                for entry, other in zip(output.logprobs, truth.logprobs, strict=True):
                    assert abs(entry.logprob - other.logprob) < oracle.tolerance
            assert llm.stats()["accepted_tokens"] - before["accepted_tokens"] > 2 * len(batch)
        for truth in turns:
            (turn,) = generate(llm, [truth.prompt_token_ids])
            assert turn.token_ids == truth.token_ids
            assert turn.cached_tokens == truth.cached_tokens
        tight = small_llm(oracle, blocks=11, num_speculative_tokens=number)
        with_drafts(tight, Knowing(texts))
        # in CI only of the kinds that go through every test
        for _ in range(usually(int(oracle.kind in FULLY_TESTED), 2)):
            found = generate(tight, prompts, params)
            assert [o.token_ids for o in found] == [o.token_ids for o in expected[0]]


def test_samples_with_drafts_are_those_without(oracle: Oracle):
    """The same seed gives the same answer, with filters or without."""
    for options in ({"temperature": 1.0}, {"temperature": 2.0, "top_p": 0.8, "top_k": 40}):
        params = SamplingParams(max_tokens=16, ignore_eos=True, seed=3, n=4, **options)
        expected = generate(oracle.llm(), oracle.prompts[-4:], params)
        answers = [choice for output in expected for choice in output.choices]
        texts = [choice.prompt_token_ids + choice.token_ids for choice in answers]
        llm = with_drafts(oracle.llm(num_speculative_tokens=3), Knowing(texts))
        before = llm.stats()["accepted_tokens"]
        found = generate(llm, oracle.prompts[-4:], params)
        assert [c.token_ids for o in found for c in o.choices] == [c.token_ids for c in answers]
        assert llm.stats()["accepted_tokens"] > before + 16


@pytest.mark.skipif(not EVERYTHING, reason="takes minutes: TESTS=all")
@pytest.mark.parametrize("options", [{}, {"top_p": 0.7}], ids=["temperature 1", "top-p 0.7"])
def test_20000_draws_with_drafts_have_the_distribution_of_those_without(
    oracle: Oracle, options: dict[str, float]
):
    """Of the third token, behind drafts that hold or do not: a chi-square test of homogeneity."""
    if oracle.kind not in ("nemotron_h", "in_flight"):
        pytest.skip("drawing does not depend on the family")
    counts, accepted = [], 0
    for number, first_seed in ((0, 0), (4, 10**6)):  # other seeds: else they are the same draws
        llm = oracle.llm(num_speculative_tokens=number)
        if number:
            with_drafts(
                llm, Knowing([oracle.prompts[3] + oracle.greedy([oracle.prompts[3]], 12)[0]])
            )
        drawn: list[int] = []
        for seed in range(first_seed, first_seed + 20_000, 1000):
            params = [
                SamplingParams(max_tokens=6, ignore_eos=True, seed=seed + i, **options)
                for i in range(1000)
            ]
            outputs = llm.generate([oracle.prompts[3]] * 1000, params, progress=False)
            drawn += [output.token_ids[2] for output in outputs]
        counts.append(np.bincount(drawn, minlength=200))
        accepted = llm.stats()["accepted_tokens"]
    assert accepted > 100
    plain, drafted = counts
    rare = plain + drafted < 20
    table = np.stack([np.append(c[~rare], c[rare].sum()) for c in counts])
    table = table[:, table.sum(0) > 0]
    expected = table.sum(0) / 2
    statistic = float(((table - expected) ** 2 / expected).sum())
    freedom = table.shape[1] - 1
    # Wilson and Hilferty, 1931: its cube root is nearly normal; 3.1: one in a thousand
    scale = 2 / (9 * freedom)
    assert ((statistic / freedom) ** (1 / 3) - (1 - scale)) / scale**0.5 < 3.1


@MODES
def test_every_kept_state_is_that_of_a_prompt_that_ends_there(oracle: Oracle, mode: str):
    llm = oracle.llm(
        prefill_checkpoint_mode=mode, inference_dynamic_batching_max_tokens=50, **{INTERVAL: 32}
    )
    prompts = [oracle.text[:n] + oracle.own[n : n + 20] for n in (60, 71, 90)]
    outputs = llm.generate(prompts, PARAMS, cache_checkpoints=(37, 59), progress=False)
    cache, prefix_of = llm.engine.context.cache, {}
    for output in outputs:
        tokens = output.prompt_token_ids + output.token_ids
        array = np.asarray(tokens, dtype=np.int32)
        keys = SequenceKeys(cache.root(), GRID, lambda start, end, a=array: a[start:end])
        prefix_of |= {keys.at(end): tokens[:end] for end in range(1, len(tokens) + 1)}
    kept = cache.states.cached()
    positions = {state.position for state in kept}
    if oracle.has_recurrent:
        assert positions >= {32, 37, 59, 64, 80, 91, 110, 115}
    plain = oracle.llm(inference_dynamic_batching_prefix_caching=False)
    caches, truth = llm.engine.runner._caches, plain.engine.runner._caches
    oracle.learn([prefix_of[state.key] for state in kept if state.has_logits])
    for state in kept:
        tokens = prefix_of[state.key]
        assert len(tokens) == state.position
        plain.generate(tokens, SamplingParams(max_tokens=1), progress=False)  # in live slot 1
        for layer, expected in truth.state.items():
            for name in ("conv", "ssm"):
                a, b = getattr(caches.state[layer], name)[state.slot], getattr(expected, name)[1]
                torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-3)
        if state.has_logits:
            logprobs = torch.log_softmax(caches.end_logits[state.slot], dim=-1)
            assert (logprobs - oracle.logprobs(tokens)[-1]).abs().max() < TOLERANCE
    assert any(state.has_logits for state in kept)


def test_prompt_logprobs_equal_transformers_and_skip_nothing(oracle: Oracle):
    llm = oracle.llm(
        inference_dynamic_batching_max_tokens=29, inference_dynamic_batching_max_requests=20
    )
    prompts = oracle.prompts[:6]
    params = SamplingParams(
        temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=3, prompt_logprobs=2
    )
    for _ in range(2):
        outputs = generate(llm, prompts, params)
        oracle.check(outputs, oracle.answers[:6])
        for output in outputs:
            check_prompt_logprobs(oracle, output)
    longest = max(oracle.prompts, key=len)
    for length in (1, 30, 59):  # the last chunk is one token, after which no prompt token comes
        (output,) = generate(llm, [longest[:length]], params)
        check_prompt_logprobs(oracle, output)


def check_prompt_logprobs(oracle: Oracle, output: RequestOutput) -> None:
    assert output.cached_tokens == 0 and output.error is None
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    truth = oracle.logprobs(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    for i, entry in enumerate(output.prompt_logprobs[1:], start=1):
        assert entry is not None and entry.token_id == output.prompt_token_ids[i]
        assert abs(entry.logprob - float(truth[i - 1, entry.token_id])) < TOLERANCE
        assert len(entry.top) == 2


@MODES
@pytest.mark.parametrize("budget", [3, 41])
def test_scores_equal_transformers_cold_and_cached(oracle: Oracle, mode: str, budget: int):
    llm = oracle.llm(
        prefill_checkpoint_mode=mode,
        inference_dynamic_batching_max_tokens=budget,
        inference_dynamic_batching_max_requests=min(budget, 20),
    )
    some = oracle.prompts[3 : 9 : usually(2, 1)]
    prompts = [oracle.text[:1], oracle.text[:3], *some, oracle.text[:83]]
    lengths = (1, 2, 7, usually(20, 40))
    answers = [[oracle.own[3 * i : 3 * i + n] for n in lengths] for i in range(len(prompts))]
    for turn in range(3):
        if turn == 2:  # beside others, and after what answers leave
            texts = [[*prompts[-1], *answers[-1][-1]], prompts[3]]
            ((kept, *_), *_), outputs = llm.score(prompts, answers, progress=False), None
            assert kept.error is None
            outputs = generate(llm, texts)
            oracle.check(outputs)
        scores = llm.score(prompts, answers, top_logprobs=2, progress=False)
        llm.engine.check_integrity()
        check_scores(oracle, prompts, answers, scores)
        for prompt, several in zip(prompts, scores, strict=True):
            for one in several:
                assert one.cached_tokens < len(prompt)
                if turn and len(prompt) > GRID:
                    assert one.cached_tokens >= (len(prompt) - 1) // GRID * GRID
    whole = [[*prompts[4], *answers[4][2]]]
    (output,) = generate(llm, whole, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert output.token_ids == [] and output.cached_tokens == 0 and output.prompt_logprobs
    for entry, logprob in zip(output.prompt_logprobs[-7:], scores[4][2].logprobs, strict=True):
        assert entry is not None and abs(entry.logprob - logprob) < oracle.tolerance


def check_scores(
    oracle: Oracle,
    prompts: list[Prompt],
    answers: list[list[Prompt]],
    scores: list[list[AnswerScore]],
) -> None:
    oracle.learn([p + a for p, several in zip(prompts, answers, strict=True) for a in several])
    for prompt, several, found in zip(prompts, answers, scores, strict=True):
        for answer, one in zip(several, found, strict=True):
            assert one.token_ids == answer and one.error is None
            assert one.cached_tokens + one.computed_tokens == len(prompt) + len(answer)
            truth = oracle.logprobs(prompt + answer)[len(prompt) - 1 : -1]
            for row, token, logprob, top in zip(truth, answer, one.logprobs, one.top, strict=True):
                assert abs(logprob - float(row[token])) < oracle.tolerance
                assert len(top) == 2
                for other, likely in top:
                    assert abs(likely - float(row[other])) < oracle.tolerance
            assert abs(one.total - sum(one.logprobs)) < 1e-9


def test_an_idle_step_changes_nothing(oracle: Oracle):
    llm = oracle.llm()
    generate(llm, oracle.prompts)
    before = llm.stats()
    llm.engine.dummy_forward()
    assert llm.stats() == before
    oracle.check(generate(llm, oracle.prompts), oracle.answers)


def test_bfloat16_answers_differ_little(oracle: Oracle):
    llm = oracle.llm(dtype="bfloat16")
    for _ in range(2):
        outputs = generate(llm, oracle.prompts[3:])
        oracle.learn([output.prompt_token_ids + output.token_ids for output in outputs])
        for output in outputs:
            assert output.logprobs is not None
            truth = oracle.logprobs(output.prompt_token_ids + output.token_ids)
            first = output.logprobs[0]
            row = truth[len(output.prompt_token_ids) - 1]
            assert abs(first.logprob - float(row[first.token_id])) < 0.25


def test_engine_config_can_be_given_whole(oracle: Oracle):
    config = EngineConfig.from_mapping({"load": str(oracle.folder), **OPTIONS}, "test")
    oracle.check(generate(LLM(config=config), oracle.prompts), oracle.answers)
