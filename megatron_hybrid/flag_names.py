"""What vLLM, SGLang and others call our flags, for who comes from there. Names that are the same do
not stand here."""

from __future__ import annotations

_LOAD, _TOKENIZER = "--load", "--tokenizer-model"
_TENSOR, _PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_EXPERTS, _REPLICAS = "--expert-model-parallel-size", "--data-parallel-size"
_BATCHING = "--inference-dynamic-batching-"
_REQUESTS, _TOKENS = _BATCHING + "max-requests", _BATCHING + "max-tokens"
_BUFFER, _BLOCK = _BATCHING + "buffer-size-gb", _BATCHING + "block-size"
_STATES = _BATCHING + "prefix-caching-mamba-gb"
_CACHING = _BATCHING + "prefix-caching"
_NO_CACHING = "--no-" + _CACHING.removeprefix("--")
_GRAPHS, _LENGTH = _BATCHING + "num-cuda-graphs", "--inference-max-seq-length"
_DRAFTS = "--num-speculative-tokens"

SAME: dict[str, str] = {
    # vLLM
    "--model": _LOAD,
    "--tokenizer": _TOKENIZER,
    "--max-model-len": _LENGTH,
    "-tp": _TENSOR,
    "--tensor-parallel-size": _TENSOR,
    "-pp": _PIPELINE,
    "--pipeline-parallel-size": _PIPELINE,
    "-dp": _REPLICAS,
    "--enable-expert-parallel": _EXPERTS,
    "--max-num-seqs": _REQUESTS,
    "--max-num-batched-tokens": _TOKENS,
    "--block-size": _BLOCK,
    "--enable-prefix-caching": _CACHING,
    "--no-enable-prefix-caching": _NO_CACHING,
    "--kv-cache-memory-bytes": _BUFFER,
    "--num-gpu-blocks-override": _BUFFER,
    "--mamba-cache-dtype": "--mamba-inference-conv-states-dtype",
    "--mamba-ssm-cache-dtype": "--mamba-inference-ssm-states-dtype",
    "--speculative-config": _DRAFTS,
    "--enforce-eager": _GRAPHS + " 0",
    "--cuda-graph-sizes": _GRAPHS,
    "--cudagraph-capture-sizes": _GRAPHS,
    "--max-cudagraph-capture-size": _GRAPHS,
    "--api-server-count": "--http-workers",
    "--disable-log-stats": "--inference-logging-step-interval 0",
    "--attention-backend": "--kernels",
    # SGLang
    "--model-path": _LOAD,
    "--tokenizer-path": _TOKENIZER,
    "--context-length": _LENGTH,
    "--tp": _TENSOR,
    "--tp-size": _TENSOR,
    "--pp": _PIPELINE,
    "--pp-size": _PIPELINE,
    "--dp": _REPLICAS,
    "--dp-size": _REPLICAS,
    "--ep": _EXPERTS,
    "--ep-size": _EXPERTS,
    "--expert-parallel-size": _EXPERTS,
    "--max-running-requests": _REQUESTS,
    "--max-total-tokens": _BUFFER,
    "--chunked-prefill-size": _TOKENS,
    "--max-prefill-tokens": _TOKENS,
    "--page-size": _BLOCK,
    "--max-mamba-cache-size": _STATES,
    "--mamba-ssm-dtype": "--mamba-inference-ssm-states-dtype",
    "--disable-radix-cache": _NO_CACHING,
    "--radix-eviction-policy": _BATCHING + "prefix-caching-eviction-policy",
    "--disable-cuda-graph": _GRAPHS + " 0",
    "--cuda-graph-max-bs": _GRAPHS,
    "--random-seed": "--seed",
    "--max-queued-requests": "--max-queue",
    "--decode-log-interval": "--inference-logging-step-interval",
    "--watchdog-timeout": "--inference-rank-timeout",
    # Text Generation Inference, llama.cpp
    "--model-id": _LOAD,
    "-m": _LOAD,
    "--num-shard": _TENSOR,
    "--max-concurrent-requests": "--max-queue",
    "--max-batch-prefill-tokens": _TOKENS,
    "--ctx-size": _LENGTH,
    "-c": _LENGTH,
}

_MEMORY = f"what is free is divided; {_BUFFER} and {_STATES} set its parts in GB"
_HUB = "a model is read from a folder, which `hf download NAME --local-dir DIR` fills"
_LORA = "adapters with weights of their own are not supported"
_DRAFT_MODEL = "drafts come from the model's own head or from the text: see --drafter"

NONE: dict[str, str] = {
    "--gpu-memory-utilization": _MEMORY,
    "--mem-fraction-static": _MEMORY,
    "--cuda-memory-fraction": _MEMORY,
    "--kv-cache-dtype": "the cache has the type of the model, which --dtype sets",
    "--quantization": "quantised weights are not supported",
    "-q": "quantised weights are not supported",
    "--trust-remote-code": "no code of a checkpoint is ever run",
    "--revision": _HUB,
    "--download-dir": _HUB,
    "--hf-token": _HUB,
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--lora-paths": _LORA,
    "--speculative-model": _DRAFT_MODEL,
    "--speculative-draft-model-path": _DRAFT_MODEL,
    "--chat-template": "it is read from the tokenizer's folder (chat_template.jinja there)",
    "--enable-auto-tool-choice": "tool calls are always read, as --tool-call-parser says",
    "--swap-space": "what leaves the cache is computed again",
    "--cpu-offload-gb": "all weights stay on the device",
    "--scheduling-policy": "the request's field `priority` decides, then who came first",
    "--schedule-policy": "the request's field `priority` decides, then who came first",
    "--distributed-executor-backend": "torchrun starts the ranks",
    "--nnodes": "torchrun starts the ranks, and has this flag",
    "--guided-decoding-backend": "grammars are always llguidance's",
    "--grammar-backend": "grammars are always llguidance's",
    "--enable-metrics": "/metrics is always served",
}


def elsewhere(flag: str) -> tuple[str | None, str]:
    """(our flag, "") for another engine's; (None, why there is none); (None, "") for an unknown
    one."""
    if flag in NONE:
        return None, NONE[flag]
    if flag not in SAME and flag.startswith("--speculative-"):
        return _DRAFTS, ""
    return SAME.get(flag), ""
