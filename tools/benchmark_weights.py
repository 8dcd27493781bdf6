#!/usr/bin/env python
"""How long new weights take from a trainer's process into a running server, and what they cost.

    python tools/benchmark_weights.py --config configs/nemotron-h-8b.yaml [--ways ipc,nccl]
    python tools/benchmark_weights.py --load DIR --ways gloo [--device cpu] [ENGINE FLAGS]

A server of the model is started, and this process stands for the trainer: it holds every weight of
the model by Hugging Face's name, random ones, and sends all by each way, several times. ipc: on
the server's GPU, by CUDA IPC handles; nccl: from the next GPU through a group; gloo: through one on
CPUs. Seconds are those of WeightSender.send, from its first request to its last answer. After each
update the first token of a prompt of 1,024 tokens is timed, which finds nothing cached.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from bench.environment import describe_environment  # noqa: E402
from bench.replicas import ReplicaServers  # noqa: E402
from megatron_hybrid.arguments import (  # noqa: E402
    ArgumentParser,
    add_engine_arguments,
    engine_config_from_args,
)
from megatron_hybrid.config import EngineConfig  # noqa: E402
from megatron_hybrid.errors import ConfigurationError  # noqa: E402
from megatron_hybrid.models.checkpoints.folder import ModelFolder  # noqa: E402
from megatron_hybrid.models.checkpoints.weights import formats_of  # noqa: E402
from megatron_hybrid.models.families.registry import family_of  # noqa: E402
from megatron_hybrid.models.hybrid_model import HybridModel  # noqa: E402
from megatron_hybrid.parallel import initialize  # noqa: E402
from megatron_hybrid.training.weight_sender import WeightSender  # noqa: E402

PROMPT_TOKENS = 1024
TOKENIZER = "megatron_hybrid/reference_model/weights"


def weights_of(config: EngineConfig, device: torch.device) -> dict[str, Tensor]:
    """Random ones of the whole model, by Hugging Face's names, in bfloat16."""
    folder = ModelFolder.of(config)
    model = folder.config
    parallel = initialize(config.parallel_sizes, device=torch.device("cpu"))
    with torch.device("meta"):
        shapes = HybridModel(
            model,
            parallel,
            torch.bfloat16,
            torch.bfloat16,
            torch.float32,
            None,
            False,
            formats_of(folder, None, "dummy"),
            None,
        )
    found: dict[str, Tensor] = {}
    for block, part in shapes.weight_parts():
        place = family_of(model.model_type).places(model, block, part.role)[0]
        shape = (part.shape[0] * place.parts, *part.shape[1:])
        if place.index is not None:
            shape = (place.stacked, *shape)
        if place.name not in found:
            values = torch.empty(shape, dtype=torch.bfloat16, device=device)
            found[place.name] = values.normal_(0, 0.02)
    return found


def ask(url: str, prompt: Sequence[int]) -> tuple[float, dict[str, Any]]:
    """Seconds of one token after this prompt, and the answer."""
    body = {"prompt": list(prompt), "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    data = json.dumps({**body, "return_weight_versions": True}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", data, {"Content-Type": "application/json"}
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:
        found = json.load(answer)
    return time.perf_counter() - start, found


def measure(
    way: str, url: str, weights: dict[str, Tensor], device: torch.device, repeats: int
) -> dict[str, Any]:
    """Of one way: seconds of each update, and milliseconds of the first token behind it."""
    start = time.perf_counter()
    sender = WeightSender([url], device, way=way)
    found: dict[str, Any] = {"seconds_to_meet": time.perf_counter() - start}
    seconds, firsts = [], []
    prompt = list(range(100, 100 + PROMPT_TOKENS))
    ask(url, prompt)
    for number in range(repeats):
        start = time.perf_counter()
        sender.send(weights, f"{way}-{number}")
        seconds.append(time.perf_counter() - start)
        first, answer = ask(url, prompt)
        firsts.append(1e3 * first)
        (choice,) = answer["choices"]
        assert choice["weight_versions"][0]["version"] == f"{way}-{number}"
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    sender.close()
    size = sum(tensor.nbytes for tensor in weights.values())
    found |= {"seconds": seconds, "first_token_ms": firsts, "bytes": size, "tensors": len(weights)}
    print(
        f"{way:5} {len(weights)} tensors, {size / 1e9:.2f} GB: "
        f"{', '.join(f'{one:.3f}' for one in seconds)} s (median "
        f"{statistics.median(seconds):.3f}, {size / 1e9 / min(seconds):.1f} GB/s at best); "
        f"first token behind it {statistics.median(firsts):.1f} ms",
        flush=True,
    )
    return found


def main() -> int:
    parser = ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", default="ipc", help="of ipc, nccl, gloo, between commas")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", metavar="FILE", help="where the figures go")
    add_engine_arguments(parser)
    args = parser.parse_args()
    try:
        config = engine_config_from_args(args)
    except ConfigurationError as error:
        parser.error(str(error))
    known = {"--ways", "--repeats", "--json"}
    flags = _without(sys.argv[1:], known)
    if not any(flag.startswith("--tokenizer-model") for flag in flags):
        flags += ["--tokenizer-model", TOKENIZER]
    figures: dict[str, Any] = {"environment": describe_environment(), "ways": {}}
    servers = ReplicaServers(1, flags)
    try:
        for way in args.ways.split(","):
            device = torch.device({"ipc": "cuda:0", "nccl": "cuda:1", "gloo": "cpu"}[way])
            weights = weights_of(config, device)
            figures["ways"][way] = measure(way, servers.url, weights, device, args.repeats)
            del weights
    except Exception:
        print(servers.output[-8000:], file=sys.stderr)
        raise
    finally:
        servers.close()
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=1))
    return 0


def _without(arguments: Sequence[str], names: set[str]) -> list[str]:
    """Command-line arguments without these flags and their values."""
    kept: list[str] = []
    skip = False
    for one in arguments:
        if skip:
            skip = False
        elif one in names:
            skip = True
        elif one.partition("=")[0] not in names:
            kept.append(one)
    return kept


if __name__ == "__main__":
    sys.exit(main())
