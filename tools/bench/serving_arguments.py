"""The flags of tools/benchmark_serving.py: vLLM's names where vLLM has them.

`vllm bench serve` (vllm/benchmarks/serve.py and its datasets) and, for conversations,
benchmarks/multi_turn/benchmark_serving_multi_turn.py. Those of the workloads are
tools/benchmark_offline.py's.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.serving_clients import SAMPLINGS
from bench.serving_metrics import METRICS, parse_goodput
from bench.workloads import IF_NAMED, SHARED_PREFIX, WORKLOAD_NAMES
from megatron_hybrid.arguments import ArgumentParser

BACKENDS = ("openai", "openai-chat", "vllm")
DATASETS = ("random", "prefix_repetition", "custom", "sharegpt", "multi_turn")
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
_SAMPLING_FIELDS = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty".split()
)


def make_parser(description: str | None = None) -> argparse.ArgumentParser:
    parser = ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a flag that is cut short may mean another one elsewhere
    )
    _add_server(parser.add_argument_group("server"))
    _add_datasets(parser)
    _add_workloads(parser.add_argument_group("our workloads (instead of a dataset)"))
    _add_conversations(parser.add_argument_group("conversations (--dataset-name multi_turn)"))
    _add_load(parser.add_argument_group("load"))
    _add_sampling(parser.add_argument_group("sampling"))
    _add_results(parser.add_argument_group("results"))
    return parser


def parse_serving_arguments(
    arguments: Sequence[str] | None = None, description: str | None = None
) -> argparse.Namespace:
    """Checked flags. Besides the flags themselves: `chat` (bool), `fields` (sent with every
    request), `headers`, `goodput_limits` (ms), `percentiles` and `metrics` (lists), `workloads`
    (names; empty: a dataset). Exits with a sentence for what is wrong."""
    parser = make_parser(description)
    args = parser.parse_args(arguments)
    if args.backend == "vllm":
        args.backend = "openai"
    args.chat = args.backend == "openai-chat" or args.dataset_name == "multi_turn"
    if args.endpoint is None:
        args.endpoint = ENDPOINTS["openai-chat" if args.chat else "openai"]
    if args.base_url is None:
        host = f"[{args.host}]" if ":" in args.host else args.host
        args.base_url = f"http://{host}:{args.port}"
    try:
        args.headers = _headers(args)
        args.goodput_limits = parse_goodput(args.goodput)
        args.percentiles = _percentiles(args.metric_percentiles)
        args.metrics = _names("--percentile-metrics", args.percentile_metrics, METRICS)
        args.workloads = _workloads(args)
        args.fields = _fields(args)
        args.metadata = dict(_pair("--metadata", text) for text in args.metadata)
    except ValueError as error:
        parser.error(str(error))
    _check_numbers(parser, args)
    if args.input_len is not None:
        args.random_input_len = args.input_len
    if args.output_len is not None:
        args.random_output_len = args.prefix_repetition_output_len = args.output_len
        args.custom_output_len = args.sharegpt_output_len = args.output_len
    if args.dataset_name in ("custom", "sharegpt") and args.dataset_path is None:
        parser.error(f"--dataset-name {args.dataset_name} needs --dataset-path FILE.")
    if args.count_scale is None:
        args.count_scale = args.scale
    return args


def _add_server(group: Any) -> None:
    group.add_argument(
        "--backend",
        choices=BACKENDS,
        default="openai",
        help="openai: /v1/completions, prompts as token ids where they are generated; openai-chat: "
        "/v1/chat/completions, prompts as text; vllm: the same as openai",
    )
    group.add_argument("--base-url", metavar="URL", help="instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=8000, help="default: 8000, as vLLM has it")
    group.add_argument("--endpoint", metavar="PATH", help="default: the backend's")
    group.add_argument(
        "--model", help="name in requests (default: the first that /v1/models lists)"
    )
    group.add_argument("--served-model-name", help="name in requests, if it is not --model")
    group.add_argument("--tokenizer", metavar="FOLDER", help="a Hugging Face folder")
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="of the model, for random tokens (default: config.json's or the tokenizer's)",
    )
    group.add_argument(
        "--header", nargs="*", default=[], metavar="KEY=VALUE", help="sent with every request"
    )
    group.add_argument(
        "--api-key", help="bearer key (default: the environment's OPENAI_API_KEY, if it is set)"
    )
    group.add_argument("--insecure", action="store_true", help="take any TLS certificate")
    group.add_argument(
        "--ready-check-timeout-sec",
        type=float,
        default=0,
        metavar="S",
        help="wait up to this long until the server answers (default: 0)",
    )
    group.add_argument(
        "--request-timeout-sec",
        type=float,
        default=6 * 3600,
        metavar="S",
        help="for a whole answer (default: 6 hours)",
    )


def _add_datasets(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset-name", choices=DATASETS, help="default: random")
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="of custom and sharegpt")
    group.add_argument("--num-prompts", type=int, default=1000, help="default: 1000")
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrival times")
    group.add_argument("--input-len", type=int, metavar="N", help="sets --random-input-len")
    group.add_argument("--output-len", type=int, metavar="N", help="sets the dataset's own")
    group.add_argument("--disable-shuffle", action="store_true", help="keep a file's order")
    group.add_argument("--no-oversample", action="store_true", help="don't repeat a short file")
    for name, default in (("input", 1024), ("output", 128), ("prefix", 0)):
        group.add_argument(
            f"--random-{name}-len",
            type=int,
            default=default,
            metavar="TOKENS",
            help=f"default: {default}",
        )
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="input and output lengths between (1 - R) and (1 + R) times that (default: 0)",
    )
    for name, default in (("prefix-len", 256), ("suffix-len", 256), ("num-prefixes", 10)):
        group.add_argument(f"--prefix-repetition-{name}", type=int, default=default, metavar="N")
    group.add_argument("--prefix-repetition-output-len", type=int, default=128, metavar="N")
    group.add_argument(
        "--custom-output-len",
        type=int,
        default=256,
        metavar="N",
        help="-1: each line's output_tokens (default: 256)",
    )
    group.add_argument(
        "--sharegpt-output-len", type=int, metavar="N", help="default: the answer's in the file"
    )


def _add_workloads(group: Any) -> None:
    group.add_argument(
        "--workload",
        metavar="NAME[,NAME...]",
        help=f"all ({', '.join(WORKLOAD_NAMES)}), or some of these and of "
        f"{', '.join(IF_NAMED)}; in rounds, as in benchmark_offline.py",
    )
    group.add_argument("--scale", type=float, default=0.02, help="of lengths (default: 0.02)")
    group.add_argument("--count-scale", type=float, help="of the number of requests (--scale)")
    group.add_argument("--shared-prefix", type=int, default=SHARED_PREFIX, metavar="TOKENS")
    group.add_argument(
        "--keep-cache",
        action="store_true",
        help="don't ask the server to empty its prefix cache before each workload",
    )


def _add_conversations(group: Any) -> None:
    group.add_argument(
        "--input-file",
        type=Path,
        help="conversations, or how to generate them (default: 24 generated ones)",
    )
    group.add_argument("--num-clients", type=int, default=1, help="requests at once (default: 1)")
    group.add_argument("--max-active-conversations", type=int, metavar="N", help="of all clients")
    group.add_argument("--max-num-requests", type=int, metavar="N", help="of all clients")
    group.add_argument("--max-turns", type=int, metavar="N", help="messages of both sides")
    group.add_argument("--limit-max-tokens", type=int, metavar="N", help="of every answer")
    group.add_argument("--limit-min-tokens", type=int, metavar="N", help="of every answer")
    group.add_argument("--conversation-sampling", choices=SAMPLINGS, default=SAMPLINGS[0])
    group.add_argument(
        "--no-early-stop",
        action="store_true",
        help="don't end when the first client has nothing left to do",
    )
    group.add_argument(
        "--warmup-step", action="store_true", help="first every conversation's first turn"
    )


def _add_load(group: Any) -> None:
    group.add_argument(
        "--request-rate",
        type=float,
        default=float("inf"),
        help="a second (default: inf); with multi_turn that of each client, 0 and inf: no pauses",
    )
    group.add_argument(
        "--burstiness", type=float, default=1.0, help="1: Poisson; less: in bursts; more: evener"
    )
    group.add_argument("--max-concurrency", type=int, metavar="N", help="open requests at most")
    group.add_argument(
        "--num-warmups", type=int, default=0, metavar="N", help="requests before the measured ones"
    )


def _add_sampling(group: Any) -> None:
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        help="always all tokens (on for random prompts and workloads)",
    )
    for name in _SAMPLING_FIELDS:
        kind = int if name == "top_k" else float
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, help="default: the server's")
    group.add_argument("--extra-body", metavar="JSON", help="more fields for every request")


def _add_results(group: Any) -> None:
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count requests within all limits: ttft:500 tpot:50 e2el:1000",
    )
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="NAMES")
    group.add_argument("--metric-percentiles", default="99", metavar="P[,P...]")
    group.add_argument("--label", help="kept with the result (default: the backend)")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE")
    group.add_argument("--save-result", action="store_true", help="write a JSON file")
    group.add_argument("--save-detailed", action="store_true", help="every request in it, too")
    group.add_argument("--result-dir", type=Path, metavar="DIR")
    group.add_argument("--result-filename", metavar="NAME")
    group.add_argument("--plot", type=Path, metavar="FILE", help="a PNG; needs matplotlib")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def _headers(args: argparse.Namespace) -> dict[str, str]:
    headers = {}
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    headers.update(_pair("--header", text) for text in args.header)
    return headers


def _pair(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"{flag} {text!r} is not of the form KEY=VALUE.")
    return name.strip(), value.strip()


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise ValueError(f"--metric-percentiles is {text!r}; give numbers from 0 to 100: 50,95,99.")
    return values


def _names(flag: str, text: str, known: Any) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f"{flag} has {name!r}, which is not one of {', '.join(known)}.")
    return names


def _workloads(args: argparse.Namespace) -> list[str]:
    if args.workload is None:
        args.dataset_name = args.dataset_name or "random"
        return []
    if args.dataset_name is not None:
        raise ValueError("--workload and --dataset-name exclude each other; give one of them.")
    if args.chat:
        raise ValueError(
            "Workloads are token ids, which --backend openai-chat does not take; leave it out."
        )
    if args.request_rate != float("inf"):
        raise ValueError("A workload's rounds say when requests come; leave out --request-rate.")
    sampling = [name for name in _SAMPLING_FIELDS if getattr(args, name) is not None]
    if sampling:
        flag = f"--{sampling[0].replace('_', '-')}"
        raise ValueError(f"A workload is greedy, the same everywhere; leave out {flag}.")
    names = list(WORKLOAD_NAMES) if args.workload == "all" else args.workload.split(",")
    return _names("--workload", ",".join(names), WORKLOAD_NAMES + IF_NAMED)


def _fields(args: argparse.Namespace) -> dict[str, Any]:
    fields = {name: getattr(args, name) for name in _SAMPLING_FIELDS}
    fields = {name: value for name, value in fields.items() if value is not None}
    if args.ignore_eos or args.dataset_name == "random":
        fields["ignore_eos"] = True
    if args.extra_body is not None:
        try:
            extra = json.loads(args.extra_body)
        except ValueError as error:
            raise ValueError(f"--extra-body is not JSON: {error}.") from error
        if not isinstance(extra, dict):
            raise ValueError("--extra-body must be a JSON object.")
        fields |= extra
    return fields


def _check_numbers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    least_1 = (
        "num_prompts random_input_len random_output_len prefix_repetition_suffix_len "
        "prefix_repetition_num_prefixes prefix_repetition_output_len shared_prefix num_clients "
        "max_concurrency max_active_conversations max_num_requests max_turns limit_max_tokens "
        "limit_min_tokens vocab_size input_len output_len sharegpt_output_len"
    ).split()
    least_0 = "num_warmups random_prefix_len prefix_repetition_prefix_len seed".split()
    for names, least in ((least_1, 1), (least_0, 0)):
        for name in names:
            value = getattr(args, name)
            if value is not None and value < least:
                parser.error(f"--{name.replace('_', '-')} is {value}; give at least {least}.")
    if args.custom_output_len != -1 and args.custom_output_len < 1:
        parser.error(f"--custom-output-len is {args.custom_output_len}; give at least 1, or -1.")
    for name in ("burstiness", "scale", "count_scale", "request_timeout_sec"):
        value = getattr(args, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be more than 0.")
    if args.dataset_name == "multi_turn" and args.request_rate == 0:
        args.request_rate = float("inf")
    if not args.request_rate > 0:
        parser.error(f"--request-rate is {args.request_rate}; it must be more than 0.")
