"""What is kept of a serving benchmark: figures, settings, versions, the exact command."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.serving_requests import Outcome
from bench.versions import package_versions

_PACKAGES = ("megatron-hybrid", "numpy", "msgspec", "transformers", "tokenizers")
_SECRETS = ("--api-key",)


def recorded_command(arguments: Sequence[str]) -> str:
    """The command line without keys: `--api-key` and the values of `--header` are left out."""
    shown: list[str] = []
    hidden = in_header = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if hidden:
            argument, hidden = "***", False
        elif argument.startswith("--"):
            in_header = name == "--header"
            if name in _SECRETS:
                hidden = not equals
                argument = f"{name}=***" if equals else name
            elif in_header and equals:
                argument = f"--header={argument.split('=', 2)[1]}=***"
        elif in_header:
            argument = f"{name}=***"
        shown.append(argument)
    return shlex.join(["python", *shown])


def describe_client(arguments: Sequence[str]) -> dict[str, Any]:
    """Of the machine that sent the requests; the server's is not known here."""
    return {
        "versions": package_versions(_PACKAGES),
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
        },
        "command": recorded_command(arguments),
    }


def describe_run(
    args: argparse.Namespace, model: str, server: str | None, when: datetime
) -> dict[str, Any]:
    """The settings that a result is labelled with. server: what it calls itself."""
    finite = args.request_rate != float("inf")
    return {
        "date": when.strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "label": args.label or args.backend,
        "base_url": args.base_url,
        "endpoint": args.endpoint,
        "server": server,
        "model_id": model,
        "tokenizer_id": args.tokenizer,
        "dataset_name": args.dataset_name,
        "num_prompts": args.num_prompts,
        "seed": args.seed,
        "request_rate": args.request_rate if finite else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "fields": args.fields,
        **args.metadata,
    }


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Every request, in parallel lists as vLLM has them; seconds."""
    begin = min((outcome.sent for outcome in outcomes), default=0.0)
    return {
        "request_ids": [outcome.request_id for outcome in outcomes],
        "input_lens": [outcome.prompt_tokens for outcome in outcomes],
        "cached_lens": [outcome.cached_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens for outcome in outcomes],
        "start_times": [outcome.sent - begin for outcome in outcomes],
        "client_queue_times": [outcome.sent - outcome.due for outcome in outcomes],
        "ttfts": [outcome.time_to_first_token for outcome in outcomes],
        "itls": [outcome.inter_token_latencies for outcome in outcomes],
        "generated_texts": [outcome.text for outcome in outcomes],
        "finish_reasons": [outcome.finish_reason for outcome in outcomes],
        "errors": [
            f"{outcome.failure}: {outcome.error}" if outcome.failure else "" for outcome in outcomes
        ],
    }


def result_path(args: argparse.Namespace, model: str, when: datetime) -> Path:
    """Where --save-result writes, named as vLLM does it."""
    name = args.result_filename
    if name is None:
        limit = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
        label = args.label or args.backend
        stamp = when.strftime("%Y%m%d-%H%M%S")
        base = Path(model).name
        name = f"{label}-{args.request_rate}qps{limit}-{base}-{stamp}.json"
    return (args.result_dir or Path(".")) / name
