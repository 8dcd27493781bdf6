"""Small tokenizers of the two common kinds, trained or written out in a moment."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' and message['content'] == 'forbidden' %}"
    "{{ raise_exception('this word is forbidden') }}{% endif %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<eos>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ greeting | default('') }}{% endif %}"
)
SPECIAL_TOKENS = ["<eos>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>"]
TRAINING_TEXT = "The quick brown fox, naïve café, 日本語のテキスト, 😀😃 and numbers 12345. " * 20


def byte_level() -> PreTrainedTokenizerFast:
    """Like GPT-2's: every byte has a token, characters may be split between tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([TRAINING_TEXT], trainer)
    backend.add_tokens(["<think>", "two words \u65e5"])  # added, but part of the text
    return _wrapped(backend)


def sentencepiece_style() -> PreTrainedTokenizerFast:
    """Like Llama 2's: U+2581 for a space, and a token for each byte as the last resort."""
    pieces = [*SPECIAL_TOKENS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", *"abcdefghijklmnopqrstuvwxyzT.,", "é", "日"]
    merges = [
        ("\u2581", "t"),
        ("\u2581t", "h"),
        ("\u2581th", "e"),
        ("a", "n"),
        ("\u2581", "\u2581"),
    ]
    pieces += [left + right for left, right in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(SPECIAL_TOKENS)
    return _wrapped(backend)


def metaspace() -> PreTrainedTokenizerFast:
    """Like T5's: a Metaspace decoder, which drops the very first space only."""
    pieces = [*SPECIAL_TOKENS, "<unk>", "\u2581", *"abcdefghijklmnopqrstuvwxyz", "\u2581the"]
    backend = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(SPECIAL_TOKENS)
    return _wrapped(backend)


def save(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    tokenizer.save_pretrained(folder)
    return folder


def _wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
