"""megatron-core's hybrid model as it is, with the engine's kernels in it, and the engine beside it:
what separates them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_hybrid import LLM, SamplingParams
from megatron_hybrid.training.megatron import EngineKernels, compute_as_engine

VOCABULARY = 160
LENGTHS = (1, 15, 16, 40)
SAMPLED = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=21, ignore_eos=True, logprobs=0)
# Of whose kind the first layer is looked at.
KINDS = {
    "embedding": "VocabParallelEmbedding",
    "norm": "RMSNorm",
    "in_proj": "ColumnParallelLinear",
    "mixer": "MambaMixer",
    "attention": "DotProductAttention",
    "mlp": "MLP",
    "experts": "MoELayer",
}
Rollout = tuple[list[list[int]], list[int], list[Tensor]]  # tokens, prompts' lengths, answers'
Call = tuple[Any, tuple[Any, ...], dict[str, Any], Tensor]  # module, its inputs, its output


def rollout(llm: LLM) -> Rollout:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
    outputs = llm.generate(prompts, SAMPLED, progress=False)
    choices = [(out.prompt_token_ids, choice) for out in outputs for choice in out.choices]
    reported = [torch.tensor([x.logprob for x in choice.logprobs or []]) for _, choice in choices]
    return (
        [[*prompt, *choice.token_ids] for prompt, choice in choices],
        [len(prompt) for prompt, _ in choices],
        reported,
    )


def batched(sequences: list[list[int]]) -> Tensor:
    """[batch, tokens], filled up behind what is shorter."""
    longest = max(map(len, sequences))
    return torch.tensor([[*tokens, *[7] * (longest - len(tokens))] for tokens in sequences])


def logits_of(model: Any, sampled: Rollout, masks: bool = False) -> Tensor:
    """[batch, tokens, vocabulary]. `masks`: for Megatron's own attention."""
    device = next(model.parameters()).device
    tokens = batched(sampled[0]).to(device)
    batch, count = tokens.shape
    mask = None
    if masks:
        mask = torch.ones(count, count, device=device).triu(1).bool().expand(batch, 1, -1, -1)
    positions = torch.arange(count, device=device).expand(batch, -1)
    logits: Tensor = model(tokens, positions, mask)
    return logits


def of_answers(every: Tensor, sampled: Rollout) -> list[Tensor]:
    """Log-probabilities [batch, tokens, vocabulary] of the answers' tokens."""
    found = []
    for row, tokens, start in zip(every, *sampled[:2], strict=True):
        answer = torch.tensor(tokens[start:], device=every.device)
        found.append(row[start - 1 : len(tokens) - 1].gather(1, answer[:, None])[:, 0])
    return found


def apart(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """The largest difference, the same in last places of the largest value, and the share of
    numbers that differ."""
    one, other = (
        torch.cat([part.detach().cpu().flatten() for part in x]) for x in (found, expected)
    )
    assert one.dtype == other.dtype, (one.dtype, other.dtype)
    gap = (one.double() - other.double()).abs()
    assert bool(gap.isfinite().all())
    last_place = 2.0 ** other.double().abs().max().log2().floor() * torch.finfo(other.dtype).eps
    return {
        "largest": float(gap.max()),
        "places": float(gap.max() / last_place),
        "share": float((gap > 0).double().mean()),
    }


def recorded(model: Any, run: Callable[[], Any]) -> dict[str, Call]:
    """One call of a layer of each kind, while `run` runs."""
    found: dict[str, Call] = {}

    def keeping(name: str) -> Any:
        def keep(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            inputs = tuple(x.clone() if isinstance(x, Tensor) else x for x in args)
            found[name] = module, inputs, kwargs, _first(output).clone()

        return keep

    handles = []
    inside = {".local_experts.", ".shared_experts."}
    layers = [m for name, m in model.named_modules() if not any(part in name for part in inside)]
    for name, kind in KINDS.items():
        layer = next(m for m in layers if type(m).__name__ == kind)
        handles.append(layer.register_forward_hook(keeping(name), with_kwargs=True))
    run()
    for handle in handles:
        handle.remove()
    return found


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def gradients(model: Any, logprobs: list[Tensor]) -> Tensor:
    """Of the sum of all, of all parameters behind each other."""
    for parameter in model.parameters():
        parameter.grad = None
    torch.cat(logprobs).sum().backward()
    found = [p.grad for p in model.parameters() if p.requires_grad]
    assert all(grad is not None for grad in found)
    return torch.cat([grad.flatten().double() for grad in found])


def compare(model: Any, engine: Callable[[str], LLM], saved: Callable[[str], str]) -> Any:
    """`saved`: a Hugging Face folder of the model as it is now, by this name; `engine`: of a
    folder."""
    found: dict[str, Any] = {}
    llm = engine(saved("first"))
    sampled = rollout(llm)
    with torch.no_grad():
        layers = recorded(model, lambda: logits_of(model, sampled, masks=True))
    own_logits = logits_of(model, sampled, masks=True)
    as_it_is = of_answers(own_logits.float().log_softmax(-1), sampled)
    found["as it is"] = apart(as_it_is, sampled[2])
    own = gradients(model, as_it_is)
    found["cross entropy"] = cross_entropy(own_logits.detach())
    found["rows of a product"] = rows_of_a_product(layers["in_proj"])

    kernels = compute_as_engine(model)
    with torch.no_grad():
        for name, (module, args, kwargs, output) in layers.items():
            found[name] = apart([output], [_first(module(*args, **kwargs))])
    logprobs = of_answers(kernels.log_softmax(logits_of(model, sampled)), sampled)
    found["with the engine's kernels"] = apart(logprobs, sampled[2])
    grads = gradients(model, logprobs)
    found["gradients"] = float((grads - own).norm() / own.norm())
    # A step of training, and the weights to the engine.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-2 * parameter.abs().mean() * parameter.grad.sign()
    llm.update_weights(saved("second"))
    later = rollout(llm)
    logprobs = of_answers(kernels.log_softmax(logits_of(model, later)), later)
    found["after a step"] = apart(logprobs, later[2])
    old = of_answers(kernels.log_softmax(logits_of(model, sampled)), sampled)
    found["the step"] = apart(old, sampled[2])
    return found


def cross_entropy(logits: Tensor) -> dict[str, float]:
    """Megatron's over parts of the vocabulary, of one part, beside the engine's log_softmax."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    rows = torch.arange(logits[..., 0].numel(), device=logits.device)
    targets = rows.view(logits.shape[:-1]) % logits.shape[-1]
    ours = EngineKernels(logits.device).log_softmax(logits)
    own = ours.gather(-1, targets[..., None])[..., 0]
    return apart([-vocab_parallel_cross_entropy(logits.float(), targets)], [own])


def rows_of_a_product(layer: Call) -> dict[str, float]:
    """Of Megatron's product: each row alone beside all at once."""
    module, (x, *_), _, output = layer
    alone = [module(row[None, None])[0] for row in x.flatten(0, 1)]
    return apart(alone, [row for row in output.flatten(0, 1)])
