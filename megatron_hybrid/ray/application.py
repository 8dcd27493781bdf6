"""The Serve application: an ingress in front of replicas, which Ray places, watches and scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from megatron_hybrid.ray.arguments import Application, read
from megatron_hybrid.ray.ingress import Ingress
from megatron_hybrid.ray.replica import Replica

ROUTER = "megatron_hybrid.ray.router:SkippingRouter"
POLICY = "megatron_hybrid.ray.scaling:wanted_replicas"
OPEN_AT_AN_INGRESS = 100_000  # the replicas' servers refuse what is too much
HEALTH_SECONDS = 5.0
METRICS_SECONDS = 2.0  # between figures for autoscaling
LOOK_BACK_SECONDS = 10.0


def application(args: Mapping[str, Any]) -> Any:
    """Of `build`."""
    wanted = read(args)
    replicas = _replicas(wanted).bind(wanted)
    ingress = serve.deployment(
        Ingress,
        name="Ingress",
        num_replicas=wanted.ray.ingresses,
        max_ongoing_requests=OPEN_AT_AN_INGRESS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=wanted.shutdown_timeout,
    )
    keeps_host = any(flag.startswith("--allowed-hosts") for flag in wanted.flags)
    return ingress.bind(replicas, controls=wanted.controls, keeps_host=keeps_host)


def _replicas(wanted: Application) -> Any:
    options: dict[str, Any] = {}
    of_a_rank = {"CPU": wanted.ray.cpus, "GPU": wanted.gpus}
    of_a_rank = {name: count for name, count in of_a_rank.items() if count}
    if wanted.ranks > 1:
        options["placement_group_bundles"] = [of_a_rank] * wanted.ranks
        options["placement_group_strategy"] = wanted.ray.placement_strategy
    if wanted.ray.max_replicas:
        options["autoscaling_config"] = AutoscalingConfig(
            min_replicas=wanted.ray.replicas,
            max_replicas=wanted.ray.max_replicas,
            target_ongoing_requests=wanted.ray.target_requests,
            upscale_delay_s=wanted.ray.upscale_delay,
            downscale_delay_s=wanted.ray.downscale_delay,
            metrics_interval_s=METRICS_SECONDS,
            look_back_period_s=LOOK_BACK_SECONDS,
            policy=AutoscalingPolicy(policy_function=POLICY),
        )
    else:
        options["num_replicas"] = wanted.ray.replicas
    return serve.deployment(
        Replica,
        name="Replica",
        max_ongoing_requests=wanted.open_requests,
        ray_actor_options={"num_cpus": wanted.ray.cpus, "num_gpus": wanted.gpus},
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=wanted.shutdown_timeout,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        **options,
    )
