"""Every manifest is valid: against Kubernetes' schemas, and those of the custom resources."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest

from tests.kubernetes.custom_resources import CUSTOM_RESOURCES, ENDPOINT_PICKER_CONFIG
from tests.kubernetes.manifests import (
    FILES,
    FOLDER,
    KUSTOMIZATIONS,
    OBJECTS,
    OVERLAYS,
    PODS,
    Manifest,
    manifests,
    picker_config,
    server_flags,
    the,
)

VERSION = "1.37"  # of Kubernetes; its APIs keep their fields


def check(manifest: Manifest) -> None:
    """Raises for a field that is unknown, missing or of another type."""
    kind = manifest["apiVersion"], manifest["kind"]
    if kind in CUSTOM_RESOURCES:
        jsonschema.validate(manifest, CUSTOM_RESOURCES[kind])
    else:
        kubernetes_validate.validate(manifest, VERSION, strict=True)


@pytest.mark.parametrize("manifest", OBJECTS, ids=lambda o: f"{o['kind']}-{o['metadata']['name']}")
def test_every_manifest_follows_its_schema(manifest: Manifest) -> None:
    check(manifest)


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_templates_of_pods_follow_kubernetes_schema(pod: Manifest) -> None:
    check({"apiVersion": "v1", "kind": "PodTemplate", "template": pod})


def test_how_the_autoscaler_scales_down_follows_kubernetes_schema() -> None:
    scaled = the("ScaledObject")["spec"]
    behavior = scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    spec = {"scaleTargetRef": scaled["scaleTargetRef"], "maxReplicas": 2, "behavior": behavior}
    check({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "spec": spec})


def test_the_schemas_refuse_what_is_not_there() -> None:
    for kind, name in (("Deployment", "megatron-hybrid"), ("InferencePool", "megatron-hybrid")):
        with pytest.raises(jsonschema.ValidationError, match="replica"):
            manifest = the(kind, name)
            check({**manifest, "spec": {**manifest["spec"], "replica": 1}})


def test_the_endpoint_pickers_file_follows_its_schema() -> None:
    jsonschema.validate(picker_config(), ENDPOINT_PICKER_CONFIG)


# ------------------------------------------------------------------------------ kustomize


def test_every_file_is_in_a_kustomization_or_among_the_extras() -> None:
    named = {
        (Path(folder) / name)
        for folder, one in KUSTOMIZATIONS.items()
        for name in one["resources"]
        if name.endswith(".yaml")
    }
    others = {path for path in FILES if path.name != "kustomization.yaml"} - named
    assert {path.parent.name for path in others} == {"extras"}
    assert all((FOLDER / path).is_file() for path in named)
    assert KUSTOMIZATIONS.keys() == {"base", *OVERLAYS}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_makes_valid_manifests(overlay: str) -> None:
    command = ["kubectl", "kustomize", str(FOLDER / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    made = list(manifests(done.stdout))
    for manifest in made:
        check(manifest)
    assert not re.search(r"image: megatron-hybrid$", done.stdout, re.M)
    kinds = {one["kind"] for one in made}
    assert {"Service", "PodDisruptionBudget"} < kinds
    if overlay == "cpu":
        assert "PersistentVolumeClaim" not in kinds and "nvidia.com/gpu:" not in done.stdout
        (deployment,) = [one for one in made if one["kind"] == "Deployment"]
        assert not hasattr(server_flags(deployment["spec"]["template"]), "load")
