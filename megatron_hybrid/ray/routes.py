"""Which replicas answer a route: one, all of them, or whichever has what is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import json

from megatron_hybrid.ray.messages import Asked, Whole
from megatron_hybrid.server.keys import CONTROL_PATHS

# What has a prompt, and the method of the server's Preparation that makes it.
PROMPTED = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
    "/v1/responses": "response",
    "/v1/messages": "messages",
    "/score_tokens": "score",
    "/generate": "generate",
    "/inference/v1/generate": "inference",
}
STORED = "/v1/responses/"  # a replica has its own
METRICS = "/metrics"
ABORTS, RESETS = ("/abort", "/abort_request"), ("/reset_prefix_cache", "/flush_cache")


def has_prompt(asked: Asked) -> bool:
    """Whether replicas can be asked what the request costs."""
    return asked.method == "POST" and asked.route in PROMPTED


def is_control(route: str) -> bool:
    """Whether it stops or changes the engine for everybody."""
    return route in CONTROL_PATHS and route not in RESETS


def asks_all(route: str) -> bool:
    """Whether every replica is to hear of it."""
    return is_control(route) or route in (METRICS, *ABORTS, *RESETS) or route.startswith(STORED)


def as_one(route: str, answers: Sequence[Whole]) -> Whole:
    """The answer to what every replica, at least one, was asked."""
    if route == METRICS:
        return answers[0]._replace(body=merged_metrics(answers))
    good = [one for one in answers if one.status < 400]
    if route.startswith(STORED):  # one of them has it
        return (good or list(answers))[0]
    if route in ABORTS and len(good) == len(answers):  # and one of them had it
        aborted = sum(json.decode(one.body)["aborted"] for one in good)
        return good[0]._replace(body=json.encode({"aborted": aborted}))
    bad = [one for one in answers if one.status >= 400]
    return (bad or good)[0]


def merged_metrics(answers: Sequence[Whole]) -> bytes:
    """The figures of all, each with its replica's name for a label."""
    families: dict[str, list[str]] = {}
    heads: dict[str, list[str]] = {}
    for answer in answers:
        family = ""
        label = f'ray_replica="{answer.replica}"'
        for line in answer.body.decode().splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                if line not in heads.setdefault(family, []):
                    heads[family].append(line)
            elif line:
                name, _, value = line.rpartition(" ")
                base, brace, labels = name.partition("{")
                labels = f"{label},{labels}" if brace else f"{label}}}"
                families.setdefault(family, []).append(f"{base}{{{labels} {value}")
    lines = [line for family in families for line in (*heads.get(family, ()), *families[family])]
    return ("\n".join(lines) + "\n").encode()
