#!/usr/bin/env python
"""A loop of reinforcement learning: this process trains, a server beside it rolls out.

The model that ships with us is asked about held-out chats, in sentences that no chat of its
training has, and is right about nine times of ten. Each step samples several answers to new
questions (temperature 1), rewards those that hold what was stated and no other value of the chat,
and takes a step of policy gradients (REINFORCE, each answer against the others of its question).
Questions whose answers are all as good as each other teach nothing and are left out. The trainer
computes log-probabilities in the engine's own modules, under autograd. Its new weights go to the
server by CUDA IPC on a GPU, through a gloo group on a CPU. At both ends other held-out questions
are asked at temperature 0.

Printed of each step: the mean reward, and what separates the trainer's log-probabilities from
those that the server reported while it sampled: the largest difference, and an estimate of the KL
divergence (the mean of r - 1 - log r over the answers' tokens, r the quotient of the
probabilities). With --batch-invariant both are 0, and the exit status is 1 if they are not.

    OMP_NUM_THREADS=1 python examples/rl_on_policy.py --batch-invariant --plot rewards.png
    python examples/rl_on_policy.py --transformers --steps 5 --prompts 8

All other flags are the engine's; the server has them, too. With --enable-sleep-mode it lends the
memory of its caches to each step of the trainer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))  # not in the wheel
from bench.replicas import started  # noqa: E402
from megatron_hybrid.arguments import (  # noqa: E402
    ArgumentParser,
    add_engine_arguments,
    engine_config_from_args,
)
from megatron_hybrid.config import EngineConfig  # noqa: E402
from megatron_hybrid.errors import ConfigurationError  # noqa: E402
from megatron_hybrid.models.checkpoints.folder import ModelFolder  # noqa: E402
from megatron_hybrid.text.tokenizer import Tokenizer  # noqa: E402
from megatron_hybrid.training import TrainableModel  # noqa: E402
from megatron_hybrid.training.weight_sender import WeightSender  # noqa: E402
from reference_model.chats import Message, Question, write_chat  # noqa: E402
from simulation.plots import load_matplotlib  # noqa: E402

CHARACTERS = 120  # of a chat, at least: some 180 tokens


class Task(NamedTuple):
    """A chat up to its question, in token ids, and the question."""

    prompt: list[int]
    question: Question


class Answer(NamedTuple):
    """One of the answers to a task."""

    tokens: list[int]
    logprobs: Tensor  # as the server reported them
    reward: float
    weights: str  # the version


class Step(NamedTuple):
    """What is printed and drawn of one."""

    step: int
    reward: float
    trained: int  # answers
    largest: float  # difference of a log-probability
    divergence: float
    seconds: float


def tasks_of(encode: Callable[[list[Message]], list[int]], seed: str) -> Iterator[Task]:
    """Held-out questions without end, those of one chat behind each other."""
    for number in count():
        options: Any = {"split": "held_out", "open_questions": 2, "unseen_phrasings": True}
        chat = write_chat(f"{seed}/{number}", CHARACTERS, **options)
        for question in chat.open_questions:
            yield Task(encode(chat.prompt(question)), question)


class Server:
    """What a trainer asks of one, over HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, body: dict[str, Any]) -> Any:
        """What it answers."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def roll_out(self, tasks: list[Task], max_tokens: int, **sampling: Any) -> list[Answer]:
        """Of all tasks at once, the `n` answers of each behind each other."""
        body = {
            "input_ids": [task.prompt for task in tasks],
            "sampling_params": {"max_new_tokens": max_tokens, **sampling},
            "return_logprob": True,
        }
        answers = []
        for number, answer in enumerate(self.ask("/generate", body)):
            meta = answer["meta_info"]
            logprobs = torch.tensor([entry[0] for entry in meta["output_token_logprobs"]])
            question = tasks[number // sampling.get("n", 1)].question
            reward = float(question.is_answered_by(answer["text"]))
            answers.append(Answer(answer["output_ids"], logprobs, reward, meta["weight_version"]))
        return answers

    @contextmanager
    def lending_memory(self, lends: bool) -> Iterator[None]:
        """Its caches' memory is free meanwhile, if it `lends`."""
        if lends:
            self.ask("/release_memory_occupation", {"tags": ["kv_cache"]})
        yield
        if lends:
            self.ask("/resume_memory_occupation", {"tags": ["kv_cache"]})


def worth_training(groups: list[list[Answer]]) -> list[int]:
    """The tasks whose answers differ in reward; if there is none, the one that the model is least
    sure of, for what is compared."""
    mixed = [k for k, own in enumerate(groups) if len({one.reward for one in own}) > 1]
    sure = [sum(float(one.logprobs.sum()) for one in own) for own in groups]
    return mixed or [sure.index(min(sure))]


def distance(logprobs: list[Tensor], reported: list[Tensor]) -> tuple[float, float]:
    """The largest difference, and the estimate of the KL divergence."""
    log_ratio = torch.cat(logprobs).detach().cpu().double() - torch.cat(reported).double()
    return float(log_ratio.abs().max()), float((log_ratio.expm1() - log_ratio).mean())


def loss_of(logprobs: list[Tensor], rewards: Tensor) -> Tensor:
    """REINFORCE; rewards: [tasks, answers of each], whose mean is the baseline of a task."""
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten().tolist()
    each = [own.sum() * advantage for own, advantage in zip(logprobs, advantages, strict=True)]
    return -torch.stack(each).sum() / torch.cat(logprobs).numel()


class WithTransformers:
    """Another implementation's log-probabilities of the same weights, for comparison alone."""

    def __init__(self, folder: Path, model: TrainableModel) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        auto: Any = transformers.AutoModelForCausalLM
        self._other = auto.from_pretrained(folder, dtype=torch.float32).to(model.device)
        self._model = model

    @torch.no_grad()
    def logprobs(self, prompts: list[list[int]], answers: list[list[int]]) -> list[Tensor]:
        """As TrainableModel's, without gradients."""
        weights = {name: weight.detach() for name, weight in self._model.weights.items()}
        self._other.load_state_dict(weights, strict=False)  # tied ones are there once
        found = []
        for prompt, tokens in zip(prompts, answers, strict=True):
            fed = torch.tensor([[*prompt, *tokens]], device=self._model.device)
            logits = self._other(fed, use_cache=False).logits[0, len(prompt) - 1 : -1]
            chosen = fed[0, len(prompt) :, None]
            found.append(logits.log_softmax(-1).gather(1, chosen)[:, 0])
        return found


def train(args: argparse.Namespace, config: EngineConfig, server: Server) -> int:
    """The loop; the exit status."""
    model = TrainableModel(config)
    folder = ModelFolder.of(config)
    tokenizer = Tokenizer.load(folder.tokenizer)
    sender = WeightSender([server.url], model.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    other = WithTransformers(folder.path, model) if args.transformers else None
    tasks = tasks_of(tokenizer.encode_chat, f"train/{args.seed}")
    unseen = list(islice(tasks_of(tokenizer.encode_chat, f"test/{args.seed}"), args.test_questions))

    def test() -> float:
        answers = server.roll_out(unseen, args.max_tokens, temperature=0)
        return sum(answer.reward for answer in answers) / len(answers)

    before, steps, version = test(), list[Step](), "0"
    print(f"of {len(unseen)} other held-out questions {before:.3f} are answered at first")
    for number in range(args.steps):
        start = time.perf_counter()
        asked = list(islice(tasks, args.prompts))
        sampling = {"temperature": 1.0, "n": args.samples, "sampling_seed": args.seed + number}
        answers = server.roll_out(asked, args.max_tokens, **sampling)
        assert {answer.weights for answer in answers} == {version}, "not on policy"
        reward = sum(answer.reward for answer in answers) / len(answers)
        groups = [answers[k : k + args.samples] for k in range(0, len(answers), args.samples)]
        used = worth_training(groups)
        prompts = [asked[k].prompt for k in used for _ in range(args.samples)]
        tokens = [answer.tokens for k in used for answer in groups[k]]
        reported = [answer.logprobs for k in used for answer in groups[k]]
        rewards = torch.tensor([[answer.reward for answer in groups[k]] for k in used])
        with server.lending_memory(config.enable_sleep_mode):
            logprobs = model.logprobs(prompts, tokens)
            optimizer.zero_grad()
            loss_of(logprobs, rewards).backward()
            apart = distance(logprobs, reported)
            compared = other and distance(other.logprobs(prompts, tokens), reported)
            optimizer.step()
        version = f"step-{number}"
        sender.send(model.weights, version)
        step = Step(number, reward, len(tokens), *apart, time.perf_counter() - start)
        steps.append(step)
        line = f"step {number}: reward {reward:.3f}; {len(tokens)} answers trained, "
        line += f"off by {step.largest:.3g}, KL {step.divergence:.3g}"
        if compared:
            line += f" (transformers: {compared[0]:.3g}, {compared[1]:.3g})"
        print(f"{line}; {step.seconds:.1f} s", flush=True)
    after = test()
    sender.close()
    farthest = max(step.largest for step in steps)
    fifth = max(1, args.steps // 5)
    ends = [sum(step.reward for step in some) / fifth for some in (steps[:fifth], steps[-fifth:])]
    print(
        f"mean reward of the first {fifth} steps {ends[0]:.3f}, of the last {ends[1]:.3f}; other "
        f"questions at temperature 0: {before:.3f}, then {after:.3f}; trainer and server differed "
        f"by {farthest:.3g} at most"
    )
    if args.plot is not None:
        draw(steps, (before, after), args.plot)
    return int(config.batch_invariant and farthest != 0)


def draw(steps: list[Step], ends: tuple[float, float], path: Path) -> None:
    """Reward and KL divergence by step. `ends`: what other questions gave before and after."""
    pyplot = load_matplotlib()
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), dpi=120)
    numbers = [step.step for step in steps]
    above.plot(numbers, [step.reward for step in steps], "o-", markersize=3, label="of a step")
    above.plot([-1, len(steps)], ends, "s--", label="other questions, temperature 0")
    above.set_ylabel("mean reward")
    above.legend()
    divergences = [step.divergence for step in steps]
    below.plot(numbers, divergences, "o-", markersize=3, clip_on=False)
    below.set_yscale("symlog", linthresh=1e-15)
    below.set_ylim(0, 10 * max([1e-12, *divergences]))
    below.set_ylabel("KL, rollout and trainer")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=24, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="answers of a prompt")
    parser.add_argument("--max-tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--test-questions", type=int, default=300, help="asked at both ends")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a PNG of reward and KL")
    parser.add_argument("--transformers", action="store_true", help="its difference, too")
    parser.add_argument("--seed", type=int, default=0)
    args, rest = parser.parse_known_args()
    least = {"steps": 1, "prompts": 1, "samples": 2, "max_tokens": 1, "test_questions": 2}
    for name, lowest in least.items():
        if (value := getattr(args, name)) < lowest:
            parser.error(f"--{name.replace('_', '-')} is {value}; it can be {lowest} or more.")
    engine = ArgumentParser(prog=parser.prog)
    add_engine_arguments(engine)
    try:
        config = engine_config_from_args(engine.parse_args(rest))
    except ConfigurationError as error:
        parser.error(str(error))
    if args.plot is not None:
        load_matplotlib()  # asks for it before the work
    with started(1, [*rest, "--enable-control-routes"]) as servers:
        return train(args, config, Server(servers.url))


if __name__ == "__main__":
    sys.exit(main())
