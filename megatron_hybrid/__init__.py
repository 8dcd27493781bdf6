"""megatron_hybrid: dynamic-batching inference for hybrid language models, with a prefix cache for
KV blocks and recurrent states.

    from megatron_hybrid import LLM, SamplingParams

    llm = LLM("path/to/model")
    print(llm.generate("Hello", SamplingParams(temperature=0.0))[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.errors import (
    ConfigurationError,
    DeviceLostError,
    InvalidRequestError,
    WeightsError,
)
from megatron_hybrid.request import FinishReason, RequestEvent, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from megatron_hybrid.engine.engine import DynamicInferenceEngine
    from megatron_hybrid.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "ConfigurationError",
    "DeviceLostError",
    "DynamicInferenceEngine",
    "EngineConfig",
    "FinishReason",
    "InvalidRequestError",
    "RequestEvent",
    "RequestOutput",
    "SamplingParams",
    "WeightsError",
]


# torch is imported only by those who compute: the server's front end never does
_LATER = {"LLM": "llm", "DynamicInferenceEngine": "engine.engine"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
