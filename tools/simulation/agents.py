"""Sessions of programs: a loop of tool calls whose context grows, is summed up, and grows again."""

from __future__ import annotations

from random import Random

from simulation.chat import zipf_weights
from simulation.parameters import MAX_CONTEXT, Agents
from simulation.sessions import Session, ask
from simulation.text import Context, Corpus, Tokens


class AgentSessions:
    """An agent of one of a few types works on a task; sub-agents work for it side by side."""

    def __init__(self, parameters: Agents, corpus: Corpus, rng: Random) -> None:
        self._parameters = parameters
        self._corpus = corpus
        self._systems = [
            (
                corpus.text(rng, rng.randint(*parameters.system_tokens)),
                corpus.text(rng, rng.randint(*parameters.sub_system_tokens)),
            )
            for _ in range(parameters.types)
        ]
        self._cumulated = zipf_weights(parameters.types, parameters.type_exponent)

    def __call__(self, rng: Random, number: int) -> Session:
        ((system, sub_system),) = rng.choices(self._systems, cum_weights=self._cumulated)
        return self._agent(rng, number, system, sub_system)

    def _agent(
        self, rng: Random, number: int, system: Tokens, sub_system: Tokens | None
    ) -> Session:
        """`sub_system` is None for a sub-agent: it sets nobody else to work."""
        p, corpus = self._parameters, self._corpus
        unique = corpus.unique(number)
        task = corpus.text(rng, p.task.tokens(rng))
        begin = Context().message(system).message(unique, task)
        context = begin
        is_main = sub_system is not None
        delay = p.task_delay.steps(rng) if is_main else 0
        for _ in range(rng.randint(*(p.steps if is_main else p.sub_steps))):
            answer = corpus.text(rng, p.answer.tokens(rng))
            yield [ask(context, [answer], delay)]
            context = context.answered(answer)
            if sub_system is not None and rng.random() < p.sub_agents_share:
                count = rng.randint(*p.sub_agents)
                yield [self._agent(rng, number, sub_system, None) for _ in range(count)]
                reports = [corpus.text(rng, p.answer.tokens(rng)) for _ in range(count)]
                context = context.message(*reports)
                delay = 0
            else:
                room = MAX_CONTEXT - 4_096 - context.length
                output = min(p.output.tokens(rng), max(10, room))
                context = context.message(corpus.text(rng, output))
                asks_user = is_main and rng.random() < p.pause_share
                delay = (p.pause if asks_user else p.tool_delay).steps(rng)
            if context.length > p.compact_above:
                summary = corpus.text(rng, p.summary.tokens(rng))
                yield [ask(context.message(corpus.text(rng, 60)), [summary], delay)]
                context = begin.message(summary)
                delay = 0
