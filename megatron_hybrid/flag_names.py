"""What vLLM, SGLang, llama.cpp and Text Generation Inference call our flags, for who comes from
there. Names that are the same do not stand here. Those of vLLM that mean the very same are taken,
too."""

from __future__ import annotations

import re
from decimal import Decimal

_BATCHING = "inference-dynamic-batching-"
_BUFFER, _STATES = f"--{_BATCHING}buffer-size-gb", f"--{_BATCHING}prefix-caching-mamba-gb"
_GRAPHS, _DRAFTS = f"--{_BATCHING}num-cuda-graphs", "--num-speculative-tokens"
_STEPS = "--inference-logging-step-interval"

_NAMES = {
    "--load": "--model --model-path --model-id -m",
    "--tokenizer-model": "--tokenizer --tokenizer-path",
    "--inference-max-seq-length": "--max-model-len --context-length --ctx-size -c",
    "--tensor-model-parallel-size": "-tp --tensor-parallel-size --tp --tp-size --num-shard",
    "--pipeline-model-parallel-size": "-pp --pipeline-parallel-size --pp --pp-size",
    "--data-parallel-size": "-dp --dp --dp-size",
    "--expert-model-parallel-size": (
        "--enable-expert-parallel --ep --ep-size --expert-parallel-size"
    ),
    f"--{_BATCHING}max-requests": "--max-num-seqs --max-running-requests",
    f"--{_BATCHING}max-tokens": (
        "--max-num-batched-tokens --chunked-prefill-size --max-prefill-tokens "
        "--max-batch-prefill-tokens"
    ),
    f"--{_BATCHING}block-size": "--block-size --page-size",
    f"--{_BATCHING}prefix-caching": "--enable-prefix-caching",
    f"--no-{_BATCHING}prefix-caching": "--no-enable-prefix-caching --disable-radix-cache",
    f"--{_BATCHING}prefix-caching-eviction-policy": "--radix-eviction-policy",
    _BUFFER: "--kv-cache-memory-bytes --num-gpu-blocks-override --max-total-tokens",
    _STATES: "--max-mamba-cache-size",
    "--mamba-inference-conv-states-dtype": "--mamba-cache-dtype",
    "--mamba-inference-ssm-states-dtype": "--mamba-ssm-cache-dtype --mamba-ssm-dtype",
    _DRAFTS: "--speculative-config",
    _GRAPHS: (
        "--cuda-graph-sizes --cudagraph-capture-sizes --max-cudagraph-capture-size "
        "--cuda-graph-max-bs"
    ),
    f"{_GRAPHS} 0": "--enforce-eager --disable-cuda-graph",
    _STEPS: "--decode-log-interval",
    f"{_STEPS} 0": "--disable-log-stats",
    "--kernels": "--attention-backend",
    "--seed": "--random-seed",
    "--lora-modules": "--lora-paths",
    "--max-loras": "--max-loras-per-batch",
    "--http-workers": "--api-server-count",
    "--max-queue": "--max-queued-requests --max-concurrent-requests",
    "--inference-rank-timeout": "--watchdog-timeout",
    "--batch-invariant": "--batch-invariant-mode --enable-deterministic-inference",
    "--enable-sleep-mode": "--enable-memory-saver",
    "--ngram-embeddings-on-host": "--ple-offload-embedding",
}
_REASONS = {
    f"--gpu-memory-utilization bounds all that is taken, {_BUFFER} and {_STATES} its parts in GB": (
        "--mem-fraction-static --cuda-memory-fraction"
    ),
    "no code of a checkpoint is ever run": "--trust-remote-code",
    "a model's files go to the Hugging Face cache, whose place HF_HOME says": "--download-dir",
    "the variable HF_TOKEN has it": "--hf-token",
    "drafts come from the model's own head or from the text: see --drafter": (
        "--speculative-model --speculative-draft-model-path"
    ),
    "tool calls are always read, as --tool-call-parser says": "--enable-auto-tool-choice",
    "what leaves the cache is computed again": "--swap-space",
    "all weights stay on the device": "--cpu-offload-gb",
    "the request's field `priority` decides, then who came first": (
        "--scheduling-policy --schedule-policy"
    ),
    "each rank is a process of this machine, or one of torchrun's": (
        "--distributed-executor-backend"
    ),
    "over several machines torchrun starts the ranks, and has this flag": "--nnodes",
    "grammars are always llguidance's": "--guided-decoding-backend --grammar-backend",
    "/metrics is always served": "--enable-metrics",
    "traces always have the engine's part": "--collect-detailed-traces",
}
# By another engine's flag: ours, or why there is none.
SAME = {name: ours for ours, names in _NAMES.items() for name in names.split()}
NONE = {name: reason for reason, names in _REASONS.items() for name in names.split()}
# Names that are taken, vLLM's and one of SGLang's, and what values are called here; None: the
# flag left out.
ALIASES = tuple(
    """--model --tokenizer --max-model-len --tensor-parallel-size -tp --pipeline-parallel-size -pp
    -dp --max-num-seqs --max-num-batched-tokens --block-size --enable-prefix-caching --enforce-eager
    --disable-log-stats --batch-invariant-mode --enable-memory-saver""".split()
)
VALUES: dict[str, dict[str, str | None]] = {
    "--dtype": {"auto": None, "half": "float16", "float": "float32"},
    "--kv-cache-dtype": {"fp8": "fp8_e4m3"},
    "--max-model-len": {"auto": None, "-1": None},
}
_UNITS = {
    unit: base**power
    for units, base in (("kmg", 1000), ("KMG", 1024))
    for power, unit in enumerate(units, start=1)
}


def read_count(text: str) -> int:
    """A whole number, as vLLM takes it: also 8k (8000), 8K (8192), 25.6k. ValueError for others."""
    parts = re.fullmatch(r"(-?\d+(?:\.\d+)?)([kmgKMG]?)", text)
    number = Decimal(parts[1]) * _UNITS.get(parts[2], 1) if parts else None
    if number is None or number % 1:
        raise ValueError(f"{text!r} is not a whole number")
    return int(number)


def aliases_of(flag: str) -> list[tuple[str, str]]:
    """Names that are taken for one of our flags, each with the value that it stands for, or ""."""
    found = [(name, *SAME[name].partition(" ")) for name in ALIASES]
    return [(name, value) for name, ours, _, value in found if ours == flag]


def elsewhere(flag: str) -> tuple[str | None, str]:
    """(our flag, "") for another engine's; (None, why there is none); (None, "") for an unknown
    one."""
    if flag in NONE:
        return None, NONE[flag]
    if flag not in SAME and flag.startswith("--speculative-"):
        return _DRAFTS, ""
    return SAME.get(flag), ""
