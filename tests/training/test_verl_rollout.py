"""examples/rl/verl_rollout.py before a real server on a CPU, by the calls that verl 0.9.1 makes in
its order. Where Ray and verl are installed they are the real ones (docs/rl.md says how), else the
doubles in verl_doubles.py."""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import os
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_hybrid import LLM, SamplingParams, reference_model
from tests.server.running import ROOT
from tests.thorough import thorough
from tests.training import verl_doubles

EXAMPLES = ROOT / "examples" / "rl"
MODULES = ("verl_rollout", "verl_words", "rollout_server")
IS_REAL = find_spec("ray") is not None and find_spec("verl") is not None
LONG = 40  # tokens, of an answer that is cut off
PROMPT = list(range(40, 100))
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
FLAGS = {"device": "cpu", "inference_dynamic_batching_buffer_size_gb": 0.05}
FLAGS |= {"gpu_memory_utilization": None}
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def ours() -> Iterator[Any]:
    """The module verl_rollout, as verl imports it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setenv("RANK", "0")
        if IS_REAL:
            import ray

            paths = (str(EXAMPLES), str(ROOT), os.environ.get("PYTHONPATH", ""))
            monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
            monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "verl_rollout")
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        else:
            verl_doubles.install(monkeypatch)
        yield importlib.import_module("verl_rollout")
        for name in MODULES:
            sys.modules.pop(name)
        if IS_REAL:
            ray.shutdown()


@pytest.fixture(scope="module")
def make_config(ours: Any) -> Callable[..., Any]:
    def make(**changes: Any) -> Any:
        usual = {"name": "megatron_hybrid", "tensor_model_parallel_size": 1, "dtype": "float32"}
        usual |= {"prompt_length": 64, "response_length": 8, "load_format": "safetensors"}
        return ours.RolloutConfig(**{**usual, **changes})

    return make


@pytest.fixture(scope="module")
def weights() -> list[Weights]:
    """The model's, and those of two steps of a trainer."""
    generator = torch.Generator().manual_seed(0)
    first = load_file(reference_model.path() / "model.safetensors")

    def moved(weight: Tensor) -> Tensor:
        noise = torch.randn(weight.shape, generator=generator)
        return weight + (0.3 * noise * weight.float().abs().mean()).to(weight.dtype)

    second = {name: moved(weight) for name, weight in first.items()}
    return [first, second, {name: moved(weight) for name, weight in second.items()}]


@pytest.fixture(scope="module")
def expected(weights: list[Weights]) -> list[list[int]]:
    """What an engine of its own answers with each of them."""
    llm = LLM(device="cpu", inference_dynamic_batching_buffer_size_gb=0.05)
    params, found = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), []
    for one in weights:
        llm.update_weights(one)
        found.append(llm.generate([PROMPT], params, progress=False)[0].token_ids)
    assert len({tuple(one) for one in found}) == len(weights)
    return found


class Trainer:
    """What verl has of a replica: itself, and the adapter of its first rank."""

    def __init__(self, ours: Any, config: Any, mode: str) -> None:
        model = ours.HFModelConfig(path=str(reference_model.path()))
        # As get_rollout_replica_class and get_rollout_class find them.
        self.replica = ours.RolloutReplicaRegistry.get("megatron_hybrid")(0, config, model)
        module, _, name = ours._ROLLOUT_REGISTRY["megatron_hybrid", "async"].rpartition(".")
        kind = getattr(importlib.import_module(module), name)
        self.adapter = kind(config=config, model_config=model, device_mesh=None, replica_rank=0)
        self.replica.rollout_mode = ours.RolloutMode(mode)
        self.replica.workers = [worker()]

    def generate(self, prompt: list[int] = PROMPT, **params: Any) -> Coroutine[Any, Any, Any]:
        """As LLMServerClient."""

        async def answer() -> Any:
            return await self.replica.server_handle.generate.remote(
                request_id="request",
                prompt_ids=prompt,
                sampling_params={**GREEDY, "ignore_eos": True, "logprobs": True, **params},
                image_data=None,
                video_data=None,
            )

        return answer()

    async def generated(self, number: int) -> None:
        """Until there are so many more tokens."""

        def count() -> int:
            url = f"http://{self.replica._server_address}/stats"
            with urllib.request.urlopen(url, timeout=30) as answer:
                found: int = json.load(answer)["engine"]["generated_tokens"]
                return found

        before = await asyncio.to_thread(count)
        while await asyncio.to_thread(count) < before + number:
            await asyncio.sleep(0.05)

    async def end(self) -> None:
        if self.adapter._sender is not None:
            await asyncio.to_thread(self.adapter._sender.close)
        await self.replica.servers[0].shutdown.remote()
        with pytest.raises(OSError):
            urllib.request.urlopen(f"http://{self.replica._server_address}/health", timeout=5)


def worker() -> Any:
    """Of verl's, beside a replica: it says where it is."""
    if not IS_REAL:
        return verl_doubles.Handle(object())
    import ray

    class Worker:
        pass

    return ray.remote(Worker).remote()


def run(ours: Any, config: Any, mode: str, scenario: Callable[[Trainer], Any]) -> None:
    async def whole() -> None:
        trainer = Trainer(ours, config, mode)
        await trainer.replica.launch_servers()
        try:
            await scenario(trainer)
        finally:
            await trainer.end()

    asyncio.run(whole())


async def received(weights: Weights) -> AsyncIterator[tuple[str, Tensor]]:
    """As a checkpoint engine yields them: parts of one buffer, which is filled again."""
    buffer = torch.empty(max(one.nbytes for one in weights.values()) + 8, dtype=torch.uint8)
    for name, weight in weights.items():
        part = buffer[: weight.nbytes].view(weight.dtype).view(weight.shape)
        yield name, part.copy_(weight)
        buffer.fill_(0xFF)


def test_a_trainer_on_the_same_device(
    ours: Any,
    make_config: Callable[..., Any],
    weights: list[Weights],
    expected: list[list[int]],
) -> None:
    """Generate, sleep, new weights while the rest sleeps, wake up: as ActorRolloutRefWorker."""
    config = make_config(engine_kwargs={"megatron_hybrid": FLAGS})

    async def scenario(trainer: Trainer) -> None:
        first = await trainer.generate()
        assert first.token_ids == expected[0] and first.stop_reason == "completed"
        assert len(first.log_probs) == 8 and all(one <= 0 for one in first.log_probs)
        assert first.extra_fields["global_steps"] is None
        again = await trainer.generate(logprobs=False)
        assert again.log_probs is None and again.extra_fields["num_cached_tokens"] == len(PROMPT)
        for step in (1, 2):
            await trainer.replica.sleep()
            await trainer.adapter.resume(tags=["weights"])
            await trainer.adapter.update_weights(
                iter(weights[step].items()),
                peft_config=None,
                base_sync_done=True,
                global_steps=step,
            )
            await trainer.adapter.resume(tags=["kv_cache"])
            new = await trainer.generate()
            assert new.token_ids == expected[step]
            fields = new.extra_fields
            assert fields["global_steps"] == fields["min_global_steps"] == step
            assert fields["num_cached_tokens"] == 0
        await trainer.adapter.release()
        waiting = asyncio.create_task(trainer.generate())
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await trainer.adapter.resume(tags=["weights", "kv_cache"])
        await trainer.adapter.update_weights(iter(weights[0].items()), global_steps=3)
        assert (await waiting).token_ids == expected[0]
        with pytest.raises(NotImplementedError, match="lora.merge=True"):
            await trainer.adapter.update_weights(iter(()), peft_config={"r": 8}, global_steps=4)
        with pytest.raises(NotImplementedError, match="delta_flush"):
            await trainer.adapter.update_weights(iter(()), wire_format="delta_flush")

    run(ours, config, "hybrid", scenario)


@thorough  # http/tokens/test_rollouts_of_a_model.py
def test_a_trainer_elsewhere_goes_on_with_what_was_aborted(
    ours: Any,
    make_config: Callable[..., Any],
    weights: list[Weights],
    expected: list[list[int]],
) -> None:
    """Abort, release the caches, new weights, resume: as CheckpointEngineManager; then the rest of
    each answer, as FullyAsyncLLMServerClient."""
    config = make_config(engine_kwargs={"megatron_hybrid": FLAGS}, response_length=LONG)

    async def scenario(trainer: Trainer) -> None:
        replica = trainer.replica
        begun = [asyncio.create_task(trainer.generate(max_tokens=LONG)) for _ in range(3)]
        await trainer.generated(2)
        await replica.abort_all_requests(reject_request=False)
        parts = await asyncio.gather(*begun)
        for part in parts:
            assert part.stop_reason == "aborted" and 0 < len(part.token_ids) < LONG
            assert len(part.log_probs) == len(part.token_ids)
        late = asyncio.create_task(trainer.generate(max_tokens=8))
        await replica.release_kv_cache()
        await trainer.adapter.update_weights(
            received(weights[1]), global_steps=5, wire_format="named_tensors"
        )
        await replica.resume_kv_cache()
        await asyncio.sleep(0.5)
        assert not late.done(), "the pause holds until resume_generation"
        await replica.resume_generation()
        assert (await late).token_ids == expected[1]
        begin = parts[0].token_ids
        rest = await trainer.generate(PROMPT + begin, max_tokens=LONG - len(begin))
        assert rest.stop_reason == "completed" and len(rest.token_ids) == LONG - len(begin)
        assert rest.extra_fields["min_global_steps"] == 5

        cut = asyncio.create_task(trainer.generate(max_tokens=LONG))
        await trainer.generated(1)
        await replica.abort_all_requests(reject_request=True)
        assert (await cut).stop_reason == "aborted"
        turned_away = await asyncio.wait_for(trainer.generate(), 5)
        assert (turned_away.token_ids, turned_away.stop_reason) == ([], "aborted")
        await replica.resume_generation()

        await replica.sleep()  # a standalone server keeps its weights
        await replica.wake_up()
        await replica.clear_kv_cache()
        last = await trainer.generate(max_tokens=8)
        assert last.token_ids == expected[1] and last.extra_fields["num_cached_tokens"] == 0
        with pytest.raises(Exception, match="typical_p"):
            await trainer.generate(typical_p=0.5)

    run(ours, config, "standalone", scenario)


def test_what_cannot_be_is_said_before_anything_starts(
    ours: Any, make_config: Callable[..., Any]
) -> None:
    flags = importlib.import_module("verl_words").server_flags
    config = make_config(data_parallel_size=2, tensor_model_parallel_size=4)
    with pytest.raises(NotImplementedError, match="for every 4 GPUs"):
        flags(config, "model", 0, False)
    model = ours.HFModelConfig(path=str(reference_model.path()))
    wide = ours.Replica(0, make_config(tensor_model_parallel_size=4), model, gpus_per_node=2)
    with pytest.raises(NotImplementedError, match="on 2 nodes"):
        asyncio.run(wide.launch_servers())


def test_experts_are_asked_for_and_read_as_the_server_has_them(
    ours: Any, make_config: Callable[..., Any]
) -> None:
    words = importlib.import_module("verl_words")
    for asks in (False, True):
        config = make_config(enable_rollout_routing_replay=asks)
        flags = words.server_flags(config, "model", 0, False)
        assert flags["enable_return_routed_experts"] is asks
        assert words.generate_body(config, PROMPT, {}, "r")["return_routed_experts"] is asks
    ids = torch.arange(10 * 4 * 3, dtype=torch.int32).reshape(10, 4, 3).numpy()
    meta: dict[str, Any] = {"prompt_tokens": 6, "completion_tokens": 5, "weight_version": "0"}
    meta |= {"weight_versions": [], "finish_reason": {"type": "stop", "matched": 2}}
    answer = {"output_ids": [1] * 5, "meta_info": meta}
    assert words.output_of(answer, 4)["routed_experts"] is None  # aborted before it began
    meta["routed_experts"] = base64.b64encode(ids.tobytes()).decode()
    assert (words.output_of(answer, 4)["routed_experts"] == ids).all()


@pytest.mark.parametrize(
    ("mode", "tags", "keeps"),
    [
        ("hybrid", ["weights", "kv_cache"], False),  # new ones will come
        ("colocated", ["weights", "kv_cache"], True),
        ("standalone", ["kv_cache"], True),
    ],
)
def test_what_sleeps_depends_on_who_brings_weights(
    ours: Any, make_config: Callable[..., Any], mode: str, tags: list[str], keeps: bool
) -> None:
    asked = []

    class Recorder(ours.Server):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            self._config, self._mode = config, ours.RolloutMode(mode)

        async def _ask(self, path: str, **body: Any) -> None:
            asked.append((path, body))

    asyncio.run(Recorder(make_config()).sleep())
    assert asked == [("/release_memory_occupation", {"tags": tags, "keep_weights": keeps})]
    asyncio.run(Recorder(make_config(free_cache_engine=False)).sleep())
    assert len(asked) == 1


def test_a_server_that_ends_at_its_start_says_why(
    ours: Any, make_config: Callable[..., Any]
) -> None:
    config = make_config(engine_kwargs={"megatron_hybrid": {"no_such_flag": 1}})
    trainer = Trainer(ours, config, "hybrid")
    with pytest.raises(Exception, match="no-such-flag"):
        asyncio.run(trainer.replica.launch_servers())


def test_every_flag_is_one_of_serves(
    ours: Any, make_config: Callable[..., Any], tmp_path: Path
) -> None:
    from megatron_hybrid.ray.arguments import as_flags
    from megatron_hybrid.server.cli import argument_parser

    config = make_config(
        load_format="dummy_hf", max_model_len=512, max_num_seqs=32, enforce_eager=True,
        enable_prefix_caching=False, quantization="fp8", tensor_model_parallel_size=2,
        engine_kwargs={"megatron_hybrid": {"kv_cache_dtype": "fp8_e4m3"}},
    )  # fmt: skip
    found = importlib.import_module("verl_words").server_flags(config, str(tmp_path), 3, True)
    args = vars(argument_parser().parse_args(as_flags(found)))
    assert args["load"] == str(tmp_path) and args["load_format"] == "dummy"
    assert args["seed"] == config.seed + 3 and args["gpu_memory_utilization"] == 0.5
    assert args["enable_sleep_mode"] is True and args["tensor_model_parallel_size"] == 2
    assert args["inference_dynamic_batching_prefix_caching"] is False
    assert args["inference_dynamic_batching_num_cuda_graphs"] == 0
    assert args["inference_dynamic_batching_max_requests"] == 32
    assert args["kv_cache_dtype"] == "fp8_e4m3" and args["quantization"] == "fp8"
