"""A trainer's log-probabilities beside the engine's that sampled, and its gradients beside those of
transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_hybrid import LLM, EngineConfig, SamplingParams
from megatron_hybrid.errors import ConfigurationError
from megatron_hybrid.training import TrainableModel
from tests.engine.bits import OPTIONS
from tests.thorough import A_THIRD, EVERYTHING, usually
from tests.tiny_models import IN_TRANSFORMERS, make_tiny_model, split_convolutions

REFUSED = ("recurrent_gemma", "rwkv", "xlstm")  # whose recurrences have no formulas for gradients
SOME = ("nemotron_h_moe", "jamba", "qwen3_next", "zamba2", "bailing_hybrid")
LENGTHS = (1, 5, 16, 40, 150)
SOME_LENGTHS = usually((1, 16, 40, 90), LENGTHS)
TOKENS = usually(9, 23)
SAMPLED = SamplingParams(
    temperature=1.0, seed=5, n=2, max_tokens=TOKENS, ignore_eos=True, logprobs=0
)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    pick = np.random.default_rng(7)
    return [pick.integers(1, 160, size=length).tolist() for length in lengths]


def rollout(llm: LLM) -> tuple[list[list[int]], list[list[int]], list[Tensor]]:
    """Prompts, answers and their log-probabilities."""
    outputs = llm.generate(prompts(SOME_LENGTHS), SAMPLED, progress=False)
    choices = [(out.prompt_token_ids, choice) for out in outputs for choice in out.choices]
    reported = [torch.tensor([x.logprob for x in choice.logprobs]) for _, choice in choices]
    return [prompt for prompt, _ in choices], [c.token_ids for _, c in choices], reported


def engine(folder: Path, **options: object) -> LLM:
    return LLM(str(folder), **(OPTIONS | options))


def shares(answers: list[list[int]]) -> list[Tensor]:
    """Some weight of each token in a loss."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(len(answer), generator=generator) for answer in answers]


@A_THIRD
@pytest.mark.parametrize(
    "family", usually(SOME, [name for name in IN_TRANSFORMERS if name not in REFUSED])
)
def test_log_probabilities_are_those_of_the_rollout_and_gradients_those_of_transformers(
    family: str, tmp_path: Path
) -> None:
    make_tiny_model(family, tmp_path)
    llm = engine(tmp_path)
    model = TrainableModel(llm.config)
    for turn in range(2):  # the second time with other weights
        asked, answers, reported = rollout(llm)
        found = model.logprobs(asked, answers)
        for own, theirs in zip(found, reported, strict=True):
            assert torch.equal(own.detach(), theirs)
        if turn and not EVERYTHING:
            break
        weight = shares(answers)
        torch.cat([own * w for own, w in zip(found, weight, strict=True)]).sum().backward()
        expected = gradients_of_transformers(tmp_path, model, asked, answers, weight)
        for name, own in model.weights.items():
            grad = expected[name]
            if not own.requires_grad:
                assert "bias" in name
                continue
            assert own.grad is not None, name
            scale = float(grad.abs().max())
            torch.testing.assert_close(own.grad, grad, rtol=2e-3, atol=2e-4 * scale, msg=name)
        with torch.no_grad():
            for own in model.parameters():
                own -= 1e-3 * own.grad.sign()
                own.grad = None
        assert llm.update_weights(model.weights) == turn + 1


def gradients_of_transformers(
    folder: Path,
    model: TrainableModel,
    asked: list[list[int]],
    answers: list[list[int]],
    weight: list[Tensor],
) -> dict[str, Tensor]:
    """By the names of a checkpoint, which are not always those of transformers' modules."""
    tensors = {name: w.detach().contiguous() for name, w in model.weights.items()}
    known = load_file(folder / "model.safetensors")
    save_file(known | tensors, folder / "model.safetensors", {"format": "pt"})
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, buffer in hf.named_buffers():  # transformers 5.24 sets the last of ZAYA's to -1
        if name.endswith("balancing_biases"):
            buffer.copy_(known[name])
    for prompt, answer, w in zip(asked, answers, weight, strict=True):
        logits = hf(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0]
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        (logprobs.gather(1, torch.tensor(answer)[:, None])[:, 0] * w).sum().backward()
    for parameter in hf.parameters():
        if parameter.grad is not None:
            parameter.data = parameter.grad
    hf.save_pretrained(folder / "gradients")
    if hf.config.model_type == "olmo_hybrid":
        split_convolutions(folder / "gradients" / "model.safetensors")
    return load_file(folder / "gradients" / "model.safetensors")


@pytest.mark.parametrize("family", REFUSED)
def test_models_without_formulas_are_refused(family: str, tmp_path: Path) -> None:
    make_tiny_model(family, tmp_path)
    with pytest.raises(ConfigurationError, match=f"of type {family} .* served, not trained"):
        TrainableModel(EngineConfig(load=str(tmp_path)))


def test_gradients_of_several_passes_add_up(tmp_path: Path) -> None:
    make_tiny_model("bamba", tmp_path)
    model = TrainableModel(engine(tmp_path).config)
    answers = [prompt[::-1] for prompt in prompts()]
    torch.cat(model.logprobs(prompts(), answers)).sum().backward()
    whole = {name: weight.grad.clone() for name, weight in model.weights.items()}
    for weight in model.parameters():
        weight.grad = None
    each = [model.logprobs([p], [a])[0] for p, a in zip(prompts(), answers, strict=True)]
    with torch.no_grad():
        alone = model.logprobs(prompts()[:1], answers[:1])[0]
    assert torch.equal(alone, each[0].detach()) and not alone.requires_grad
    torch.cat(each).sum().backward()
    for name, weight in model.weights.items():
        torch.testing.assert_close(weight.grad, whole[name], rtol=1e-3, atol=1e-3, msg=name)


def test_gradients_are_those_of_finite_differences(tmp_path: Path) -> None:
    make_tiny_model("qwen3_5", tmp_path)
    model = TrainableModel(engine(tmp_path).config)
    answers = [prompt[::-1] for prompt in prompts()]

    def loss() -> Tensor:
        return torch.cat(model.logprobs(prompts(), answers)).mean()

    loss().backward()
    generator = torch.Generator().manual_seed(2)
    along = [torch.randn(w.shape, generator=generator) * w.abs().mean() for w in model.parameters()]
    slope = sum((w.grad * d).sum().item() for w, d in zip(model.parameters(), along, strict=True))
    values, step = [], 1e-3
    for sign in (1, -2):
        with torch.no_grad():
            for weight, direction in zip(model.parameters(), along, strict=True):
                weight += sign * step * direction
            values.append(loss().item())
    assert (values[0] - values[1]) / (2 * step) == pytest.approx(slope, rel=0.02)


def test_without_the_mode_a_trainer_computes_other_bits(tmp_path: Path) -> None:
    make_tiny_model("bamba", tmp_path)
    llm = engine(tmp_path, batch_invariant=False)
    asked, answers, reported = rollout(llm)
    models = [TrainableModel(llm.config), TrainableModel(engine(tmp_path).config)]
    found = [torch.cat(model.logprobs(asked, answers)) for model in models]
    for logprobs in found:
        gap = float((logprobs.detach() - torch.cat(reported)).abs().max())
        assert 0 < gap < 1e-4
        logprobs.sum().backward()
    for own, other in zip(*(model.parameters() for model in models), strict=True):
        scale = own.grad.abs().max().item()
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-4 * scale)


def test_sixteen_bits_and_keys_in_fp8_have_the_same_bits_too(tmp_path: Path) -> None:
    make_tiny_model("bamba", tmp_path)
    llm = engine(tmp_path, dtype="bfloat16", kv_cache_dtype="fp8")
    model = TrainableModel(llm.config)
    asked, answers, reported = rollout(llm)
    found = torch.cat(model.logprobs(asked, answers))
    assert torch.equal(found.detach(), torch.cat(reported))
    found.sum().backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    make_tiny_model("llama", tmp_path)
    config = engine(tmp_path, batch_invariant=False, quantization="fp8").config
    with pytest.raises(ConfigurationError, match="not quantised"):
        TrainableModel(config)
