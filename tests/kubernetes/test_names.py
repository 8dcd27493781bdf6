"""What one manifest names is there in another, in /metrics, and on the page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import SimpleNamespace

from megatron_hybrid.server.http.metrics import ServerMetrics
from megatron_hybrid.server.link.messages import CacheSizes, EngineReady
from megatron_hybrid.server.processes.worker import BRIEF_ROUTES
from tests.kubernetes.manifests import (
    ANSWERING,
    FILES,
    OBJECTS,
    OVERLAYS,
    PAGE,
    PICKER,
    PODS,
    ROOT,
    SERVER,
    WORKER,
    Manifest,
    container,
    picker_config,
    the,
)
from tests.server.fake_engine import FakeEngine


def selects(labels: Mapping[str, str], pod: Manifest) -> bool:
    return labels.items() <= pod["metadata"]["labels"].items()


def test_selectors_choose_the_pods_that_answer_and_no_others() -> None:
    selectors = [
        the("Service")["spec"]["selector"],
        *(
            the(kind)["spec"]["selector"]["matchLabels"]
            for kind in ("PodDisruptionBudget", "PodMonitor", "InferencePool")
        ),
    ]
    picker = the("Deployment", PICKER)["spec"]["template"]
    for labels in selectors:
        assert all(selects(labels, pod) for pod in ANSWERING.values())
        assert not selects(labels, WORKER) and not selects(labels, picker)


def test_deployments_choose_their_own_pods_alone() -> None:
    for name in ("megatron-hybrid", PICKER):
        deployment = the("Deployment", name)["spec"]
        labels = deployment["selector"]["matchLabels"]
        assert selects(labels, deployment["template"])
        others = [pod for pod in PODS.values() if pod is not deployment["template"]]
        assert not any(selects(labels, pod) for pod in others)


def test_ports_are_those_of_the_containers() -> None:
    (http,) = container(SERVER)["ports"]
    (port,) = the("Service")["spec"]["ports"]
    (scraped,) = the("PodMonitor")["spec"]["podMetricsEndpoints"]
    assert {port["targetPort"], scraped["port"]} == {http["name"]} == {"http"}
    assert scraped["path"] in BRIEF_ROUTES
    pool = the("InferencePool")["spec"]
    assert pool["targetPorts"] == [{"number": http["containerPort"]}]
    picked = {port["name"]: port for port in the("Service", PICKER)["spec"]["ports"]}["grpc"]
    assert pool["endpointPickerRef"]["port"]["number"] == picked["port"]
    picker = container(the("Deployment", PICKER)["spec"]["template"])
    ports = {port["name"]: port["containerPort"] for port in picker["ports"]}
    for flag, name in (("--grpc-port", "grpc"), ("--grpc-health-port", "grpc-health")):
        assert f"{flag}={ports[name]}" in picker["args"]
    assert picker["readinessProbe"]["grpc"]["port"] == ports["grpc-health"]
    assert picked["targetPort"] == "grpc"


def test_what_is_named_is_there() -> None:
    for pod in PODS.values():
        for volume in pod["spec"]["volumes"]:
            if "persistentVolumeClaim" in volume:
                the("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])
    picker = the("Deployment", PICKER)["spec"]["template"]["spec"]
    the("ServiceAccount", picker["serviceAccountName"])
    (config,) = picker["volumes"]
    (file,) = the("ConfigMap", config["configMap"]["name"])["data"]
    (mount,) = container({"spec": picker})["volumeMounts"]
    assert f"--config-file={mount['mountPath']}/{file}" in container({"spec": picker})["args"]
    pool = the("InferencePool")
    assert f"--pool-name={pool['metadata']['name']}" in container({"spec": picker})["args"]
    the("Service", pool["spec"]["endpointPickerRef"]["name"])
    (rule,) = the("HTTPRoute")["spec"]["rules"]
    for backend in rule["backendRefs"]:
        assert pool["apiVersion"].startswith(backend["group"])
        the(backend["kind"], backend["name"])
    target = the("ScaledObject")["spec"]["scaleTargetRef"]
    assert the(target["kind"], target["name"])["apiVersion"] == target["apiVersion"]
    binding = the("RoleBinding", PICKER)
    the(binding["roleRef"]["kind"], binding["roleRef"]["name"])


def test_what_is_scraped_is_on_the_page() -> None:
    ready = EngineReady(100, 10, (), cache=CacheSizes(block_size=64))
    engine = SimpleNamespace(
        ready=ready,
        states=lambda: {"0": {"status": "ok"}},
        stats_by_engine=lambda: {"0": FakeEngine(10, ()).stats()},
    )
    page = ServerMetrics(engine).page().decode()  # type: ignore[arg-type]
    there = set(re.findall(r"^(\w+:\w+)", page, re.M))
    asked = set(re.findall(r"megatron_hybrid:\w+", "".join(map(str, OBJECTS))))
    assert len(asked) == 5 and asked <= there
    assert 'cache_config_info{block_size="64",num_gpu_blocks="4"} 1.0' in page


def test_pods_name_the_engine_as_the_endpoint_picker_does() -> None:
    (extractor,) = [p for p in picker_config()["plugins"] if p["type"] == "core-metrics-extractor"]
    (engine,) = extractor["parameters"]["engineConfigs"]
    named = {pod["metadata"]["labels"]["llm-d.ai/engine-type"] for pod in ANSWERING.values()}
    assert named == {engine["name"], extractor["parameters"]["defaultEngine"]}
    used = {
        p["pluginRef"]
        for profile in picker_config()["schedulingProfiles"]
        for p in profile["plugins"]
    }
    assert used < {plugin["type"] for plugin in picker_config()["plugins"]}


# ------------------------------------------------------------------------------ the page


def test_the_page_names_every_file_that_is_applied() -> None:
    applied = [
        *OVERLAYS,
        *(f"extras/{path.name}" for path in FILES if path.parent.name == "extras"),
    ]
    for name in applied:
        assert f"configs/kubernetes/{name}" in PAGE, name
    for name in re.findall(r"configs/kubernetes/[\w./-]*\w", PAGE):
        assert (ROOT / name).exists(), name
