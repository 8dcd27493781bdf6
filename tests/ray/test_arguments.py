"""What `build` takes, without Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kubernetes_validate
import pytest
import yaml

import megatron_hybrid.ray
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.ray.arguments import as_flags, options_of_server, read
from megatron_hybrid.ray.process import rank_environment
from megatron_hybrid.ray.scaling import wanted_replicas

CONFIGS = Path(__file__).parents[2] / "configs" / "ray"
SERVICE = yaml.safe_load((CONFIGS / "ray-service.yaml").read_text())


def test_flags_of_serve_go_to_every_rank_and_rays_stay() -> None:
    found = read(
        {"device": "cpu", "replicas": "2", "max_replicas": 3, "tensor-model-parallel-size": 2}
    )
    assert found.flags == ("--device=cpu", "--tensor-model-parallel-size=2")
    assert (found.ray.replicas, found.ray.max_replicas, found.ranks, found.gpus) == (2, 3, 2, 0)
    assert read({"model": "a/b"}).flags == ("--load=a/b",)
    assert read({}).gpus == 1


def test_values_become_flags() -> None:
    values = {"a_b": True, "c": "false", "d": None, "e": ["x", "y"], "api_key": ["k", "l"], "f": 2}
    wanted = ["--a-b", "--no-c", "--e", "x", "y", "--api-key=k", "--api-key=l", "--f=2"]
    assert as_flags(values) == wanted


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"port": 5000}, "--port can't be given in Ray Serve: Ray Serve listens"),
        ({"data_parallel_size": 2}, "--data-parallel-size can't be given in Ray Serve"),
        ({"replicas": 2, "max_replicas": 1}, "--max-replicas is 1, and --replicas 2"),
        ({"target_requests": 0}, "--target-requests is 0; it must be more than 0"),
        ({"loadd": "x"}, "--loadd is no flag; did you mean --load?"),
        ({"device": "tpu"}, "--device: invalid choice: 'tpu'"),
        ({"placement_strategy": "LOOSE"}, "--placement-strategy: invalid choice"),
        ({"api_key": {"a": 1}}, "api_key has names and values in it"),
        ({"model": "a", "load": "b"}, "Two models are named"),
        (
            {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 4},
            "Ray starts and ends each one by itself",
        ),
    ],
)
def test_what_can_not_be_is_answered_with_a_sentence(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        read(args)
    assert words in str(error.value)


def test_a_file_of_options_is_the_servers(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("device: cpu\nserved_model_name: ours\n")
    found = read({"config": str(file), "replicas": 2})
    assert found.flags == (f"--config={file}",) and found.gpus == 0
    assert options_of_server(found.flags).model_name == "ours"
    file.write_text("replicas: 2\n")
    with pytest.raises(ConfigurationError, match="replicas"):
        read({"config": str(file)})


def test_without_ray_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_hybrid.ray, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="Ray Serve is not installed"):
        megatron_hybrid.ray.build({})


@pytest.mark.parametrize("name", ["cpu.yaml", "gpu.yaml", "ray-service.yaml"])
def test_the_files_are_accepted(name: str) -> None:
    config = yaml.safe_load((CONFIGS / name).read_text())
    if name == "ray-service.yaml":
        config = yaml.safe_load(config["spec"]["serveConfigV2"])
    (application,) = config["applications"]
    assert application["import_path"] == "megatron_hybrid.ray:build"
    assert read(application["args"]).ray.replicas


def test_the_pods_of_the_service_hold_a_replica() -> None:
    cluster = SERVICE["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    for group in (cluster["headGroupSpec"], workers):
        template = {"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]}
        kubernetes_validate.validate(template, "1.37", strict=True)
    (application,) = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])["applications"]
    asked = read(application["args"])
    (container,) = workers["template"]["spec"]["containers"]
    has = container["resources"]["requests"]
    assert int(has["nvidia.com/gpu"]) == asked.ranks * asked.gpus
    assert int(has["cpu"]) >= asked.ranks * asked.ray.cpus
    assert workers["maxReplicas"] == asked.ray.max_replicas


def test_ranks_of_a_node_see_all_of_its_gpus() -> None:
    found = rank_environment(3, 4, "10.0.0.1", 1234, [2, 3], ["0", "5"])
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("3", "4", "1")
    assert (found["LOCAL_WORLD_SIZE"], found["CUDA_VISIBLE_DEVICES"]) == ("2", "0,5")
    assert "CUDA_VISIBLE_DEVICES" not in rank_environment(0, 1, "10.0.0.1", 1234, [0], [])


def test_replicas_follow_what_engines_have_to_do() -> None:
    config = SimpleNamespace(get_target_ongoing_requests=lambda: 4.0)

    def wanted(**metrics: dict[str, float]) -> int:
        return wanted_replicas(SimpleNamespace(aggregated_metrics=metrics, config=config))[0]

    assert wanted() == 1
    assert wanted(running={"a": 3.0, "b": 1.0}, waiting={"a": 0.0, "b": 0.0}) == 1
    assert wanted(running={"a": 4.0, "b": 4.0}, waiting={"a": 9.0, "b": 0.0}) == 5
