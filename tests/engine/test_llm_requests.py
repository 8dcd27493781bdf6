"""What LLM asks of its engine and makes of the events, over an engine without a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hybrid import LLM, ConfigurationError, FinishReason, InvalidRequestError
from megatron_hybrid import SamplingParams as Params
from megatron_hybrid.request import MAX_CHOICES
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.text.make_tokenizers import byte_level, save

LETTERS = "x!abcdefgh"  # a token each; choice i of the fake engine repeats them from letter i on
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(byte_level(), tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    tokenizer = Tokenizer.load(folder)
    engine = FakeEngine(tokenizer.vocab_size, tokenizer.eos_token_ids)
    monkeypatch.setattr("megatron_hybrid.llm.build_engine", lambda config: engine)
    return engine


@pytest.fixture
def llm(engine: FakeEngine, folder: Path) -> LLM:
    return LLM(tokenizer_model=str(folder))


def greedy(**options) -> Params:
    return Params(**{"temperature": 0.0, "max_tokens": 5, **options})


def test_one_request_gives_all_its_choices_in_order(llm: LLM, engine: FakeEngine):
    (output,) = llm.generate(LETTERS, greedy(n=3))
    assert [choice.text for choice in output.choices] == ["x!abc", "!abcd", "abcde"]
    assert [choice.index for choice in output.choices] == [0, 1, 2]
    assert output.choices[0] is output
    assert {choice.request_id for choice in output.choices} == {output.request_id}
    assert [added.params.n for added in engine.added] == [3]
    for choice in output.choices:
        assert choice.finish_reason is FinishReason.LENGTH
        assert choice.counters == {"generated_tokens": 5}


def test_a_single_answer_is_its_own_only_choice(llm: LLM):
    outputs = llm.generate([LETTERS, "abc"], greedy(), progress=False)
    for output in outputs:
        assert len(output.choices) == 1 and output.choices[0] is output
        assert output.counters == {"generated_tokens": 5}
    assert repr(outputs[0])  # ends, although an output holds itself


def test_prompts_with_different_numbers_of_choices_keep_their_order(llm: LLM):
    params = [greedy(n=2), greedy(), greedy(n=3, max_tokens=2)]
    outputs = llm.generate(["abc", "xyz", LETTERS], params, progress=False)
    texts = [[choice.text for choice in output.choices] for output in outputs]
    assert texts == [["abcab", "bcabc"], ["xyzxy"], ["x!", "!a", "ab"]]


def test_a_stop_string_ends_only_the_choice_that_wrote_it(llm: LLM, engine: FakeEngine):
    (output,) = llm.generate(LETTERS, greedy(n=3, stop=("!",), logprobs=0))
    assert [choice.text for choice in output.choices] == ["x", "", "abcde"]
    assert [choice.finish_reason for choice in output.choices] == [
        FinishReason.STOP,
        FinishReason.STOP,
        FinishReason.LENGTH,
    ]
    assert [choice.stop_reason for choice in output.choices] == ["!", "!", None]
    assert [len(choice.token_ids) for choice in output.choices] == [2, 1, 5]
    assert [len(choice.logprobs or []) for choice in output.choices] == [2, 1, 5]
    aborts = [line for line in engine.log if line.startswith("abort")]
    assert aborts == [f"abort {output.request_id} 1", f"abort {output.request_id} 0"]


def test_counters_come_with_an_answer_that_a_stop_string_ended(llm: LLM, engine: FakeEngine):
    (output,) = llm.generate(LETTERS, greedy(stop=("a",), max_tokens=50))
    assert output.text == "x!" and output.counters == {"generated_tokens": 3}
    assert not engine.has_work()
    (*_, last) = llm.stream(LETTERS, greedy(stop=("a",), max_tokens=50))
    assert last.text == "x!" and last.counters == {"generated_tokens": 3}
    assert last.finish_reason is FinishReason.STOP


def test_answers_are_scored_as_ends_of_prompts(llm: LLM, engine: FakeEngine):
    ((text, ids), (alone,)) = llm.score(["ab", [5, 6]], [["cde", [7]], "c"], top_logprobs=2)
    assert [len(one.logprobs) for one in (text, ids, alone)] == [3, 1, 1]
    assert text.token_ids == llm.tokenizer.encode("cde", add_special_tokens=False)
    assert (text.total, text.logprobs, text.error) == (-3.0, [-1.0] * 3, None)
    assert [[token for token, _ in top] for top in text.top] == [[t, t + 1] for t in text.token_ids]
    assert (text.cached_tokens, text.computed_tokens) == (0, 5)
    assert [len(added.prompt) for added in engine.added] == [5, 3, 3]
    assert engine.added[1].prompt == llm.tokenizer.encode("ab") + [7]
    for added in engine.added:
        assert added.params.max_tokens == 0 and added.params.prompt_logprobs == 2
        assert added.params.prompt_logprobs_start == 2 and added.message_ends == (1,)
    assert llm.score([], []) == []
    assert [len(one) for one in llm.score("ab", ["c", "d", "e"])] == [3]
    assert [len(one) for one in llm.score([1, 2], [3, 4])] == [1]


@pytest.mark.parametrize(
    ("prompts", "answers", "field", "says"),
    [
        ("", "a", "prompts[0]", "is empty"),
        ([], "a", "answers", "a list of 0"),
        ("a", "", "answers[0]", "is empty"),
        ("a", [], "answers[0]", "is empty"),
        ("a", ["b", ""], "answers[0][1]", "is empty"),
        (["a", "b"], ["c"], "answers", "a list of 2"),
        (["a"], "c", "answers", "a list of 1"),
        ([1], [10**6], "answers[0]", "token id 1000000"),
        ([-1], [1], "prompts[0]", "token id -1"),
        ([1] * 40, [[2] * 30, [2] * 2000], "answers[0][1]", "--inference-max-seq-length"),
        ([1] * 60, [2] * 68, "answers[0]", "together they must have fewer than 128"),
        ([1], [[2], "b\ud800"], "answers[0][1]", "Unicode"),
        ([1], [[2], 3.5], "answers[0][1]", "text or token ids"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(
    llm: LLM, engine: FakeEngine, prompts, answers, field, says
):
    with pytest.raises(InvalidRequestError) as error:
        llm.score(prompts, answers)
    assert error.value.field == field and field in str(error.value) and says in str(error.value)
    assert not engine.added


def test_prompt_logprobs_come_with_the_first_choice(llm: LLM):
    (output,) = llm.generate([5, 6, 7], greedy(n=2, prompt_logprobs=0))
    first, second = output.choices
    assert first.prompt_logprobs is not None and len(first.prompt_logprobs) == 3
    assert second.prompt_logprobs is None


def test_streaming_several_choices_is_refused(llm: LLM, engine: FakeEngine):
    with pytest.raises(InvalidRequestError, match="n is 2") as caught:
        next(llm.stream(LETTERS, greedy(n=2)))
    assert caught.value.field == "n"
    assert engine.added == []


@pytest.mark.parametrize("n", [0, MAX_CHOICES + 1, True, 1.5])
def test_a_number_of_choices_out_of_range_is_refused(llm: LLM, engine: FakeEngine, n):
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate([LETTERS, LETTERS], [greedy(), greedy(n=n)])
    assert caught.value.field == "n"
    assert engine.added == []


def test_options_reach_the_engine_for_every_prompt(llm: LLM, engine: FakeEngine):
    options = {"cache_salt": "mine", "priority": -3, "cache_checkpoints": [2, 1]}
    llm.generate(["abc", "xyz"], greedy(), progress=False, **options)
    llm.chat(CHAT, greedy(), **options)
    list(llm.stream("abc", greedy(), **options))
    assert len(engine.added) == 4
    for added in engine.added:
        assert (added.cache_salt, added.priority, added.cache_checkpoints) == ("mine", -3, (2, 1))


def test_chats_tell_the_engine_where_their_messages_end(llm: LLM, engine: FakeEngine):
    llm.chat([CHAT, CHAT[1:]], greedy(), progress=False)
    list(llm.stream(CHAT, greedy()))
    llm.generate("Hello", greedy())
    encode = llm.tokenizer.encode
    system = len(encode("<|system|>Be brief.<eos>"))
    question = len(encode("<|user|>Hello<eos>"))
    both = (system, system + question)
    assert [added.message_ends for added in engine.added] == [both, (question,), both, ()]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"priority": 1001}, "priority"),
        ({"cache_checkpoints": [4]}, "cache_checkpoints"),
        ({"cache_checkpoints": [0]}, "cache_checkpoints"),
    ],
)
def test_what_one_prompt_cannot_have_stops_them_all(llm: LLM, engine: FakeEngine, options, field):
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate(["abcdefgh", "abc"], greedy(n=2, max_tokens=50), **options)
    assert caught.value.field == field
    engine.step()
    assert not engine.has_work()


def test_nothing_is_queued_when_stop_strings_lack_a_tokenizer(
    llm: LLM, engine: FakeEngine, tmp_path: Path
):
    llm._folder = tmp_path
    with pytest.raises(ConfigurationError, match="tokenizer"):
        llm.generate([[1], [2]], [greedy(), greedy(stop=("a",))])
    assert engine.added == []


def test_streams_side_by_side_lose_nothing(llm: LLM):
    pairs = zip(llm.stream("abc", greedy()), llm.stream("xyz", greedy()), strict=False)
    last = [tuple(output.text for output in pair) for pair in pairs][-1]
    assert last == ("abcab", "xyzxy")
    stream = llm.stream("abc", greedy())
    next(stream)
    assert llm.generate("xyz", greedy(max_tokens=20))[0].text == "xyzxyzxyzxyzxyzxyzxy"
    (rest,) = stream
    assert rest.text == "abcab" and rest.finish_reason is FinishReason.LENGTH


def test_an_interrupted_call_leaves_nothing_running(llm: LLM, engine: FakeEngine, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "xyz"], greedy(n=2), progress=False)
    monkeypatch.undo()
    engine.step()
    assert not engine.has_work()
