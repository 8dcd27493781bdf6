#!/usr/bin/env python
"""Answers prompts in one process and writes one JSON object a line.

    python tools/offline_inference.py --prompt "The code of the gate is"
    python tools/offline_inference.py --load DIR --prompts-file prompts.jsonl --output out.jsonl

A line of the prompts file is a JSON string (the prompt), a list of token ids, or an object with one
of "prompt", "prompt_token_ids" and "messages" (a chat), and optionally the sampling parameters of
that line ("temperature", "max_tokens", "seed", ...), which win over the flags. All lines are
answered together; the output keeps their order.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from megatron_hybrid import (
    LLM,
    ConfigurationError,
    InvalidRequestError,
    RequestOutput,
    SamplingParams,
    WeightsError,
)
from megatron_hybrid.arguments import (
    ArgumentParser,
    add_engine_arguments,
    engine_config_from_args,
)

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
PARAMETERS = {field.name for field in dataclasses.fields(SamplingParams)}
TUPLES = ("stop", "stop_token_ids")


class InputError(ValueError):
    """A line of the input that can't be understood; the message names it."""


def parse_arguments() -> argparse.Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times"
    )
    source.add_argument(
        "--prompts-file", metavar="JSONL", help="a prompt a line; - reads standard input"
    )
    parser.add_argument(
        "--chat", action="store_true", help="send each --prompt as a user's message"
    )
    parser.add_argument(
        "--output", metavar="JSONL", help="file to write (default: standard output)"
    )
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    group.add_argument("--top-k", type=int, default=0, help="0: off (default: 0)")
    group.add_argument("--top-p", type=float, default=1.0, help="1: off (default: 1)")
    group.add_argument("--min-p", type=float, default=0.0, help="0: off (default: 0)")
    group.add_argument("--max-tokens", type=int, default=128, help="of an answer (default: 128)")
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="ends an answer; may be repeated",
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")
    add_engine_arguments(parser)
    return parser.parse_args()


def read_requests(args: argparse.Namespace) -> list[tuple[str, Any, dict[str, Any]]]:
    """(kind, prompt, its own sampling parameters) for every prompt. Raises InputError."""
    if args.prompt is not None:
        if args.chat:
            return [("messages", [{"role": "user", "content": p}], {}) for p in args.prompt]
        return [("prompt", prompt, {}) for prompt in args.prompt]
    if args.prompts_file == "-":
        lines = sys.stdin.read().splitlines()
    else:
        try:
            lines = Path(args.prompts_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"--prompts-file {args.prompts_file} can't be read: {error}"
            ) from error
    return [_read_line(n, line) for n, line in enumerate(lines, start=1) if line.strip()]


def _read_line(number: int, line: str) -> tuple[str, Any, dict[str, Any]]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"line {number} of the prompts file is not JSON: {error}") from error
    if isinstance(value, str):
        return "prompt", value, {}
    if isinstance(value, list):
        value = {"prompt_token_ids": value}
    if not isinstance(value, dict):
        raise InputError(f"line {number} must be a string, a list of token ids or an object.")
    kinds = [key for key in PROMPT_KEYS if key in value]
    if len(kinds) != 1:
        raise InputError(f"line {number} must have exactly one of {', '.join(PROMPT_KEYS)}.")
    prompt = value.pop(kinds[0])
    if kinds[0] == "prompt_token_ids" and not (
        isinstance(prompt, list) and all(type(token) is int for token in prompt)
    ):
        raise InputError(f"line {number}: prompt_token_ids must be a list of whole numbers.")
    if kinds[0] == "prompt" and not isinstance(prompt, str):
        raise InputError(f"line {number}: prompt must be a string.")
    unknown = sorted(set(value) - PARAMETERS)
    if unknown:
        raise InputError(
            f"line {number} has {', '.join(map(repr, unknown))}; known are"
            f" {', '.join([*PROMPT_KEYS, *sorted(PARAMETERS)])}."
        )
    for name in TUPLES:
        if name in value:
            value[name] = (value[name],) if isinstance(value[name], str) else tuple(value[name])
    return kinds[0], prompt, value


def to_json(output: RequestOutput) -> str:
    record = {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.cached_tokens,
        "finish_reason": output.finish_reason.value if output.finish_reason else None,
    }
    if output.error is not None:
        record["error"] = output.error
    return json.dumps(record, ensure_ascii=False)


def main() -> int:
    args = parse_arguments()
    flags = SamplingParams(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )
    try:
        # Read before the model: a typo should not cost the time to load one.
        requests = read_requests(args)
        params = [dataclasses.replace(flags, **own) for _, _, own in requests]
        for one in params:
            one.validate()
        llm = LLM(config=engine_config_from_args(args))
        prompts = [
            llm.tokenizer.encode_chat(prompt) if kind == "messages" else prompt
            for kind, prompt, _ in requests
        ]
        outputs = llm.generate(prompts, params) if prompts else []
    except (InputError, ConfigurationError, InvalidRequestError, WeightsError) as error:
        print(f"offline_inference.py: {error}", file=sys.stderr)
        return 2
    text = "".join(to_json(output) + "\n" for output in outputs)
    if args.output:
        Path(args.output).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 1 if any(output.error for output in outputs) else 0


if __name__ == "__main__":
    sys.exit(main())
