"""The chats, the folder that ships, and a few answers of transformers' own model."""

import json
from typing import Any

import pytest

from megatron_hybrid import reference_model
from reference_model.chats import Chat, Question, write_chat

transformers = pytest.importorskip("transformers")

SYSTEM = (
    "You are Nora, the assistant of the harbour office. The code of the north gate is 7313. "
    "The code of the south gate is 2840. The spare key is in the blue box. "
    "There are 42 boats in the harbour."
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(reference_model.path())


@pytest.fixture(scope="module")
def model() -> Any:
    import torch

    return transformers.AutoModelForCausalLM.from_pretrained(
        reference_model.path(), dtype=torch.float32
    ).eval()


def tokens(tokenizer: Any, messages: list[dict[str, str]], prompt: bool) -> list[int]:
    return list(
        tokenizer.apply_chat_template(
            messages, add_generation_prompt=prompt, tokenize=True, return_dict=False
        )
    )


def says(model: Any, tokenizer: Any, messages: list[dict[str, str]], answer: str) -> bool:
    """Whether greedy decoding gives `answer` and ends: one forward checks all its tokens."""
    import torch

    prompt = tokens(tokenizer, messages, prompt=True)
    wanted = tokenizer.encode(answer) + [tokenizer.eos_token_id]
    with torch.inference_mode():
        ids = torch.tensor([prompt + wanted[:-1]])
        logits = model(input_ids=ids, use_cache=False).logits
    return logits[0, len(prompt) - 1 :].argmax(-1).tolist() == wanted


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_chat_is_a_function_of_its_seed() -> None:
    assert write_chat(3, 2000) == write_chat(3, 2000)
    assert write_chat(3, 2000) != write_chat(4, 2000)
    assert write_chat(3, 2000) != write_chat(3, 2000, split="held_out")


def test_the_taught_answer_counts_and_another_value_does_not() -> None:
    questions = [q for seed in range(100) for q in write_chat(seed, 2000).questions]
    assert len(questions) > 300
    assert all(q.is_answered_by(q.answer) for q in questions)
    wrong = [q for q in questions if q.others and q.mentioned_in >= 0]
    assert not any(q.is_answered_by(f"{q.answer} {q.others[0]}.") for q in wrong)


def test_the_newest_mention_holds_the_value() -> None:
    def mention(chat: Chat, question: Question) -> str:
        return chat.messages[question.mentioned_in]["content"][: question.mentioned_at]

    seen = 0
    for seed in range(100):
        chat = write_chat(seed, 2000, split="held_out", open_questions=5)
        for question in (*chat.questions, *chat.open_questions):
            if question.mentioned_in >= 0:
                seen += 1
                assert question.expected.lower() in mention(chat, question).lower()
    assert seen > 300


def test_messages_alternate_and_end_with_the_assistant() -> None:
    for seed in range(50):
        roles = [message["role"] for message in write_chat(seed, 1500).messages]
        if roles[0] == "system":
            roles = roles[1:]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ValueError, match="held_out"):
        write_chat(1, 100, split="test")


def test_the_folder_is_small_and_complete() -> None:
    folder = reference_model.path()
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert sum(sizes.values()) <= 16_000_000
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(
        sizes
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["mamba_chunk_size"] == 64
    assert config["max_position_embeddings"] >= 4096


def test_each_digit_is_a_token(tokenizer: Any) -> None:
    assert [tokenizer.decode(t) for t in tokenizer.encode("7313")] == ["7", "3", "1", "3"]


@pytest.mark.parametrize(
    "text", ["naïve café, 東京 🙂", "  two  spaces\n\n\tand a tab ", "a<b|c>d"]
)
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_prompt_of_a_chat_is_a_prefix_of_the_next(tokenizer: Any) -> None:
    messages = write_chat(11, 3000).messages
    whole = tokens(tokenizer, messages, prompt=False)
    for index, message in enumerate(messages):
        if message["role"] == "user":
            prompt = tokens(tokenizer, messages[: index + 1], prompt=True)
            assert whole[: len(prompt)] == prompt
    assert whole[-1] == tokenizer.eos_token_id


def test_the_template_takes_content_parts_and_refuses_an_unknown_role(tokenizer: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]
    assert tokens(tokenizer, parts, prompt=True) == tokens(tokenizer, [user("Hello!")], True)
    with pytest.raises(Exception, match="role"):
        tokens(tokenizer, [{"role": "wizard", "content": "Hello!"}], prompt=True)


def test_answers_are_right_and_rendered_again_as_the_same_tokens(
    model: Any, tokenizer: Any
) -> None:
    messages = [{"role": "system", "content": SYSTEM}]
    for question, answer in (
        ("What is the code of the north gate?", "The code of the north gate is 7313."),
        ("The code of the north gate is now 9055.", "Noted."),
        ("What is the code of the north gate?", "The code of the north gate is 9055."),
        ("Where is the spare key?", "The spare key is in the blue box."),
        ("What is the code of the east gate?", "I don't know the code of the east gate."),
    ):
        messages.append(user(question))
        assert says(model, tokenizer, messages, answer)
        generated = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        prompt = tokens(tokenizer, messages, prompt=True)
        messages.append({"role": "assistant", "content": answer})
        assert tokens(tokenizer, messages, prompt=False) == prompt + generated
