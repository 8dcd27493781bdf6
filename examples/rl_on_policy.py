#!/usr/bin/env python
"""Reinforcement learning that is on policy to the last bit, on the model that ships with us.

The model takes some ways to ask ("I wonder what the code of the garage is.") for statements, and
mostly answers "Noted.". Each step samples several answers of new chats (temperature 1), rewards
those that name the code, and takes a step of policy gradients (REINFORCE, each answer against the
others of its prompt) with log-probabilities that the trainer computes in the engine's own modules,
under autograd. Then the engine gets the new weights, by Hugging Face's names.

Printed of each step: the mean reward, and what separates the trainer's log-probabilities from those
that the engine reported while it sampled: the largest difference, and an estimate of the KL
divergence (the mean of r - 1 - log r over the answers' tokens, r the quotient of the
probabilities). In batch-invariant mode both are 0, and exit with 1 if not; --no-batch-invariant
shows them without it. The same against transformers' forward of the same weights, if it is
installed.

    python examples/rl_on_policy.py
    python examples/rl_on_policy.py --no-batch-invariant --steps 5
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_hybrid import LLM, SamplingParams, reference_model
from megatron_hybrid.training import TrainableModel

PLACES = "garage cellar library museum bakery harbour stadium castle theatre airport".split()
QUESTIONS = (
    "I wonder what the code of the {} is.",
    "The code of the {}, quickly!",
)
Messages = list[dict[str, str]]


class Task(NamedTuple):
    """A chat, and what its answer is to name, and not to name."""

    messages: Messages
    wanted: str
    other: str

    @classmethod
    def draw(cls, rng: random.Random) -> Task:
        """A new one."""
        first, second = rng.sample(PLACES, 2)
        codes = [str(code) for code in rng.sample(range(1000, 10000), 2)]
        stated = f"The code of the {first} is {codes[0]}, and the code of the {second} is"
        messages = [
            {"role": "user", "content": f"{stated} {codes[1]}."},
            {"role": "assistant", "content": "Noted."},
            {"role": "user", "content": rng.choice(QUESTIONS).format(first)},
        ]
        return cls(messages, *codes)

    def reward(self, answer: str) -> float:
        """1 for the right code alone."""
        return float(self.wanted in answer and self.other not in answer)


class Answers(NamedTuple):
    """All answers of a step, those of a prompt behind each other."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    logprobs: list[Tensor]  # as the engine reported them
    rewards: Tensor  # [prompts, answers of each]


def roll_out(llm: LLM, tasks: list[Task], samples: int, max_tokens: int, seed: int) -> Answers:
    """Sampled by the engine."""
    params = SamplingParams(
        temperature=1.0, n=samples, max_tokens=max_tokens, seed=seed, logprobs=0
    )
    outputs = llm.chat([task.messages for task in tasks], params, progress=False)
    choices = [choice for output in outputs for choice in output.choices]
    rewards = [
        [task.reward(choice.text) for choice in output.choices]
        for task, output in zip(tasks, outputs, strict=True)
    ]
    return Answers(
        prompts=[choice.prompt_token_ids for choice in choices],
        tokens=[choice.token_ids for choice in choices],
        logprobs=[
            torch.tensor([entry.logprob for entry in choice.logprobs or []]) for choice in choices
        ],
        rewards=torch.tensor(rewards),
    )


def distance(logprobs: list[Tensor], reported: list[Tensor]) -> tuple[float, float]:
    """The largest difference, and the estimate of the KL divergence."""
    log_ratio = torch.cat(logprobs).detach().double() - torch.cat(reported).double()
    return float(log_ratio.abs().max()), float((log_ratio.expm1() - log_ratio).mean())


def with_transformers(folder: str) -> Callable[[TrainableModel, Answers], list[Tensor]]:
    """Another implementation's log-probabilities, for comparison alone."""
    import transformers

    transformers.logging.set_verbosity_error()
    other: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.no_grad()
    def logprobs(model: TrainableModel, answers: Answers) -> list[Tensor]:
        weights = {name: weight.detach() for name, weight in model.weights.items()}
        other.load_state_dict(weights, strict=False)  # tied ones are there once
        found = []
        for prompt, tokens in zip(answers.prompts, answers.tokens, strict=True):
            logits = other(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
            every = logits[len(prompt) - 1 : -1].log_softmax(-1)
            found.append(every.gather(1, torch.tensor(tokens)[:, None])[:, 0])
        return found

    return logprobs


def loss_of(logprobs: list[Tensor], rewards: Tensor) -> Tensor:
    """REINFORCE; the baseline is the mean reward of the same prompt's answers."""
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
    each = [own.sum() * advantage for own, advantage in zip(logprobs, advantages, strict=True)]
    return -torch.stack(each).sum() / torch.cat(logprobs).numel()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--prompts", type=int, default=4, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="answers of a prompt")
    parser.add_argument("--max-tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--learning-rate", type=float, default=5e-6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-invariant", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()

    llm = LLM(batch_invariant=args.batch_invariant)
    model = TrainableModel(llm.config)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    others = None
    if importlib.util.find_spec("transformers") is not None:
        others = with_transformers(str(reference_model.path()))
    rng, farthest, rewards = random.Random(args.seed), 0.0, []
    print("step  reward   trainer: max |difference|, KL   transformers: the same   seconds")
    for step in range(args.steps):
        start = time.perf_counter()
        tasks = [Task.draw(rng) for _ in range(args.prompts)]
        answers = roll_out(llm, tasks, args.samples, args.max_tokens, seed=args.seed + step)
        logprobs = model.logprobs(answers.prompts, answers.tokens)
        largest, divergence = distance(logprobs, answers.logprobs)
        line = f"{step:4}  {answers.rewards.mean():6.3f}   {largest:22.3g}, {divergence:7.2g}"
        seconds = time.perf_counter() - start
        if others is not None:
            apart = distance(others(model, answers), answers.logprobs)
            line += f"   {apart[0]:15.2g}, {apart[1]:7.2g}"
        start = time.perf_counter()
        optimizer.zero_grad()
        loss_of(logprobs, answers.rewards).backward()
        optimizer.step()
        llm.update_weights(model.weights)
        print(f"{line}   {seconds + time.perf_counter() - start:7.1f}", flush=True)
        farthest = max(farthest, largest)
        rewards.append(float(answers.rewards.mean()))
    tenth = max(1, args.steps // 5)
    first, last = (sum(some) / len(some) for some in (rewards[:tenth], rewards[-tenth:]))
    print(
        f"mean reward of the first {tenth} steps {first:.3f}, of the last {last:.3f}; "
        f"trainer and engine differed by {farthest:.3g} at most"
    )
    return int(args.batch_invariant and farthest != 0)


if __name__ == "__main__":
    sys.exit(main())
