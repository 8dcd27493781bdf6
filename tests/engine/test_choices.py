"""What the engine chooses where flags leave it to it."""

from __future__ import annotations

import pytest

from megatron_hybrid import EngineConfig
from megatron_hybrid.engine.choices import captures_later

CAPTURE = "inference_dynamic_batching_cuda_graph_capture"


@pytest.mark.parametrize(
    ("options", "serves", "expected"),
    [
        ({}, True, True),
        ({}, False, False),  # whoever generates for itself measures steps
        ({"num_speculative_tokens": 3}, True, False),  # and so does what chooses drafts
        ({CAPTURE: "start"}, True, False),
        ({CAPTURE: "serving"}, False, True),
        ({CAPTURE: "serving", "num_speculative_tokens": 3}, True, True),
    ],
)
def test_servers_capture_most_graphs_while_serving(
    options: dict[str, object], serves: bool, expected: bool
) -> None:
    config = EngineConfig.from_mapping(options, "a test")
    assert captures_later(config, serves) == expected
