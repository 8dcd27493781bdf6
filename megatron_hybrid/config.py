"""EngineConfig: everything a user can set, under the names of the command-line flags."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hybrid.batch_invariant_flags import check_batch_invariant, from_environment
from megatron_hybrid.cache.eviction import POLICIES
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.rank_layout import ParallelSizes
from megatron_hybrid.settings import (
    Settings,
    flag_of,
    named_values,
    option,
    read_yaml,
    split_values,
)

DTYPES = ("float32", "bfloat16", "float16")
CACHED_STATES_DTYPES = (*DTYPES, "int8")
KV_DTYPES = ("auto", "fp8_e4m3")
HOST_STATES_DTYPES = ("auto", "int8")
QUANTIZATIONS = ("fp8", "fp8_block")
FP8_RECIPES = ("tensorwise", "delayed", "blockwise")
MOST_SPECULATIVE_TOKENS = 32
MOST_WRITE_INTERVAL = 16
PREFIX = "inference_dynamic_batching_"
# Upper limits of whole numbers of which arrays are made, that more would only fill memory with.
MOST_BLOCK_SIZE = 2**20
MOST_REQUESTS = 2**16
MOST_TOKENS = 2**24
MOST_GB = 2**30
MOST_LORAS = 1024
MOST_LORA_RANK = 512


@dataclass(frozen=True)
class EngineConfig(Settings):
    """One engine's settings. Field `a_b` is flag `--a-b` and a key in configs/*.yaml.

    None means that the engine chooses; the start log says what it chose.
    """

    load: str | None = option(
        None,
        "Hugging Face folder or Megatron checkpoint (torch_dist) to load, in a file of options "
        "relative to that file; left out: the reference model that ships with us",
        is_file=True,
    )
    tokenizer_model: str | None = option(
        None,
        "folder with the tokenizer and the end tokens, where --load has none: what Megatron saves",
    )
    load_format: str = option(
        "auto", "auto, or dummy: random weights from the config alone", ("auto", "dummy")
    )
    dtype: str | None = option(
        None,
        "type of weights and activations; left out: the checkpoint's, but float32 on a CPU, "
        "which is slower in 16 bits",
        DTYPES,
    )
    quantization: str | None = option(
        None,
        "round the weights of a checkpoint in 16 or 32 bits while they are read. fp8: a scale for "
        "each output; fp8_block: for each block of 128x128; left out: as the checkpoint has them",
        QUANTIZATIONS,
    )
    ngram_embeddings_on_host: bool = option(
        False,
        "tables of embeddings of n-grams (Qwen4), which may be larger than a GPU's memory, stay in "
        "the host's, pinned; the GPU reads from there the few rows that a step needs",
    )
    device: str = option("auto", "auto: a GPU if there is one", ("auto", "cpu", "cuda"))
    kernels: str = option(
        "auto",
        "auto: the fastest kernels on the device; reference: plain torch, to compare with; "
        "libraries: convolutions by causal-conv1d, Mamba's scans by mamba-ssm, to compare with",
        ("auto", "reference", "libraries"),
    )
    transformer_impl: str = option(
        "local",
        "whose linear layers: local: ours; transformer_engine: NVIDIA's Transformer Engine, of "
        "weights in 16 bits, without the experts' and the head",
        ("local", "transformer_engine"),
    )
    fp8_format: str | None = option(
        None, "with Transformer Engine: products in FP8; left out: in 16 bits", ("e4m3",)
    )
    fp8_recipe: str | None = option(
        None,
        "with --fp8-format: tensorwise: a scale for a weight and for a step's inputs; delayed: "
        "inputs have that of the largest so far; blockwise: for 128x128 weights and 128 inputs; "
        "left out: blockwise, whose answers do not depend on who else is in the step",
        FP8_RECIPES,
    )
    seed: int = option(
        1234,
        "seed of requests that bring none, and of dummy weights",
        least=-(2**63),
        most=2**64 - 1,
    )

    tensor_model_parallel_size: int = option(1, "ranks that each layer is split over", least=1)
    pipeline_model_parallel_size: int = option(1, "stages that the layers are split into", least=1)
    expert_model_parallel_size: int = option(
        1, "ranks that a layer's experts are shared out to", least=1
    )
    expert_tensor_parallel_size: int | None = option(
        None,
        "ranks that each expert is split over; left out: --tensor-model-parallel-size",
        least=1,
    )

    symmetric_memory_all_reduce: bool = option(
        True,
        "sum the activations of tensor-parallel ranks through torch's symmetric memory, where the "
        "GPUs of one host can read one another's memory; else by NCCL",
    )
    moe_token_dispatcher_type: str = option(
        "auto",
        "how tokens reach experts of other replicas' ranks. allgather: everybody gets all tokens, "
        "and nobody waits for counts; alltoall: only who needs them, in steps without a CUDA "
        "graph; auto: alltoall for long prompts where it moves at most half as much",
        ("auto", "allgather", "alltoall"),
    )

    gpu_memory_utilization: float | None = option(
        None,
        "the most of a GPU's memory that this process takes, weights, steps and caches, as a share "
        "of all; left out: what is free",
        most=1,
        metavar="SHARE",
    )
    inference_dynamic_batching_buffer_size_gb: float | None = option(
        None,
        "memory for KV blocks and live states; left out: what is free (on a CPU 1 GB at most)",
        most=MOST_GB,
    )
    inference_dynamic_batching_block_size: int = option(
        64, "tokens in a KV block", least=1, most=MOST_BLOCK_SIZE
    )
    kv_cache_dtype: str = option(
        "auto",
        "type that keys and values are stored in. auto: the model's; fp8_e4m3: 8 bits, so that the "
        "same memory holds twice as many tokens of a model in 16 bits; they are rounded, by the "
        "checkpoint's scales where it has some",
        KV_DTYPES,
    )
    inference_dynamic_batching_max_requests: int | None = option(
        None,
        "requests that run at the same time; left out: up to 256, as memory allows",
        least=1,
        most=MOST_REQUESTS,
    )
    inference_dynamic_batching_max_tokens: int = option(
        8192, "tokens computed in one step", least=1, most=MOST_TOKENS
    )
    inference_dynamic_batching_num_cuda_graphs: int = option(
        16,
        "batch sizes of decodes for which a CUDA graph is captured at start, on a GPU; -1: all "
        "sizes that are worth one; 0: none",
        least=-1,
        least_means="all sizes that are worth one",
    )
    inference_dynamic_batching_cuda_graph_mixed_prefill_count: int = option(
        16,
        "prompts that a graph of prompts beside decodes has room for; 0: only steps of "
        "decodes run from graphs",
        least_means="none",
    )
    inference_dynamic_batching_cuda_graph_capture: str | None = option(
        None,
        "when graphs are captured. start: all before the first request; serving: a few, and the "
        "others between steps and when there is nothing to do; left out: serving by a server "
        "without drafts, else start",
        ("start", "serving"),
    )
    inference_max_seq_length: int | None = option(
        None, "longest prompt and answer together; left out: the model's", least=1
    )
    weight_transfer_timeout: int = option(
        300,
        "how long an update of the weights waits for a trainer that has gone silent",
        least=1,
        most=86_400,
        metavar="SECONDS",
    )
    enable_chunked_prefill: bool | None = option(
        None, "cut prompts into chunks that fit a step; always on with state caching"
    )

    inference_dynamic_batching_prefix_caching: bool = option(
        True, "reuse the KV blocks and states of earlier prompts"
    )
    inference_dynamic_batching_prefix_caching_mamba_gb: float | None = option(
        None,
        "memory for cached recurrent states; 0: none, and then a hybrid skips nothing; left out: "
        "at most 0.25 on a CPU, half of what is free on a GPU",
        least_means="none",
        most=MOST_GB,
    )
    inference_dynamic_batching_prefix_caching_eviction_policy: str = option(
        "replay_cost",
        "which cached state goes first. replay_cost: the one that is cheapest to compute again, "
        "weighed by age; lru: the least recently used; ref_zero: nothing outlives its last user",
        POLICIES,
    )
    inference_dynamic_batching_prefix_caching_exact_ends: bool = option(
        True, "also keep states at the exact end of prompts and answers, off the grid"
    )
    inference_dynamic_batching_prefix_caching_checkpoint_interval: int = option(
        1024,
        "tokens between states that are kept for want of a better place; 0: none",
        least_means="none",
    )
    prefix_caching_host_gb: float = option(
        0.0,
        "memory of the host, of each engine process, for what the device's caches have no room "
        "for: it is fetched before a request that wants it begins. 0: none",
        least_means="none",
        most=MOST_GB,
    )
    prefix_caching_host_kv_dtype: str = option(
        "auto",
        "type of keys and values in memory of the host and below. auto: as on the device, so that "
        "answers are the same; fp8_e4m3: rounded to 8 bits, so that it holds twice as many tokens "
        "of a model in 16 bits",
        KV_DTYPES,
    )
    prefix_caching_host_states_dtype: str = option(
        "auto",
        "the same for recurrent states. int8: with a scale for each column of a head's state, a "
        "quarter of float32",
        HOST_STATES_DTYPES,
    )
    prefix_caching_disk: str | None = option(
        None,
        "folder for what that memory has no room for, and for the next start: files that processes "
        "on this host with the same model share. They are written from memory of the host and read "
        "into it (--prefix-caching-host-gb). Left out: none",
    )
    prefix_caching_disk_gb: float = option(
        0.0, "of all files there; the oldest go first", least_means="none", most=MOST_GB
    )
    prefix_caching_store: str | None = option(
        None,
        "the same in a store of other machines' memory, in place of files: mooncake://HOST:PORT of "
        "Mooncake's master, whose package has to be there. Left out: none",
    )
    role: str = option(
        "both",
        "prefill: compute prompts, and hand over what that leaves to servers that decode; decode: "
        "go on from there (--disaggregation-peers). Both need --prefix-caching-host-gb",
        ("both", "prefill", "decode"),
    )
    disaggregation_listen: str | None = option(
        None,
        "HOST:PORT at which a server with --role prefill hands over, by which the others know it; "
        "each further replica takes the next port. Anybody who reaches it can read what was "
        "computed: a network of your own",
    )
    disaggregation_peers: str | None = option(
        None,
        "HOST:PORT,HOST:PORT...: which a server with --role decode may go on from, and no others",
    )
    num_speculative_tokens: int = option(
        0,
        "guesses of a request's next tokens that a step verifies at most; --drafter says where "
        "they come from. 0: none. Answers are the same",
        least_means="none",
        most=MOST_SPECULATIVE_TOKENS,
    )
    drafter: str = option(
        "auto",
        "where guesses come from. heads: the model's own head for multi-token prediction (mtp.*); "
        "prompt_lookup: the request's own text, where it repeats itself; auto: heads where the "
        "checkpoint has them",
        ("auto", "heads", "prompt_lookup"),
    )
    prompt_lookup_shares_texts: bool = option(
        False,
        "let guesses of prompt lookup come from other requests with the same cache_salt, too, "
        "which may show by how fast an answer comes",
    )
    prefill_checkpoint_mode: str = option(
        "extract",
        "extract: kernels store states inside a chunk; break: chunks end where a state is kept",
        ("extract", "break"),
    )
    mamba_inference_conv_states_dtype: str | None = option(
        None, "type of the convolution's states; left out: the model's", DTYPES
    )
    mamba_inference_ssm_states_dtype: str = option(
        "float32", "type of the recurrent states", DTYPES
    )
    mamba_inference_stochastic_rounding: bool = option(
        False,
        "round states of running requests to float16 up or down by chance, so that what they take "
        "in is right on average; needs --mamba-inference-ssm-states-dtype float16. The chance "
        "comes from --seed, the layer and the position, and is the same in every run",
    )
    mamba_inference_cached_states_dtype: str | None = option(
        None,
        "type of recurrent states that are cached; left out: that of running requests' states, "
        "which is exact. A smaller one holds more of them in the same memory, each rounded once. "
        "int8: with a scale for each column of a head's state",
        CACHED_STATES_DTYPES,
    )
    mamba_inference_state_write_interval: int | None = option(
        None,
        "tokens that a request decodes from one write of its recurrent states to the next; in "
        "between what the states take in is kept, which is much less. Left out: chosen for the "
        "device and the kind of layers; 1: every token",
        least=1,
        most=MOST_WRITE_INTERVAL,
    )
    enable_lora: bool = option(
        False, "take low-rank adapters (LoRA), of which each request may name one"
    )
    max_loras: int = option(
        8,
        "with --enable-lora: adapters on the device at once, also unloaded ones still in use",
        least=1,
        most=MOST_LORAS,
    )
    max_lora_rank: int = option(
        16, "with --enable-lora: the largest rank of an adapter", least=1, most=MOST_LORA_RANK
    )
    lora_experts: bool = option(
        False, "with --enable-lora: room for adapters of experts, too, which takes much memory"
    )
    lora_modules: tuple[str, ...] = option(
        (),
        "adapters to load at the start: folders that PEFT saved, by the names in requests",
        metavar="NAME=DIR",
    )
    enable_return_routed_experts: bool = option(
        False,
        "keep which experts each token was sent to, beside its keys and values, for trainers that "
        "send it to the same ones: requests may ask for them (return_routed_experts)",
    )
    batch_invariant: bool = option(
        from_environment,
        "tokens and log-probabilities of a request have the same bits alone and beside any others, "
        "cold and from the cache, in any chunks, with drafts and without, and as a prompt again; "
        "the variable MEGATRON_HYBRID_BATCH_INVARIANT=1 says the same",
        shown="off",
    )
    enable_sleep_mode: bool = option(
        False,
        "weights and caches lie where their memory can be given back between two uses (sleep, wake "
        "up), for a trainer on the same devices, and taken again at the same addresses",
    )
    inference_logging_step_interval: int = option(
        100, "steps between two lines of the periodic log; 0: none", least_means="none"
    )

    def __post_init__(self) -> None:
        for name in (PREFIX + "buffer_size_gb", "gpu_memory_utilization"):
            size = getattr(self, name)
            if isinstance(size, int | float) and size <= 0:
                raise ConfigurationError(f"{flag_of(name)} is {size!r}; it must be more than 0.")
        super().__post_init__()
        _ = self.parallel_sizes, self.adapter_folders  # which refuse what does not go together
        requests = self.inference_dynamic_batching_max_requests
        tokens = self.inference_dynamic_batching_max_tokens
        if requests is not None and requests > tokens:
            raise ConfigurationError(
                f"{flag_of(PREFIX + 'max_tokens')} is {tokens}; it must be at least "
                f"{flag_of(PREFIX + 'max_requests')}, which is {requests}: every running request "
                "computes one token a step."
            )

        self._check_transformer_engine()
        if self.batch_invariant:
            check_batch_invariant(self)
        states = self.mamba_inference_ssm_states_dtype
        if self.mamba_inference_stochastic_rounding and states != "float16":
            raise ConfigurationError(
                f"--mamba-inference-stochastic-rounding is for states in float16; "
                f"--mamba-inference-ssm-states-dtype is {states}."
            )
        if self.enable_sleep_mode and self.role != "both":
            raise ConfigurationError(
                f"--enable-sleep-mode does not go together with --role {self.role}: others read at "
                "any time what that has computed; leave one out."
            )

    @property
    def transformer_engine_recipe(self) -> str | None:
        """Of its products in FP8; None: in 16 bits, or not by Transformer Engine."""
        return None if self.fp8_format is None else self.fp8_recipe or "blockwise"

    def _check_transformer_engine(self) -> None:
        if self.fp8_recipe is not None and self.fp8_format is None:
            raise ConfigurationError(
                f"--fp8-recipe is {self.fp8_recipe}, but --fp8-format, which it is about, is not "
                "given; --fp8-format e4m3 computes in FP8."
            )
        if self.transformer_impl == "local":
            if self.fp8_format is not None:
                raise ConfigurationError(
                    f"--fp8-format is {self.fp8_format}, but --transformer-impl is local; give "
                    "--transformer-impl transformer_engine, or --quantization fp8 for our own "
                    "layers in FP8."
                )
            return
        for flag, value in (("quantization", self.quantization), ("kernels", self.kernels)):
            if value not in (None, "auto"):
                raise ConfigurationError(
                    f"--transformer-impl is transformer_engine, which does not go together with "
                    f"--{flag} {value}; leave one of them out."
                )

    @property
    def adapter_folders(self) -> dict[str, str]:
        """Those to load at the start, by name."""
        if (self.lora_modules or self.lora_experts) and not self.enable_lora:
            raise ConfigurationError("--lora-modules and --lora-experts need --enable-lora.")
        return named_values("--lora-modules", self.lora_modules)

    @property
    def parallel_sizes(self) -> ParallelSizes:
        """Over how many ranks the model is split, and how."""
        return ParallelSizes(
            self.tensor_model_parallel_size,
            self.pipeline_model_parallel_size,
            self.expert_model_parallel_size,
            self.expert_tensor_parallel_size,
        )

    @classmethod
    def from_mapping(cls, values: dict[str, Any], source: str) -> EngineConfig:
        """From field names, or flags' names without the dashes in front. `source` is for errors."""
        (found,) = split_values(values, (cls,), source)
        return cls(**found)

    @classmethod
    def from_yaml(cls, path: str | Path, **overrides: Any) -> EngineConfig:
        """From a configs/*.yaml file; `overrides` are fields that win over it."""
        (found,) = read_yaml(path, (cls,))
        return cls(**found | overrides)
