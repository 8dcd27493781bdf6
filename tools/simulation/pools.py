"""How large things are: models' KV and states, and how a pool of bytes is divided."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_hybrid.cache.geometry import STAGED_SLOTS, CacheGeometry
from simulation.parameters import MAX_CONTEXT

KV_BYTES, CONV_BYTES, STATE_BYTES = 2, 2, 4  # an element: bf16 KV and convolution, fp32 state
SCALE_BYTES = 4
PACKED_BYTES = {"int8": 1, "bfloat16": 2}  # an element of a cached state

BLOCK_SIZE = 128
MAX_REQUESTS = 128  # that run at a time
MAX_TOKENS = 8192  # computed in one step; the engine's default
LIVE_SHARE = 0.25  # of a pool, at most, is for the states of running requests

# Candidates for the share of cached states in what live states leave of a pool; each policy is
# reported at its best one. A state of the models below weighs as much as 3,000 to 7,000 tokens.
SPLITS = (0.3, 0.5, 0.7, 0.85, 0.95)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides a model's cache sizes, on one rank."""

    attention_layers: int
    kv_heads: int
    head_dim: int
    recurrent_layers: int
    state_elements: int  # heads x head dimension x state size, a layer
    head_dim_of_states: int  # so many of them share a scale in int8
    conv_channels: int
    conv_width: int
    kernel_chunk: int  # tokens
    attention_width: int  # query heads x head dimension
    parameters: int  # that one token is multiplied with, embeddings left out
    window: int = 0  # tokens that a token sees in some layers; 0: there are none
    window_layers: int = 0  # beside the attention layers above

    @property
    def bytes_per_token(self) -> int:
        """KV of one token."""
        return self.attention_layers * 2 * self.kv_heads * self.head_dim * KV_BYTES

    @property
    def bytes_per_window_token(self) -> int:
        """KV of one token in layers with a sliding window."""
        return self.window_layers * 2 * self.kv_heads * self.head_dim * KV_BYTES

    @property
    def bytes_per_state(self) -> int:
        conv = self.conv_channels * (self.conv_width - 1) * CONV_BYTES
        return self.recurrent_layers * (self.state_elements * STATE_BYTES + conv)

    def bytes_per_packed_state(self, dtype: str) -> int:
        """Of a cached one in a smaller type."""
        conv = self.conv_channels * (self.conv_width - 1) * CONV_BYTES
        scales = self.state_elements // self.head_dim_of_states * SCALE_BYTES
        values = self.state_elements * PACKED_BYTES[dtype]
        return self.recurrent_layers * (values + conv + (scales if dtype == "int8" else 0))


SHAPES = {
    # 52 layers: 24 Mamba2 (128 heads of 64, state 128, 8 groups), 4 attention, 24 MLP
    "nemotron-h-8b": ModelShape(
        attention_layers=4,
        kv_heads=8,
        head_dim=128,
        recurrent_layers=24,
        state_elements=128 * 64 * 128,
        head_dim_of_states=64,
        conv_channels=128 * 64 + 2 * 8 * 128,
        conv_width=4,
        kernel_chunk=128,
        attention_width=32 * 128,
        parameters=7_000_000_000,
    ),
    # 40 layers: 36 Mamba2 (48 heads of 64, state 128, 1 group), 4 attention; experts in each
    "granite-4.0-h-tiny": ModelShape(
        attention_layers=4,
        kv_heads=4,
        head_dim=128,
        recurrent_layers=36,
        state_elements=48 * 64 * 128,
        head_dim_of_states=64,
        conv_channels=48 * 64 + 2 * 128,
        conv_width=4,
        kernel_chunk=256,
        attention_width=12 * 128,
        parameters=1_000_000_000,
    ),
    # 48 layers: 36 gated delta nets (32 value heads, 16 key heads of 128), 12 attention
    "qwen3-next-80b-a3b": ModelShape(
        attention_layers=12,
        kv_heads=2,
        head_dim=256,
        recurrent_layers=36,
        state_elements=32 * 128 * 128,
        head_dim_of_states=128,
        conv_channels=2 * 16 * 128 + 32 * 128,
        conv_width=4,
        kernel_chunk=64,
        attention_width=16 * 256,
        parameters=3_000_000_000,
    ),
    # 24 layers: 13 short convolutions, 6 attention, 5 with a window of 256 tokens; MLP in each
    "lfm3-1.7b": ModelShape(
        attention_layers=6,
        kv_heads=4,
        head_dim=128,
        recurrent_layers=13,
        state_elements=0,
        head_dim_of_states=1,
        conv_channels=2048,
        conv_width=7,
        kernel_chunk=1,
        attention_width=16 * 128,
        parameters=1_460_000_000,
        window=256,
        window_layers=5,
    ),
}


def divide_pool(
    shape: ModelShape,
    pool_bytes: int,
    split: float,
    block_size: int = BLOCK_SIZE,
    cached_dtype: str | None = None,
) -> CacheGeometry:
    """A pool of KV blocks, cached states and live states.

    `split`: the share of what the live states leave that goes to cached states. `cached_dtype`: of
    these, in PACKED_BYTES; None: that of the live ones. Raises ValueError when the pool can't hold
    one request of the longest context and its state.
    """
    bytes_per_block = shape.bytes_per_token * block_size
    sizes = _empty(shape, block_size)
    window_block, of_prompts = sizes.bytes_per_window_block, MAX_TOKENS // block_size + 1
    own_window = sizes.window_quota * window_block
    pool_bytes -= (of_prompts + 1) * window_block  # and the dummy
    live = min(MAX_REQUESTS, int(pool_bytes * LIVE_SHARE) // (shape.bytes_per_state + own_window))
    packed = None if cached_dtype is None else shape.bytes_per_packed_state(cached_dtype)
    staged = 0 if packed is None else min(STAGED_SLOTS, live)
    rest = pool_bytes - (live + staged) * shape.bytes_per_state - live * own_window
    of_state = (packed or shape.bytes_per_state) + sizes.window_of_state * window_block
    cached = int(rest * split) // of_state
    num_blocks = int(rest * (1 - split)) // bytes_per_block
    if live < 1 or num_blocks * block_size < MAX_CONTEXT:
        raise ValueError(
            f"A pool of {pool_bytes / 2**30:.2f} GiB with {split:.0%} for states holds {live} live "
            f"states and KV of {num_blocks * block_size} tokens; it takes 1 and {MAX_CONTEXT}."
        )
    return replace(
        sizes,
        num_blocks=num_blocks,
        max_requests=live,
        num_cached_slots=cached,
        bytes_per_packed_state=packed,
        num_window_blocks=_window_blocks(sizes, live, cached),
    )


def unlimited_pool(
    shape: ModelShape, blocks: int, slots: int, block_size: int = BLOCK_SIZE
) -> CacheGeometry:
    """Room for everything that a trace can leave behind, whatever it costs."""
    sizes = _empty(shape, block_size)
    return replace(
        sizes,
        num_blocks=blocks,
        max_requests=MAX_REQUESTS,
        num_cached_slots=slots,
        num_window_blocks=_window_blocks(sizes, MAX_REQUESTS, slots),
    )


def _empty(shape: ModelShape, block_size: int) -> CacheGeometry:
    """Sizes of a model, and no room."""
    return CacheGeometry(
        block_size=block_size,
        kernel_chunk=shape.kernel_chunk,
        num_blocks=0,
        max_requests=0,
        num_cached_slots=0,
        bytes_per_block=shape.bytes_per_token * block_size,
        bytes_per_state=shape.bytes_per_state,
        window=shape.window,
        bytes_per_window_block=shape.bytes_per_window_token * block_size,
    )


def _window_blocks(sizes: CacheGeometry, requests: int, states: int) -> int:
    """For so many, even if they share nothing, and a step's prompts."""
    if not sizes.has_window:
        return 0
    of_prompts = MAX_TOKENS // sizes.block_size + 1
    return requests * sizes.window_quota + states * sizes.window_of_state + of_prompts
