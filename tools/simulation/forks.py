"""Sessions that go on from one text in many ways: rollout groups and tree search."""

from __future__ import annotations

import math
from random import Random

from simulation.parameters import MAX_CONTEXT, Forks
from simulation.sessions import Ask, Session, ask
from simulation.text import GENERATION_PROMPT, Context, Corpus, Tokens


class _Problems:
    """An environment's instruction and a problem of its own."""

    def __init__(self, parameters: Forks, corpus: Corpus, rng: Random) -> None:
        self._parameters = parameters
        self._corpus = corpus
        self._systems = [
            corpus.text(rng, rng.randint(*parameters.system_tokens))
            for _ in range(parameters.environments)
        ]

    def draw(self, rng: Random, number: int) -> Context:
        problem = self._corpus.text(rng, self._parameters.problem.tokens(rng))
        system = Context().message(rng.choice(self._systems))
        return system.message(self._corpus.unique(number), problem)


class RolloutSessions:
    """Samples of one prompt; in some environments every sample then goes on by itself."""

    def __init__(self, parameters: Forks, corpus: Corpus, rng: Random) -> None:
        self._parameters = parameters
        self._corpus = corpus
        self._problems = _Problems(parameters, corpus, rng)

    def __call__(self, rng: Random, number: int) -> Session:
        p = self._parameters
        problem = self._problems.draw(rng, number)
        answers = [self._answer(rng) for _ in range(p.samples)]
        yield [ask(problem, answers, 0)]
        if rng.random() < p.multi_turn_share:
            turns = rng.randint(*p.turns) - 1
            # A stream of random numbers each: which sample ends first must not change the texts.
            streams = [Random(rng.getrandbits(64)) for _ in answers]
            yield [
                self._goes_on(stream, problem.answered(answer), turns)
                for stream, answer in zip(streams, answers, strict=True)
            ]
        elif rng.random() < p.again_share:
            again = [self._answer(rng) for _ in range(p.samples)]
            yield [ask(problem, again, p.feedback_delay.steps(rng))]

    def _goes_on(self, rng: Random, context: Context, turns: int) -> Session:
        p = self._parameters
        for _ in range(turns):
            context = context.message(self._corpus.text(rng, p.feedback.tokens(rng)))
            answer = self._answer(rng)
            if context.length + len(answer) > MAX_CONTEXT - 64:
                return
            yield [ask(context, [answer], p.feedback_delay.steps(rng))]
            context = context.answered(answer)

    def _answer(self, rng: Random) -> Tokens:
        return self._corpus.text(rng, self._parameters.answer.tokens(rng))


class _Node:
    """A text in the tree and how often it was expanded."""

    __slots__ = ("context", "value", "visits")

    def __init__(self, context: Context, value: float) -> None:
        self.context = context
        self.value = value
        self.visits = 0


class TreeSearchSessions:
    """Reasoning that branches: any earlier node may be expanded, at the end of its text."""

    def __init__(self, parameters: Forks, corpus: Corpus, rng: Random) -> None:
        self._parameters = parameters
        self._corpus = corpus
        self._problems = _Problems(parameters, corpus, rng)

    def __call__(self, rng: Random, number: int) -> Session:
        p, corpus = self._parameters, self._corpus
        root = self._problems.draw(rng, number).prefill(GENERATION_PROMPT)
        nodes = [_Node(root, 1.0)]
        delay = 0
        for total in range(1, rng.randint(*p.rounds) + 1):
            stage = []
            for node in self._choose(nodes, total):
                node.visits += 1
                count = rng.randint(*p.children)
                thoughts = [corpus.text(rng, p.thought.tokens(rng)) for _ in range(count)]
                stage.append(Ask(node.context.parts, node.context.ends, tuple(thoughts), delay))
                nodes += [
                    _Node(node.context.prefill(thought), rng.random())
                    for thought in thoughts
                    if rng.random() >= p.leaf_share
                ]
            if not stage:  # every argument has ended or is too long
                return
            yield stage
            delay = p.judge_delay.steps(rng)

    def _choose(self, nodes: list[_Node], total: int) -> list[_Node]:
        """The nodes with the highest upper confidence bounds; ties go to the older one."""
        p = self._parameters
        scale = p.exploration * math.sqrt(math.log(total + 1))
        fits = [n for n in nodes if n.context.length < MAX_CONTEXT - 1_024]
        fits.sort(key=lambda n: n.value + scale / math.sqrt(1 + n.visits), reverse=True)
        return fits[: p.expansions]
