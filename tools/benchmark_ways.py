#!/usr/bin/env python
r"""What a request, a token and chats cost behind each way to reach a model's replicas.

    python tools/benchmark_ways.py server coordinator
    python tools/benchmark_ways.py coordinator dynamo ray-haproxy --measure multi_turn \
        --python dynamo=dynamo/bin/python ray=ray/bin/python ray-haproxy=ray/bin/python
    python tools/benchmark_ways.py coordinator ray --gpus --scale 1 --kv-gb 20 --states-gb 8 \
        -- --config configs/nemotron-h-8b.yaml

server (one replica, without a coordinator), coordinator (ours), smg, vllm-router, sglang-router,
dynamo, ray and ray-haproxy are started one after the other, --rounds times, with --replicas of
the reference model on the CPU unless flags behind -- say another one. Each start is measured
--repeats times, with other prompts each time. Printed and kept in --json are, as medians and all
runs:

one_token   milliseconds of a chat of one token, the median of 100, one at a time
streams     seconds for 600 chats of 20 tokens, 200 at a time
chats       those of benchmark_replicas.py, with --requests requests; tokens skipped, and seconds
multi_turn  benchmark_serving.py's workload of that name, by token ids: smg and sglang-router
            refuse them; tokens skipped, and seconds

The exit code is 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.replicas import Memory, Workload, drive, figures
from bench.serving_datasets import RandomLengths, random_requests
from bench.serving_http import HttpClient
from bench.serving_load import send_at
from bench.serving_metrics import summarize_serving
from bench.serving_requests import OpenAIServer
from bench.serving_tokens import load_token_source
from bench.serving_workloads import run_serving_workload
from bench.ways import ROOT, WAYS, Deployment
from bench.workloads import make_workload
from megatron_hybrid.arguments import ArgumentParser

MEASURES = ("one_token", "streams", "chats", "multi_turn")
TOKENIZER = str(ROOT / "megatron_hybrid" / "reference_model" / "weights")
NO_TOKEN_IDS = ("smg", "sglang-router")
PROMPT_TOKENS = 16  # of one_token and streams
WARM_UP = 10  # requests before these


def main() -> int:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--python", nargs="+", default=[], metavar="WAY=FILE", help="of its own")
    parser.add_argument("--measure", nargs="+", choices=MEASURES, default=list(MEASURES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--requests", type=int, default=500, help="of chats")
    parser.add_argument("--clients", type=int, default=16, help="of chats, and requests at once")
    parser.add_argument("--scale", type=float, default=0.3, help="of multi_turn's lengths")
    parser.add_argument("--kv-gb", type=float, default=0.1, help="of each replica")
    parser.add_argument("--states-gb", type=float, default=0.1, help="of each replica")
    parser.add_argument("--tokenizer", metavar="FOLDER", default=TOKENIZER, help="of the model")
    parser.add_argument("--gpus", action="store_true", help="one a replica")
    parser.add_argument("--json", type=Path, help="where the figures go, besides the terminal")
    # What has been started is ended then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ours, of_replicas = _split(sys.argv[1:])
    args = parser.parse_args(ours)
    if not args.ways or not set(args.ways) <= set(WAYS):
        parser.error(f"Ways are {', '.join(WAYS)}; got {' '.join(args.ways) or 'none'}.")
    if len(of_replicas) % 2:
        parser.error(
            "Flags behind -- are a name and a value each, such as --tensor-parallel-size 2."
        )
    pythons = dict(pair.split("=", 1) for pair in args.python)
    flags = [*Memory(args.kv_gb, args.states_gb).flags(1), *of_replicas]
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in args.ways}
    for _ in range(args.rounds):
        for way in args.ways:
            python = pythons.get(way, sys.executable)
            deployment = Deployment(python, flags, args.replicas, args.gpus)
            with deployment.behind(way) as url:
                found[way] += [_measure(way, url, args, seed) for seed in range(args.repeats)]
            if args.json is not None:
                args.json.write_text(json.dumps(found, indent=2) + "\n")
    for way, runs in found.items():
        for name in runs[0]:
            _show(f"{way}, {name}, {len(runs)} runs", [run[name] for run in runs])
    figures_of_all = [one for runs in found.values() for run in runs for one in run.values()]
    return int(any(one["failed"] for one in figures_of_all))


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """At "--": argparse would take what is behind it for ways."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at + 1 :]


def _measure(way: str, url: str, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Of one deployment, by measure: its figures, also printed. seed: of prompts that share."""
    model, tokenizer = asyncio.run(_model(url)), args.tokenizer
    found: dict[str, Any] = {}
    for name in args.measure:
        if name == "chats":
            chats = Workload(requests=args.requests, clients=args.clients, seed=seed)
            found[name] = _of_chats(url, model, chats)
        elif name != "multi_turn":
            found[name] = asyncio.run(_short_chats(url, model, tokenizer, name == "streams"))
        elif way not in NO_TOKEN_IDS:
            found[name] = asyncio.run(_multi_turn(url, model, tokenizer, args.scale, seed))
        if name in found:
            _show(f"{way}, {name}", [found[name]])
    return found


async def _model(url: str) -> str:
    """The name of the model that is served there."""
    client = HttpClient(url)
    try:
        models = await OpenAIServer(client, "", "", chat=True).get_json("/v1/models")
    finally:
        client.close()
    return str(models["data"][0]["id"])


async def _short_chats(url: str, model: str, tokenizer: str, streams: bool) -> dict[str, Any]:
    """Chats of a few random tokens each: many streams, or a token each and one at a time."""
    tokens = load_token_source(tokenizer, None, as_text=True)
    count, answer, at_once = (600, 20, 200) if streams else (100, 1, 1)
    lengths = RandomLengths(PROMPT_TOKENS, answer, 0, 0.0)
    generator = np.random.default_rng()  # nothing that was asked before is cached
    requests = random_requests(WARM_UP + count, lengths, tokens, generator)
    client = HttpClient(url)
    fields = {"temperature": 0, "ignore_eos": True}
    server = OpenAIServer(client, "/v1/chat/completions", model, chat=True, fields=fields)
    try:
        await send_at(server, requests[:WARM_UP], [0.0] * WARM_UP, at_once)
        outcomes, seconds = await send_at(server, requests[WARM_UP:], [0.0] * count, at_once)
    finally:
        client.close()
    summary = summarize_serving(outcomes, seconds)
    each = {"ms": round(summary["median_e2el_ms"] or 0.0, 1), "failed": summary["failed"]}
    return {"seconds": round(seconds, 2), **each}


def _of_chats(url: str, model: str, chats: Workload) -> dict[str, Any]:
    found = figures(drive(url, chats, model), {})
    return {
        "seconds": found["seconds"],
        "skipped": found["skipped_tokens"],
        "of": found["prompt_tokens"],
        "first_token_ms": found["ttft_mean_ms"],
        "failed": sum(found["failures"].values()),
    }


async def _multi_turn(
    url: str, model: str, tokenizer: str, scale: float, seed: int
) -> dict[str, Any]:
    tokens = load_token_source(tokenizer, None)
    client = HttpClient(url)
    server = OpenAIServer(client, "/v1/completions", model, chat=False)

    def workload(seed: int, count_scale: float) -> Any:
        return make_workload(
            "multi_turn", tokens.vocab_size, seed=seed, scale=scale, count_scale=count_scale
        )

    try:
        await run_serving_workload(server, workload(10**6 + seed, 0.1), tokens)
        run = await run_serving_workload(server, workload(seed, 1.0), tokens)
    finally:
        client.close()
    seconds = sum(run.round_walls)
    summary = summarize_serving(run.all_outcomes, seconds)
    return {
        "seconds": round(seconds, 2),
        "skipped": summary["total_cached_tokens"],
        "of": summary["total_input_tokens"],
        "first_token_ms": round(summary["mean_ttft_ms"] or 0.0, 1),
        "failed": summary["failed"],
    }


def _show(name: str, runs: Sequence[dict[str, Any]]) -> None:
    """Medians, and what they are of."""
    texts = []
    for figure in runs[0]:
        values = [run[figure] for run in runs]
        if figure != "failed" or any(values):
            all_of_them = f" ({', '.join(f'{one:g}' for one in values)})" if values[1:] else ""
            texts.append(f"{figure} {statistics.median(values):g}{all_of_them}")
    print(f"{name}: {'; '.join(texts)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
