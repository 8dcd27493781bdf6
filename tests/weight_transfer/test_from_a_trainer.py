"""A trainer's weights into a real server's engine over gloo: what answers say of them, what is
refused, and that nothing of the old ones is found."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.training.weight_sender import SendError, WeightSender
from tests.server.running import ServerProcess
from tests.tiny_models import make_tiny_model
from tests.weight_transfer.peers import send_from_two

FLAGS = (
    "--port", "0", "--device", "cpu", "--inference-dynamic-batching-buffer-size-gb", "0.02",
    "--inference-dynamic-batching-block-size", "16", "--weight-transfer-timeout", "20",
    "--enable-sleep-mode", "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8",
)  # fmt: skip
PROMPT = list(range(3, 60))
Weights = dict[str, Tensor]


class Server:
    """One with weights A, and what a fresh engine answers with A and B."""

    def __init__(self, process: ServerProcess, folders: list[Path]) -> None:
        self.url = process.url
        self.weights: list[Weights] = [load_file(one / "model.safetensors") for one in folders]
        self.folders = folders
        self.model = str(folders[0])
        self.expected = [answer_of(one) for one in folders]

    def send(self, path: str, body: dict[str, Any] | None, timeout: float = 60) -> Any:
        headers = {} if body is None else {"Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method="POST")
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)

    def refused(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.send(path, body)
        return caught.value.code, json.load(caught.value)["error"]["message"]

    def answer(self, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
        body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        more = {"return_token_ids": True, **more}
        found: dict[str, Any] = self.send("/v1/completions", {**body, **more})
        return found

    def tokens(self) -> list[int]:
        tokens: list[int] = self.answer()["choices"][0]["token_ids"]
        return tokens


def answer_of(folder: Path, adapter: Path | None = None) -> list[int]:
    llm = LLM(
        str(folder),
        device="cpu",
        inference_dynamic_batching_buffer_size_gb=0.02,
        inference_dynamic_batching_block_size=16,
        enable_lora=adapter is not None,
    )
    if adapter is not None:
        llm.load_adapter("own", adapter)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    name = "" if adapter is None else "own"
    return llm.generate([PROMPT], params, adapter=name, progress=False)[0].token_ids


def write_adapter(folder: Path, weights: Weights) -> Path:
    """A folder as PEFT's, of what attention projects."""
    generator, tensors = torch.Generator().manual_seed(5), dict[str, Tensor]()
    for name, weight in weights.items():
        if "_proj" in name and "self_attn" in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            rows, columns = weight.shape
            tensors[f"{module}.lora_A.weight"] = torch.randn(4, columns, generator=generator)
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, 4, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj"]
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": kinds}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Iterator[Server]:
    folders = [tmp_path_factory.mktemp(name) for name in "ab"]
    for seed, folder in enumerate(folders, start=1):
        make_tiny_model("bamba", folder, seed=seed, vocab_size=512)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((tokenizer_folder / file).read_bytes())
    flags = (*FLAGS, "--load", str(folders[0]), "--weight-folders", str(folders[1]))
    command = ("-m", "megatron_hybrid.cli", "serve", *flags)
    with ServerProcess(*command, OMP_NUM_THREADS="1") as process:
        yield Server(process, folders)


@pytest.fixture(scope="module")
def sender(server: Server) -> Iterator[WeightSender]:
    sender = WeightSender([server.url], seconds=20)
    yield sender
    sender.close()


@pytest.fixture(autouse=True)
def begin_with_a(server: Server, sender: WeightSender) -> None:
    sender.send(server.weights[0], "a")


def test_new_weights_answer_as_a_fresh_engine_and_nothing_old_is_found(
    server: Server, sender: WeightSender
) -> None:
    old, new = server.expected
    assert server.tokens() == old != new
    assert server.answer()["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT)
    sender.send(server.weights[1], "b")
    first = server.answer(return_weight_versions=True)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    (choice,) = first["choices"]
    assert choice["token_ids"] == new
    assert choice["weight_versions"] == [{"version": "b", "start": 0, "end": 8}]
    assert server.answer()["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT)


def test_of_several_processes_that_send_one_asks_and_all_hear(
    server: Server, tmp_path: Path
) -> None:
    told = send_from_two(server.url, server.folders[1] / "model.safetensors", tmp_path)
    assert [one[0] for one in told] == [f"sent {len(server.weights[1])}"] * 2
    assert all("no.such.weight" in one[1] for one in told)
    assert server.tokens() == server.expected[1]


def test_pieces_of_sglangs_trainers_each_tensor_by_itself(
    server: Server, sender: WeightSender
) -> None:
    """Bucket after bucket while the engine is paused, without a begin and an end."""
    server.send("/pause_generation", {"mode": "abort"})
    items = list(server.weights[1].items())
    for start in range(0, len(items), 7):
        part = items[start : start + 7]
        body = {
            "names": [name for name, _ in part],
            "dtypes": [str(tensor.dtype) for _, tensor in part],
            "shapes": [list(tensor.shape) for _, tensor in part],
            "group_name": sender.group_name,
            "flush_cache": False,
            "weight_version": f"b{start}",
        }
        with sender._asking("/update_weights_from_distributed", [body]):
            assert sender._group is not None
            for _, tensor in part:
                sender._group.broadcast(tensor)
    assert server.send("/continue_generation", {})["weight_version"] == f"b{start}"
    assert server.tokens() == server.expected[1]


def test_an_answer_that_goes_on_over_an_update_says_so(
    server: Server, sender: WeightSender
) -> None:
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(server.answer, 400) for _ in range(3)]
        server.send("/pause?mode=keep", {})
        server.send("/resume", {})
        server.send("/pause?mode=keep", {})
        sender.send(server.weights[1], "b")
        server.send("/resume", {})
        answers = [one.result(60)["choices"][0] for one in running]
    spanning = [one for one in answers if "weight_versions" in one]
    for choice in spanning:
        first, second = choice["weight_versions"]
        assert (first["version"], second["version"]) == ("a", "b")
        assert first["start"] == 0 and first["end"] == second["start"]
        assert second["end"] == len(choice["token_ids"]) == 400
        assert choice["token_ids"][:8][: first["end"]] == server.expected[0][: first["end"]]
    assert spanning, "every answer was over before the update"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: {**one, "names": ["nothing"]}, "'nothing' .* has no place"),
        (lambda one: {**one, "shapes": [[3, 3]]}, r"has shape \[3, 3\]; .* makes it"),
        (lambda one: {**one, "dtypes": ["int64"]}, "is torch.int64, but it has no scale"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_overwritten_and_the_trainer_goes_on(
    server: Server, sender: WeightSender, change: Any, message: str
) -> None:
    name = "model.embed_tokens.weight"
    body = {
        "names": [name],
        "dtypes": ["float32"],
        "shapes": [[512, 64]],
        "group_name": sender.group_name,
    }
    wrong = change(body)
    kind = getattr(torch, wrong["dtypes"][0])
    with (
        pytest.raises(SendError, match=f"answered 400.*{message}"),
        sender._asking("/update_weights_from_distributed", [wrong]),
    ):
        assert sender._group is not None
        sender._group.broadcast(torch.zeros(wrong["shapes"][0], dtype=kind))
    assert server.tokens() == server.expected[0]
    assert server.answer()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_bad_bodies_are_refused(server: Server, sender: WeightSender, tmp_path: Path) -> None:
    path = "/update_weights_from_distributed"
    body = {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "unknown"}
    status, words = server.refused(path, body)
    assert status == 400 and "no group 'unknown'" in words and sender.group_name in words
    group = {"group_name": sender.group_name}
    for wrong, said in (
        ({**body, **group, "dtypes": ["float7"]}, "'float7' is no type"),
        ({**body, **group, "dtypes": []}, "1 names, 0 types and 1 shapes"),
        ({**body, **group, "names": []}, "names"),
        ({**body, **group, "shapes": [[-1]]}, "shapes"),
        ({**body, **group, "load_format": "delta"}, "load_format"),
    ):
        status, words = server.refused(path, wrong)
        assert status == 400 and said in words, words
    inits = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 2}
    for change, said in (
        ({"backend": "nccl"}, "no GPU here"),
        ({"backend": "gloo", "rank_offset": 2}, "does not fit a group of 2"),
        ({"backend": "gloo", "master_port": 0}, "master_port"),
        ({"backend": "mpi"}, "backend"),
    ):
        status, words = server.refused("/init_weights_update_group", {**inits, **change})
        assert status == 400 and said in words, words
    status, words = server.refused("/destroy_weights_update_group", {"group_name": "other"})
    assert status == 400 and "'other'" in words
    for route, field in (("/update_weights", "path"), ("/update_weights_from_disk", "model_path")):
        status, words = server.refused(route, {field: str(tmp_path)})
        assert status == 400 and "--weight-folders" in words
    link = tmp_path / "link"
    link.symlink_to("/etc")
    assert (
        server.refused("/update_weights", {"path": f"{server.folders[1]}/../../../etc"})[0] == 400
    )
    assert server.tokens() == server.expected[0]


def test_a_folder_below_those_that_are_allowed(server: Server) -> None:
    body = {"model_path": str(server.folders[1]), "weight_version": "from disk"}
    assert server.send("/update_weights_from_disk", body)["weight_version"] == "from disk"
    with urllib.request.urlopen(f"{server.url}/weight_info", timeout=30) as answer:
        assert json.load(answer) == {"weight_version": "from disk"}
    assert server.tokens() == server.expected[1]


def test_an_update_in_pieces_holds_requests_until_it_is_finished(
    server: Server, sender: WeightSender
) -> None:
    server.send("/start_weight_update", {})
    status, words = server.refused("/resume", {})
    assert status == 409 and "finish that first" in words
    late: list[list[int]] = []
    thread = threading.Thread(target=lambda: late.append(server.tokens()))
    thread.start()
    for name, tensor in server.weights[1].items():
        sender._send([(name, tensor)])
    assert not late
    server.send("/finish_weight_update", {"weight_version": "pieces"})
    thread.join(30)
    assert late == [server.expected[1]]
    status, words = server.refused("/finish_weight_update", {})
    assert status == 400 and "has begun" in words


def test_a_trainer_has_the_memory_meanwhile(server: Server, sender: WeightSender) -> None:
    """In slime's order: pauses and updates come while the caches' memory is given back."""
    assert server.tokens() == server.expected[0]
    server.send("/release_memory_occupation", {})
    late: list[list[int]] = []
    thread = threading.Thread(target=lambda: late.append(server.tokens()))
    thread.start()
    status, words = server.refused("/update_weights", {"path": str(server.folders[1])})
    assert status == 400 and "wake the weights up first" in words
    server.send("/resume_memory_occupation", {"tags": ["weights"]})
    server.send("/pause_generation", {})
    urllib.request.urlopen(f"{server.url}/flush_cache", timeout=30).close()
    sender.send(server.weights[1], "b")
    server.send("/continue_generation", {})
    assert not late
    server.send("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    thread.join(30)
    assert late == [server.expected[1]]


def test_weights_that_were_kept_are_there_again(server: Server) -> None:
    assert server.send("/sleep?level=1", None)["status"] == "ok"
    with urllib.request.urlopen(f"{server.url}/is_sleeping", timeout=30) as answer:
        assert json.load(answer) == {"is_sleeping": True}
    assert server.send("/wake_up?tags=weights&tags=kv_cache", None)["status"] == "ok"
    assert server.tokens() == server.expected[0]
    first = server.answer()["usage"]["prompt_tokens_details"]
    assert first["cached_tokens"] == len(PROMPT)
    assert server.refused("/wake_up?tags=everything", {})[0] == 400


def test_an_adapter_that_a_trainer_has_written(server: Server) -> None:
    folder = write_adapter(server.folders[1] / "adapter", server.weights[0])
    body = {"lora_name": "own", "lora_path": str(folder)}
    assert server.send("/load_lora_adapter", body)["loaded_adapters"] == {"own": str(folder)}
    adapted = answer_of(server.folders[0], folder)
    assert adapted != server.expected[0]
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(server.answer, model=name) for name in ("own", server.model)]
        tokens = [one.result(30)["choices"][0]["token_ids"] for one in both]
    assert tokens == [adapted, server.expected[0]]
    again = server.answer(model="own")
    assert again["model"] == "own" and again["choices"][0]["token_ids"] == adapted
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT)
    server.send("/unload_lora_adapter", {"lora_name": "own"})
    status, words = server.refused("/v1/completions", {"prompt": "x", "model": "own"})
    assert status == 404 and "'own'" in words
