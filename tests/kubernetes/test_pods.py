"""Pods: their flags and image, how they start and end, and what they may do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from megatron_hybrid.server.link.engine_client import STALLED_SECONDS
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.server.processes.worker import BRIEF_ROUTES
from tests.kubernetes.manifests import (
    ANSWERING,
    DOCKERFILE,
    GROUP,
    KUSTOMIZATIONS,
    LEADER,
    PAGE,
    PODS,
    SERVER,
    WORKER,
    Manifest,
    container,
    server_flags,
    the,
)

END_SECONDS = 20  # for a server that has nothing more to answer


def launched(pod: Manifest) -> Any:
    """What torchrun makes of a pod's arguments."""
    from torch.distributed.run import parse_args

    variables = {"GROUP_SIZE": GROUP["size"], "WORKER_INDEX": 1, "LEADER_ADDRESS": "a"}
    text = "\n".join(container(pod)["args"])
    for name, value in variables.items():
        text = text.replace(f"$(LWS_{name})", str(value))
    assert "$" not in text
    return parse_args(text.split("\n"))


def seconds(probe: Mapping[str, Any]) -> int:
    """How long it may fail."""
    return int(probe["periodSeconds"] * probe["failureThreshold"])


# ------------------------------------------------------------------------------ flags and images


def test_arguments_are_our_flags() -> None:
    for pod in ANSWERING.values():
        flags = server_flags(pod)
        assert flags.host == "0.0.0.0" and not hasattr(flags, "port")
        (port,) = container(pod)["ports"]
        assert port["containerPort"] == ServerOptions.port


def test_the_image_is_that_of_our_dockerfile() -> None:
    assert 'ENTRYPOINT ["megatron-hybrid"]' in DOCKERFILE and "command" not in container(SERVER)
    (user,) = re.findall(r"^USER (\d+)$", DOCKERFILE, re.M)
    for pod in PODS.values():
        assert container(pod)["image"] == "megatron-hybrid"  # as kustomizations name it
        who = pod["spec"]["securityContext"]
        assert {who["runAsUser"], who["runAsGroup"], who["fsGroup"]} == {int(user)}
    for overlay in ("one-node", "many-nodes"):
        (image,) = KUSTOMIZATIONS[overlay]["images"]
        assert (image["name"], image["newTag"]) == ("megatron-hybrid", "cuda")


def test_both_pods_of_a_group_start_the_same_ranks() -> None:
    assert container(LEADER)["args"] == container(WORKER)["args"]
    assert container(LEADER)["env"] == container(WORKER)["env"]
    ranks, flags = launched(WORKER), server_flags(LEADER)
    assert container(LEADER)["command"] == ["torchrun"]
    assert (ranks.nnodes, ranks.node_rank, ranks.max_restarts) == (str(GROUP["size"]), 1, 0)
    assert ranks.module and ranks.training_script == "megatron_hybrid.cli"
    gpus = int(ranks.nproc_per_node)
    assert container(WORKER)["resources"]["limits"]["nvidia.com/gpu"] == gpus
    assert flags.tensor_model_parallel_size == gpus
    assert flags.tensor_model_parallel_size * flags.pipeline_model_parallel_size == (
        gpus * GROUP["size"]
    )


# ------------------------------------------------------------------------------ life of a pod


def test_probes_ask_a_route_that_is_served_under_any_load() -> None:
    for pod in ANSWERING.values():
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container(pod)[name]["httpGet"]
            assert asked["path"] in BRIEF_ROUTES and asked["port"] == "http"
            assert container(pod)[name]["timeoutSeconds"] >= 5
    assert not any(name.endswith("Probe") for name in container(WORKER))


def test_a_model_has_half_an_hour_to_load_and_a_rollout_waits_for_it() -> None:
    for pod in ANSWERING.values():
        assert seconds(container(pod)["startupProbe"]) >= 1800
    deadline = the("Deployment")["spec"]["progressDeadlineSeconds"]
    assert deadline > seconds(container(SERVER)["startupProbe"])


def test_a_pod_stops_being_ready_long_before_it_is_killed() -> None:
    for pod in ANSWERING.values():
        ready, alive = container(pod)["readinessProbe"], container(pod)["livenessProbe"]
        # The probe adds its own patience to that of /health, which has none for a busy engine.
        assert seconds(ready) <= 15 < 120 <= seconds(alive) < STALLED_SECONDS


def test_a_pod_has_the_time_that_its_answers_have() -> None:
    for pod in PODS.values():
        waits = int(container(pod)["lifecycle"]["preStop"]["exec"]["command"][-1])
        drains = server_flags(pod).shutdown_timeout
        given = pod["spec"]["terminationGracePeriodSeconds"]
        # Nobody is sent there any more, who was sent there is answered, and it ends.
        assert waits >= 5 and given >= waits + drains + END_SECONDS
    for pod in ANSWERING.values():
        assert container(pod)["livenessProbe"]["terminationGracePeriodSeconds"] > waits
    variables = {one["name"]: one.get("value") for one in container(LEADER)["env"]}
    torchrun = int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    assert LEADER["spec"]["terminationGracePeriodSeconds"] >= waits + torchrun + END_SECONDS
    assert torchrun > server_flags(LEADER).shutdown_timeout


# ------------------------------------------------------------------------------ who may what


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_pods_keep_to_the_restricted_standard(pod: Manifest) -> None:
    spec, rights = pod["spec"], container(pod)["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert rights == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False
    kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
    assert kinds == {"persistentVolumeClaim", "emptyDir"}


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_what_is_written_has_a_volume(pod: Manifest) -> None:
    mounts = {one["mountPath"]: one["name"] for one in container(pod)["volumeMounts"]}
    assert mounts.keys() == {"/cache", "/tmp", "/dev/shm"}
    assert {volume["name"] for volume in pod["spec"]["volumes"]} == set(mounts.values())
    assert set(re.findall(r"=(/cache)\b", DOCKERFILE)) <= mounts.keys()


def test_keys_come_from_a_secret_that_the_page_makes() -> None:
    for pod in PODS.values():
        secrets = [one for one in container(pod)["env"] if "valueFrom" in one]
        assert {one["name"] for one in secrets} == {"MEGATRON_HYBRID_API_KEY", "HF_TOKEN"}
        for one in secrets:
            source = one["valueFrom"]["secretKeyRef"]
            assert f"secret generic {source['name']}" in PAGE
            assert f"--from-literal={source['key']}=" in PAGE
        plain = {one["name"] for one in container(pod)["env"] if "value" in one}
        assert not any(re.search("KEY|TOKEN", name) for name in plain)
