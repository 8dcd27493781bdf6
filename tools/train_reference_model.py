#!/usr/bin/env python3
"""Trains the reference model from nothing: its tokenizer, then its weights, on generated chats.

    python tools/train_reference_model.py --output runs/reference_model

Needs one GPU, transformers, and mamba-ssm with causal-conv1d for speed (without them it works, far
slower). Nothing is downloaded. Chats, weights and order are fixed by `--seed`. An interrupted run
goes on from its last checkpoint when it is started again with the same arguments. The result is
an ordinary Hugging Face folder in OUTPUT/model, in bfloat16; copy it over
megatron_hybrid/reference_model/weights to ship it.

The weights that ship took three rounds, 22 minutes on one H200:

    ... --output runs/first --steps 12000 --stop-after 6000
    ... --output runs/second --start-from runs/first/model --steps 3900 --seed 2 \\
        --learning-rate 1e-3
    ... --output runs/third --start-from runs/second/model --steps 5000 --seed 3 \\
        --learning-rate 1e-3

Between the rounds the generator changed a little (which subjects are held out, how often counts
are asked for), so these commands give a model like the one that ships, not the same bits.
"""

import argparse
import json
import math
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm
from transformers import BambaConfig, BambaForCausalLM, PreTrainedTokenizerFast

from megatron_hybrid.arguments import ArgumentParser
from reference_model.chats import Chat, write_chat

VOCABULARY = 2048
PAD, END = "<|pad|>", "<|end|>"
ROLES = {role: f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}
SPECIALS = [PAD, END, *ROLES.values(), "<|reserved_0|>", "<|reserved_1|>"]

# A message is its role's token, its content as it is, and the end token. Nothing is trimmed and
# nothing depends on a later message, so a chat's tokens are a prefix of the longer chat's. Tools,
# which the model was not trained on, go before the messages and are called as Qwen 3 does it.
CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|system|>You may call these functions:\\n<tools>' -}}
{%- for tool in tools -%}{{- '\\n' + tool | tojson -}}{%- endfor -%}
{{- '\\n</tools>\\nTo call one, answer with its name and arguments:\\n' -}}
{{- '<tool_call>\\n{"name": "...", "arguments": {...}}\\n</tool_call><|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- set role = 'system' if message['role'] == 'developer' else message['role'] -%}
{%- if role not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception('The role of a message is system, user, assistant or tool, not ' + role) -}}
{%- endif -%}
{{- '<|' + role + '|>' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- elif message['content'] -%}
{%- for part in message['content'] -%}{{- part['text'] -}}{%- endfor -%}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{{- '\\n' if message['content'] or not loop.first -}}
{{- '<tool_call>\\n{"name": ' + call['function']['name'] | tojson + ', "arguments": ' -}}
{{- call['function']['arguments'] | tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""

# What a token is to the loss.
PADDING, TEXT, REPLY, VALUE = 0, 1, 2, 3


def model_config(max_length: int) -> BambaConfig:
    """Eight layers, three with attention; 6.4 million parameters, 13 MB in bfloat16.

    The scan's chunk is 64 tokens, so that states exist at every block of a prefix cache; heads
    and groups divide by two, so that the model also runs with two-way tensor parallelism.
    """
    return BambaConfig(
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        attn_layer_indices=[2, 4, 6],
        num_attention_heads=4,
        num_key_value_heads=2,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_n_groups=2,
        mamba_d_state=64,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=64,
        max_position_embeddings=max_length,
        pad_token_id=SPECIALS.index(PAD),
        bos_token_id=None,
        eos_token_id=SPECIALS.index(END),
        num_logits_to_keep=None,
    )


# ---------------------------------------------------------------------------------------------
# Tokens


def train_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE tokenizer in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r"'(?:s|t|m|re|ve|ll|d)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()

    def texts() -> Iterator[str]:
        for index in range(3000):
            for message in write_chat(f"tokenizer-{seed}-{index}", 4000).messages:
                yield message["content"]

    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, chat: Chat) -> tuple[list[int], list[int]]:
    """The chat's tokens as the template writes them, and what each is to the loss."""
    end = SPECIALS.index(END)
    asked: dict[int, list[str]] = {}
    for question in chat.questions:
        asked.setdefault(question.asked_in + 1, []).append(question.expected)
    contents = tokenizer.encode_batch([message["content"] for message in chat.messages])
    ids: list[int] = []
    marks: list[int] = []
    for index, (message, content) in enumerate(zip(chat.messages, contents, strict=True)):
        reply = message["role"] == "assistant"
        mark = REPLY if reply else TEXT
        content_marks = [mark] * len(content.ids)
        for value in asked.get(index, ()):
            start = message["content"].find(value)
            stop = start + len(value)
            for at, (a, b) in enumerate(content.offsets):
                if a < stop and b > start:
                    content_marks[at] = VALUE
        ids += [SPECIALS.index(ROLES[message["role"]]), *content.ids, end]
        marks += [TEXT, *content_marks, mark]
    return ids, marks


# ---------------------------------------------------------------------------------------------
# Batches


def row_length(progress: float, max_length: int, rng: random.Random) -> int:
    """Tokens in a row at this point of the training: short first, then up to `max_length`.

    Looking a fact up is learned on short chats in a fraction of the steps that long ones need.
    Every length stays in the mix to the end.
    """
    lengths = [256, 512, 1024, 2048, 3072, 4096, 5120, 6144, 8192]
    stages = (
        (0.12, (3, 1)),
        (0.25, (2, 2, 2)),
        (0.40, (1, 2, 3, 3)),
        (0.60, (1, 1, 2, 3, 3, 3)),
        (1.01, (1, 1, 1, 2, 2, 3, 4, 2, 2)),
    )
    weights = next(w for until, w in stages if progress < until)
    return min(rng.choices(lengths[: len(weights)], weights)[0], max_length)


@dataclass(frozen=True)
class Batches(Dataset):
    """Batch number `step` is a function of the seed and the step alone, so a run can resume."""

    tokenizer_json: str
    seed: int
    steps: int
    tokens: int
    max_length: int
    curriculum: bool  # short rows first; otherwise every length from the start

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokenizer = _tokenizer(self.tokenizer_json)
        rng = random.Random(f"batch/{self.seed}/{step}")
        progress = step / self.steps if self.curriculum else 1.0
        length = row_length(progress, self.max_length, rng)
        rows = max(1, self.tokens // length)
        ids = np.zeros((rows, length), dtype=np.int16)
        marks = np.zeros((rows, length), dtype=np.uint8)
        for row in range(rows):
            fill = rng.uniform(0.4, 1.05) if length <= 512 else rng.uniform(0.8, 1.05)
            chat = write_chat(f"{self.seed}/{step}/{row}", int(length * 3.6 * fill))
            row_ids, row_marks = encode(tokenizer, chat)
            count = min(length, len(row_ids))
            ids[row, :count] = row_ids[:count]
            marks[row, :count] = row_marks[:count]
        return torch.from_numpy(ids), torch.from_numpy(marks)


_TOKENIZERS: dict[str, Tokenizer] = {}


def _tokenizer(text: str) -> Tokenizer:
    """A worker's tokenizer, parsed once."""
    if text not in _TOKENIZERS:
        _TOKENIZERS[text] = Tokenizer.from_str(text)
    return _TOKENIZERS[text]


# ---------------------------------------------------------------------------------------------
# Training


def initialise(model: BambaForCausalLM, seed: int) -> None:
    """Mamba-2's own start for the decay: steps of 0.001 to 0.1, rates of 1 to 16.

    transformers starts every head with a step above one, which forgets a fact within a word.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            low, high = math.log(1e-3), math.log(1e-1)
            steps = torch.exp(low + (high - low) * torch.rand(parameter.shape, generator=generator))
            parameter.data.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus inverted
        elif name.endswith("A_log"):
            rates = 1 + 15 * torch.rand(parameter.shape, generator=generator)
            parameter.data.copy_(torch.log(rates))


def optimizer_for(model: BambaForCausalLM, rate: float, device: str) -> torch.optim.AdamW:
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2]
    others = [p for n, p in model.named_parameters() if p.ndim != 2]
    groups = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=device == "cuda")


def rate_at(step: int, steps: int, peak: float) -> float:
    warm = min(300, max(1, steps // 10))
    if step < warm:
        return peak * (step + 1) / warm
    progress = (step - warm) / max(1, steps - warm)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def loss_of(
    model: BambaForCausalLM, ids: torch.Tensor, marks: torch.Tensor, text_weight: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weighted loss, how many tokens of values were right, and how many there were."""
    weights = torch.tensor([0.0, text_weight, 1.0, 2.0], device=ids.device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]  # [rows, length - 1, vocabulary]
    targets, marks = ids[:, 1:], marks[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    weight = weights[marks.flatten()]
    with torch.no_grad():
        is_value = marks == VALUE
        right = ((logits.argmax(-1) == targets) & is_value).sum()
    return (losses * weight).sum() / weight.sum().clamp(min=1.0), right, is_value.sum()


def save_checkpoint(
    path: Path, model: BambaForCausalLM, optimizer: torch.optim.Optimizer, step: int, args: dict
) -> None:
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "arguments": args,
    }
    torch.save(state, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)  # an interruption leaves the old one whole


def export(folder: Path, model: BambaForCausalLM, tokenizer: Tokenizer) -> None:
    """Writes an ordinary Hugging Face folder, weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    copy = BambaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16)
    end = SPECIALS.index(END)
    copy.generation_config.eos_token_id = end
    copy.generation_config.pad_token_id = SPECIALS.index(PAD)
    copy.generation_config.do_sample = False
    copy.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[t for t in SPECIALS if t not in (PAD, END)],
        clean_up_tokenization_spaces=False,
        model_max_length=model.config.max_position_embeddings,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    # The class by its name of always: transformers 5 writes a name that version 4 does not know.
    _edit_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    # Infinity is not JSON; left out, the limit is (0, infinity) for every reader.
    _edit_json(folder / "config.json", {"time_step_limit": None})
    _edit_json(folder / "generation_config.json", {"_from_model_config": None})


def _edit_json(path: Path, changes: dict[str, str | None]) -> None:
    """Sets keys of a JSON file; None removes one."""
    settings = json.loads(path.read_text())
    for key, value in changes.items():
        settings.pop(key, None)
        if value is not None:
            settings[key] = value
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def train(args: argparse.Namespace) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    device = args.device
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")

    tokenizer_path = output / "tokenizer.json"
    if args.start_from:
        tokenizer_path = args.start_from / "tokenizer.json"
    elif not tokenizer_path.exists():
        train_tokenizer(args.seed).save(str(tokenizer_path))
    tokenizer = Tokenizer.from_file(str(tokenizer_path))

    model = BambaForCausalLM(model_config(args.max_length))
    initialise(model, args.seed)
    if args.start_from:
        model = BambaForCausalLM.from_pretrained(args.start_from, dtype=torch.float32)
    model.to(device).train()
    optimizer = optimizer_for(model, args.learning_rate, device)
    identity = {
        name: getattr(args, name)
        for name in ("seed", "steps", "tokens", "max_length", "learning_rate")
    } | {"start_from": str(args.start_from)}
    checkpoint = output / "checkpoint.pt"
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device, weights_only=True)
        if state["arguments"] != identity:
            sys.exit(
                f"{checkpoint} is of a run with {state['arguments']}, this one has {identity}. "
                "Use the same arguments to go on, or another --output."
            )
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        print(f"going on from step {first}", flush=True)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.2f} million parameters, {args.steps} steps on {device}", flush=True)

    batches = Batches(
        tokenizer.to_str(),
        args.seed,
        args.steps,
        args.tokens,
        args.max_length,
        curriculum=args.start_from is None,
    )
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=range(first, min(args.steps, args.stop_after or args.steps)),
        num_workers=args.workers,
        prefetch_factor=8 if args.workers else None,
        pin_memory=device == "cuda",
    )
    started = time.monotonic()
    seen, right, values, losses = 0, 0.0, 0.0, 0.0
    pending: list[torch.Tensor] = []
    bar = tqdm(loader, total=args.steps, initial=first, unit="step", mininterval=5, disable=None)
    for step, (ids, marks) in enumerate(bar, start=first):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, args.steps, args.learning_rate)
        ids = ids.to(device, non_blocking=True).long()
        marks = marks.to(device, non_blocking=True).long()
        # Other text matters less and less; a second round goes on about where the first ends.
        text_weight = 0.04 if args.start_from else 0.1 - 0.08 * step / args.steps
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss, good, count = loss_of(model, ids, marks, text_weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        seen += ids.numel()
        pending.append(torch.stack((loss.detach(), good.float(), count.float())))
        done = step + 1
        if done % args.log_every == 0 or done == args.steps:
            # The only wait for the device, once in many steps.
            sums = torch.stack(pending).double().sum(0).tolist()
            losses, right, values = sums[0] / len(pending), sums[1], sums[2]
            pending = []
            elapsed = time.monotonic() - started
            print(
                f"step {done} loss {losses:.4f} value tokens right {right / max(values, 1):.4f} "
                f"of {values:.0f}, {seen / elapsed / 1e3:.0f}k tokens/s, {elapsed:.0f} s, "
                f"last row {ids.shape[1]}",
                flush=True,
            )
        if done % args.save_every == 0 or done == args.steps:
            save_checkpoint(checkpoint, model, optimizer, done, identity)
            export(output / "model", model, tokenizer)
    export(output / "model", model, tokenizer)
    print(f"wrote {output / 'model'}", flush=True)


def main() -> None:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="runs/reference_model", help="folder of the run")
    parser.add_argument("--steps", type=int, default=12000, help="optimizer steps in all")
    parser.add_argument("--stop-after", type=int, help="end at this step; can be resumed")
    parser.add_argument(
        "--start-from",
        type=Path,
        help="folder of an earlier result: train it further, with a new optimizer",
    )
    parser.add_argument("--tokens", type=int, default=65536, help="tokens in a step")
    parser.add_argument("--max-length", type=int, default=8192, help="longest chat, in tokens")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="at its highest")
    parser.add_argument("--seed", type=int, default=1, help="of weights, chats and their order")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--log-every", type=int, default=100, help="steps between two lines")
    parser.add_argument("--save-every", type=int, default=1000, help="steps between checkpoints")
    args = parser.parse_args()
    if args.tokens < args.max_length:
        parser.error(
            f"--tokens {args.tokens} is less than --max-length {args.max_length}: "
            "a step must hold at least one chat"
        )
    if args.start_from and not (args.start_from / "config.json").is_file():
        parser.error(f"--start-from {args.start_from} has no config.json")
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: at least 1 is needed")
    train(args)


if __name__ == "__main__":
    main()
