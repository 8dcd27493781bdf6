#!/usr/bin/env python
"""Measures a server with OpenAI's API, ours or another, by sending it requests.

    python tools/benchmark_serving.py --port 5000 --vocab-size 512 --workload all
    python tools/benchmark_serving.py --port 5000 --tokenizer DIR --dataset-name random \\
        --random-input-len 1024 --random-output-len 128 --num-prompts 200 --request-rate 10 \\
        --goodput ttft:500 tpot:50 --save-result --plot serving.png
    python tools/benchmark_serving.py --port 5000 --dataset-name multi_turn --num-clients 8

Flags, the table and the names in the JSON are those of `vllm bench serve`, and for multi_turn those
of vLLM's benchmark_serving_multi_turn.py, so that the same command line measures both. Added are
the workloads of tools/benchmark_offline.py, prompt tokens that came from the server's cache, and
failures by kind. The exit code is 0 if all requests succeeded, 1 if one failed, 2 if nothing could
be measured.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.serving_arguments import parse_serving_arguments
from bench.serving_clients import Clients, ClientSettings, planned_requests
from bench.serving_conversations import load_conversations
from bench.serving_datasets import (
    DatasetError,
    PrefixRepetition,
    RandomLengths,
    custom_requests,
    prefix_repetition_requests,
    random_requests,
    sharegpt_requests,
)
from bench.serving_http import HttpClient, HttpError
from bench.serving_load import arrival_times, send_at
from bench.serving_metrics import format_table, summarize_serving
from bench.serving_plots import plot_serving
from bench.serving_report import (
    describe_client,
    describe_run,
    details,
    result_path,
)
from bench.serving_requests import OpenAIServer, Outcome, ServingRequest
from bench.serving_tokens import TokenSource, load_token_source
from bench.serving_workloads import (
    run_serving_workload,
    summarize_workload,
)
from bench.workloads import make_workload
from megatron_hybrid.errors import ConfigurationError


class Benchmark:
    """One server and what is to be sent to it."""

    def __init__(self, args: argparse.Namespace, server: OpenAIServer) -> None:
        self._args = args
        self._server = server
        self._tokens = load_token_source(
            args.tokenizer,
            args.vocab_size,
            as_text=args.chat and args.dataset_name in ("random", "prefix_repetition"),
        )
        self._generator = np.random.default_rng(args.seed)
        self.outcomes: list[Outcome] = []

    async def run(self) -> list[dict[str, Any]]:
        """A result a workload, or one."""
        if self._args.workloads:
            return [await self._workload(name) for name in self._args.workloads]
        if self._args.dataset_name == "multi_turn":
            return [await self._conversations()]
        return [await self._dataset()]

    async def _dataset(self) -> dict[str, Any]:
        args = self._args
        requests = make_requests(args, self._tokens, self._generator)
        times = arrival_times(len(requests), args.request_rate, args.burstiness, self._generator)
        if args.num_warmups:
            warm_up = [requests[i % len(requests)] for i in range(args.num_warmups)]
            now = [0.0] * len(warm_up)
            await send_at(self._server, warm_up, now, args.max_concurrency)
        with self._bar(len(requests), args.dataset_name) as bar:
            outcomes, duration = await send_at(
                self._server, requests, times, args.max_concurrency, lambda outcome: bar.update()
            )
        return self._summary(outcomes, duration)

    async def _conversations(self) -> dict[str, Any]:
        args = self._args
        conversations = load_conversations(args.input_file, self._tokens, self._generator)
        settings = ClientSettings(
            num_clients=args.num_clients,
            max_active_conversations=args.max_active_conversations,
            max_num_requests=args.max_num_requests,
            max_turns=args.max_turns,
            sampling=args.conversation_sampling,
            request_rate=args.request_rate,
            limit_max_tokens=args.limit_max_tokens,
            limit_min_tokens=args.limit_min_tokens,
            early_stop=not args.no_early_stop,
        )
        if args.warmup_step:
            first_turns = ClientSettings(
                num_clients=args.num_clients,
                max_turns=1,
                limit_max_tokens=args.limit_max_tokens,
                limit_min_tokens=args.limit_min_tokens,
                early_stop=False,
            )
            await Clients(self._server, conversations, first_turns, args.seed).run()
        with self._bar(planned_requests(conversations, settings), "multi_turn") as bar:
            clients = Clients(
                self._server, conversations, settings, args.seed, lambda outcome: bar.update()
            )
            duration = await clients.run()
        result = self._summary(clients.outcomes, duration)
        return {**result, "num_clients": args.num_clients, "conversations": len(clients.histories)}

    async def _workload(self, name: str) -> dict[str, Any]:
        args = self._args
        workload = make_workload(
            name,
            self._tokens.vocab_size,
            seed=args.seed,
            scale=args.scale,
            count_scale=args.count_scale,
            shared_prefix=args.shared_prefix,
        )
        if args.num_warmups:
            other = make_workload(
                name, self._tokens.vocab_size, seed=10**6, scale=args.scale, count_scale=1e-9
            )
            for _ in range(args.num_warmups):
                await run_serving_workload(self._server, other, self._tokens)
        emptied = False if args.keep_cache else await self._empty_cache()
        with self._bar(workload.token_counts().requests, name) as bar:
            run = await run_serving_workload(
                self._server,
                workload,
                self._tokens,
                lambda outcome: bar.update(),
                args.max_concurrency,
            )
        return {
            "workload": name,
            "digest": workload.digest(),
            "scale": args.scale,
            "count_scale": args.count_scale,
            "shared_prefix": args.shared_prefix,
            "cache_emptied": emptied,
            **self._summary(run.all_outcomes, sum(run.round_walls)),
            **summarize_workload(run),
        }

    async def _empty_cache(self) -> bool:
        """Whether the server could be asked to forget (ours and vLLM's in development can)."""
        try:
            response, _ = await self._server.client.request("POST", "/reset_prefix_cache")
        except (HttpError, OSError):
            return False
        return response.status == 200

    def _bar(self, total: int, label: str) -> Any:
        # None: no bar in a log
        disable = True if self._args.disable_tqdm else None
        # Collected now, so that nothing of what was made before is looked at during the run.
        gc.collect()
        gc.freeze()
        return tqdm(total=total, desc=label, unit="req", leave=False, disable=disable)

    def _summary(self, outcomes: list[Outcome], duration: float) -> dict[str, Any]:
        args = self._args
        self.outcomes += outcomes
        result = summarize_serving(
            outcomes,
            duration,
            goodput=args.goodput_limits,
            percentiles=args.percentiles,
            metrics=args.metrics,
        )
        return {**result, **details(outcomes)} if args.save_detailed else result


def make_requests(
    args: argparse.Namespace, tokens: TokenSource, generator: np.random.Generator
) -> list[ServingRequest]:
    """The dataset's requests, in the order in which they are sent."""
    count = args.num_prompts
    from_file = {"shuffle": not args.disable_shuffle, "oversample": not args.no_oversample}
    if args.dataset_name == "random":
        lengths = RandomLengths(
            args.random_input_len,
            args.random_output_len,
            args.random_prefix_len,
            args.random_range_ratio,
        )
        return random_requests(count, lengths, tokens, generator)
    if args.dataset_name == "prefix_repetition":
        sizes = PrefixRepetition(
            args.prefix_repetition_prefix_len,
            args.prefix_repetition_suffix_len,
            args.prefix_repetition_num_prefixes,
            args.prefix_repetition_output_len,
        )
        return prefix_repetition_requests(count, sizes, tokens, generator)
    if args.dataset_name == "custom":
        return custom_requests(
            args.dataset_path, count, args.custom_output_len, generator, **from_file
        )
    return sharegpt_requests(
        args.dataset_path, count, args.sharegpt_output_len, tokens, generator, **from_file
    )


async def find_model(server: OpenAIServer, args: argparse.Namespace) -> str:
    """The model's name in requests; waits until the server answers. Raises HttpError."""
    deadline = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            models = await server.get_json("/v1/models")
            break
        except (HttpError, OSError) as error:
            if time.monotonic() >= deadline:
                raise HttpError(f"{args.base_url} cannot be measured: {error}") from error
            await asyncio.sleep(0.5)
    name = args.served_model_name or args.model
    try:
        return str(name or models["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise HttpError(f"{args.base_url} lists no model; give --model NAME.") from None


async def server_version(server: OpenAIServer) -> str | None:
    """What GET /version says (vLLM's and ours have it), if anything."""
    try:
        return str((await server.get_json("/version"))["version"])
    except (HttpError, OSError, KeyError, TypeError):
        return None


async def measure(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    when = datetime.now()
    client = HttpClient(args.base_url, args.headers, insecure=args.insecure)
    # The name is filled in below: the server is asked for it.
    server = OpenAIServer(
        client,
        args.endpoint,
        "",
        chat=args.chat,
        fields=args.fields,
        timeout=args.request_timeout_sec,
    )
    try:
        server.model = await find_model(server, args)
        benchmark = Benchmark(args, server)
        results = await benchmark.run()
        head = describe_run(args, server.model, await server_version(server), when)
    finally:
        client.close()
    for result in results:
        shown = {**head, **result}
        if shown["request_rate"] == "inf":
            shown["request_rate"] = None
        print(format_table(shown, result.get("workload", "Serving Benchmark Result")))
    environment = describe_client(arguments)
    if args.workloads:
        saved: dict[str, Any] = {**head, "results": results, **environment}
    else:
        saved = {**head, **results[0], **environment}
    if args.save_result or args.save_detailed:
        path = result_path(args, server.model, when)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(saved, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {path}", file=sys.stderr)
    if args.plot is not None:
        plot_serving(benchmark.outcomes, args.plot, f"{server.model}, {args.base_url}")
    return 1 if any(result["failed"] for result in results) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_serving_arguments(arguments, __doc__)
    given = sys.argv if arguments is None else ["tools/benchmark_serving.py", *arguments]
    try:
        return asyncio.run(measure(args, given))
    except (DatasetError, ConfigurationError, HttpError, ImportError, ValueError) as error:
        print(f"benchmark_serving.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
