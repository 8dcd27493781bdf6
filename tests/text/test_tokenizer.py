"""The tokenizer of a model folder, and its chat template."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megatron_hybrid.errors import ConfigurationError, InvalidRequestError
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.text.make_tokenizers import byte_level, save

HELLO = {"role": "user", "content": "Hello"}


def test_a_folder_without_a_tokenizer_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not a folder"):
        Tokenizer.load(tmp_path / "missing")
    with pytest.raises(ConfigurationError, match="no tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="no tokenizer"):
        Tokenizer.load(tmp_path)


def test_a_chat_is_rendered_up_to_the_answer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_chat([HELLO, {"role": "assistant", "content": None}, HELLO])
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|user|>Hello<eos><|assistant|><eos><|user|>Hello<eos><|assistant|>"
    )
    assert tokenizer.is_special(ids[-1])


def test_special_tokens_are_shown_only_on_demand(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<eos>b<think>")
    assert ids[1] in tokenizer.eos_token_ids
    assert tokenizer.decode(ids) == "ab<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<eos>b<think>"


def test_truncation_that_came_with_the_tokenizer_is_off(tmp_path: Path) -> None:
    hf = byte_level()
    hf.backend_tokenizer.enable_truncation(4)
    tokenizer = Tokenizer.load(save(hf, tmp_path / "short"))
    text = "not cut after four tokens"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_without_a_template_messages_are_refused(tmp_path: Path) -> None:
    hf = byte_level()
    hf.chat_template = None
    tokenizer = Tokenizer.load(save(hf, tmp_path / "plain"))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        tokenizer.encode_chat([HELLO])
    assert caught.value.field == "messages"


def test_a_file_takes_the_place_of_the_folders_template(tmp_path: Path) -> None:
    folder, file = save(byte_level(), tmp_path / "model"), tmp_path / "other.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}|{{ tools }}]{% endfor %}")
    tokenizer = Tokenizer.load(folder, file)
    assert tokenizer.decode(tokenizer.encode_chat([HELLO])) == "[Hello|None]"
    assert tokenizer.takes_tools and not Tokenizer.load(folder).takes_tools
    file.write_text("{{ raise_exception('no messages') }}")  # also of none, which is no mistake
    assert Tokenizer.load(folder, file).has_chat_template


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "a\n{% for m in messages %}",
            "other.jinja is no chat template: line 2: Unexpected end of",
        ),
        (" \n", "other.jinja is empty"),
        (None, "other.jinja can't be read: .*No such file"),
    ],
)
def test_a_file_that_is_no_template_is_refused(
    tmp_path: Path, text: str | None, words: str
) -> None:
    folder, file = save(byte_level(), tmp_path / "model"), tmp_path / "other.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match=words):
        Tokenizer.load(folder, file)


def test_what_the_template_refuses_is_said_in_its_words(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="this word is forbidden"):
        tokenizer.encode_chat([{"role": "user", "content": "forbidden"}])


def test_many_threads_may_encode_at_once(tokenizer: Tokenizer) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        text = f"text of thread {number} " * 20
        try:
            for _ in range(50):
                assert tokenizer.decode(tokenizer.encode(text)) == text
                tokenizer.encode_chat([{"role": "user", "content": text}])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
