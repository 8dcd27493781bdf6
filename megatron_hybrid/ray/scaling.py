"""How many replicas there are to be, from the engines' own queues."""

from __future__ import annotations

import math
from typing import Any


def wanted_replicas(context: Any) -> tuple[int, dict[str, Any]]:
    """Ray's autoscaling policy: as many as it takes for each to have `target_requests`, running and
    waiting. Ray keeps to the bounds and the delays."""
    metrics = context.aggregated_metrics or {}
    requests = sum(sum(metrics.get(name, {}).values()) for name in ("running", "waiting"))
    target = context.config.get_target_ongoing_requests()
    return max(1, math.ceil(requests / target)), {}
