"""Adapters of experts: PEFT's answers, whether experts are stacked in its names or single."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from megatron_hybrid import LLM
from megatron_hybrid.errors import ConfigurationError, WeightsError
from megatron_hybrid.models.adapters.peft_adapter import CONFIG, WEIGHTS
from tests.engine.test_lora import ANSWER, OPTIONS, PARAMS, TWO, check, with_adapters
from tests.lora_adapters import EXPERTS, Adapted, make_adapted, with_experts
from tests.models.conftest import random_tokens
from tests.thorough import usually

ADAPTERS = ["", "wide", "narrow", "wide"]


def prompts() -> list[list[int]]:
    return [random_tokens(37, seed=1)] * 3 + [random_tokens(21, seed=2)]


@pytest.fixture(scope="module", params=usually(["qwen3_next"], list(EXPERTS)))
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    folder = tmp_path_factory.mktemp(request.param)
    return make_adapted(request.param, folder, with_experts(request.param, TWO))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_experts_equal_peft(adapted: Adapted, batch_invariant: bool) -> None:
    llm = with_adapters(adapted, lora_experts=True, batch_invariant=batch_invariant)
    for _ in range(2):
        check(adapted, llm, prompts(), ADAPTERS)


def test_bits_are_those_of_a_request_alone(adapted: Adapted) -> None:
    """In batch-invariant mode, also of requests without an adapter beside others with one."""
    llm = with_adapters(adapted, lora_experts=True, batch_invariant=True)

    def bits(prompts: list[list[int]], adapters: list[str]) -> list[list[float]]:
        llm.engine.reset()
        outputs = llm.generate(prompts, PARAMS, adapter=adapters, progress=False)
        return [[one.logprob for one in output.logprobs] for output in outputs]

    together = bits(prompts(), ADAPTERS)
    for prompt, adapter, wanted in zip(prompts(), ADAPTERS, together, strict=True):
        assert bits([prompt], [adapter]) == [wanted]


def test_without_the_flag_they_are_refused(adapted: Adapted) -> None:
    with pytest.raises(WeightsError, match="experts.*--lora-experts"):
        with_adapters(adapted)
    with pytest.raises(ConfigurationError, match="need --enable-lora"):
        LLM(str(adapted.folder), lora_experts=True)


def test_single_experts_are_what_stacked_ones_are(tmp_path: Path) -> None:
    """As PEFT names them where a model has a linear layer for each expert."""
    adapted = make_adapted("jamba", tmp_path, with_experts("jamba", {"wide": TWO["wide"]}))
    folder = adapted.adapters["wide"]
    tensors, config = load_file(folder / WEIGHTS), json.loads((folder / CONFIG).read_text())
    single: dict[str, Tensor] = {}
    for name, values in tensors.items():
        module, _, which = name.rpartition(".lora_")
        if not module.endswith(("experts", "experts.base_layer")):
            single[name] = values
            continue
        experts = module.removesuffix(".base_layer")
        b = tensors[f"{module}.lora_B.weight"]
        gated = len(b) > 64  # the gates and the up projections
        for expert in range(4):
            for part, projection in enumerate(
                ("gate_proj", "up_proj") if gated else ("down_proj",)
            ):
                own = values.unflatten(0, (4, -1))[expert]
                if which.startswith("B"):
                    rows = values.chunk(2)[part] if gated else values
                    own = rows.unflatten(1, (-1, 4))[:, :, expert]
                single[f"{experts}.{expert}.{projection}.lora_{which}"] = own.clone()
    llm = LLM(str(adapted.folder), **OPTIONS, lora_experts=True)
    llm.load_adapter("single", single, config)
    prompt = prompts()[0]
    (output,) = llm.generate([prompt], PARAMS, adapter="single", progress=False)
    assert output.token_ids == adapted.answer(prompt, ANSWER, "wide")


@pytest.mark.parametrize("parameter", EXPERTS["jamba"])
def test_one_of_the_stacked_weights_alone(tmp_path: Path, parameter: str) -> None:
    options = {"r": 4, "lora_alpha": 8, "target_modules": [], "target_parameters": [parameter]}
    adapted = make_adapted("jamba", tmp_path, {"one": options})
    llm = with_adapters(adapted, lora_experts=True)
    check(adapted, llm, prompts()[:2], ["one", ""])
    config = json.loads((adapted.adapters["one"] / CONFIG).read_text())
    tensors = load_file(adapted.adapters["one"] / WEIGHTS)
    short = {name: values[..., :24] for name, values in tensors.items()}
    with pytest.raises(WeightsError, match="has other shapes than the model's experts"):
        llm.load_adapter("short", short, config)


def test_experts_as_older_versions_of_peft_wrote_them(tmp_path: Path) -> None:
    """Before 0.19 A was over their outputs, and B over their inputs."""
    adapted = make_adapted("jamba", tmp_path, with_experts("jamba", {"wide": TWO["wide"]}))
    folder = adapted.adapters["wide"]
    tensors, config = load_file(folder / WEIGHTS), json.loads((folder / CONFIG).read_text())
    for name in list(tensors):
        if "experts" in name and name.endswith("lora_A.weight"):
            other = name.replace("lora_A", "lora_B")
            a = tensors[name].unflatten(0, (4, -1))  # [experts, rank, inputs]
            b = tensors[other].unflatten(1, (-1, 4))  # [outputs, rank, experts]
            tensors[name] = b.permute(2, 1, 0).flatten(0, 1).contiguous()
            tensors[other] = a.permute(2, 1, 0).flatten(1).contiguous()
    llm = LLM(str(adapted.folder), **OPTIONS, lora_experts=True)
    llm.load_adapter("old", tensors, config | {"peft_version": "0.18.1"})
    prompt = prompts()[0]
    (output,) = llm.generate([prompt], PARAMS, adapter="old", progress=False)
    assert output.token_ids == adapted.answer(prompt, ANSWER, "wide")
