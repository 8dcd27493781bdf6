"""The files of configs/kubernetes, read once, and what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from megatron_hybrid.commands import COMMANDS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "kubernetes"
DOCKERFILE = (ROOT / "configs" / "docker" / "Dockerfile").read_text()
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
OVERLAYS = ("one-node", "many-nodes", "cpu")  # what is applied with kubectl apply -k
PICKER = "megatron-hybrid-endpoint-picker"

Manifest = dict[str, Any]


def manifests(text: str) -> Iterator[Manifest]:
    yield from (one for one in yaml.safe_load_all(text) if one)


FILES = sorted(path.relative_to(FOLDER) for path in FOLDER.glob("**/*.yaml"))
KUSTOMIZATIONS = {
    path.parent.name: next(manifests((FOLDER / path).read_text()))
    for path in FILES
    if path.name == "kustomization.yaml"
}
OBJECTS = [
    manifest
    for path in FILES
    for manifest in manifests((FOLDER / path).read_text())
    if manifest["kind"] != "Kustomization"
]


def the(kind: str, name: str = "megatron-hybrid") -> Manifest:
    """The one object of this kind and name."""
    (found,) = [o for o in OBJECTS if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


SERVER = the("Deployment")["spec"]["template"]
GROUP = the("LeaderWorkerSet", "megatron-hybrid-nodes")["spec"]["leaderWorkerTemplate"]
LEADER, WORKER = GROUP["leaderTemplate"], GROUP["workerTemplate"]
ANSWERING = {"one node": SERVER, "leader": LEADER}
PODS = {**ANSWERING, "worker": WORKER}


def container(pod: Manifest) -> Manifest:
    (only,) = pod["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def server_flags(pod: Manifest) -> Any:
    """What serve makes of a pod's arguments; a flag that is none would end this."""
    args = container(pod)["args"]
    flags = args[args.index("serve") + 1 :]
    return COMMANDS["serve"].argument_parser().parse_args(flags)


def picker_config() -> Any:
    """The file of the endpoint picker."""
    return yaml.safe_load(the("ConfigMap", PICKER)["data"]["config.yaml"])
