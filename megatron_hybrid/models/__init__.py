"""Models: a configuration, a stack of blocks, and weights from a Hugging Face folder."""

from megatron_hybrid.models.config import HybridModelConfig, resolve_dtype
from megatron_hybrid.models.hybrid_model import HybridModel
from megatron_hybrid.models.weights import load_model

__all__ = ["HybridModel", "HybridModelConfig", "load_model", "resolve_dtype"]
