"""Sessions of people: chats with assistants, and single questions behind shared instructions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from random import Random

from simulation.parameters import MAX_CONTEXT, Chat, Shared
from simulation.sessions import Session, Stage, ask
from simulation.text import Context, Corpus, Tokens


class ChatSessions:
    """Multi-turn chats; some answers are drawn again, some earlier messages written anew."""

    def __init__(self, parameters: Chat, corpus: Corpus, rng: Random) -> None:
        self._parameters = parameters
        self._corpus = corpus
        self._systems = [corpus.text(rng, length) for length in parameters.system_prompts]

    def __call__(self, rng: Random, number: int) -> Session:
        p, corpus = self._parameters, self._corpus
        (system,) = rng.choices(self._systems, p.system_weights)
        answered = Context().message(system)
        before: list[Context] = []  # the context before each of the user's messages
        document: list[Tokens] = []
        if rng.random() < p.document_share:
            document.append(corpus.text(rng, p.document.tokens(rng)))
        delay = 0
        more = True
        while more:
            before.append(answered)
            about = document if len(before) == 1 else []  # the first message, or its edit
            context = answered.message(corpus.unique(number), *about, *self._message(rng))
            repeat = True
            while repeat and more:
                answer = corpus.text(rng, p.answer.tokens(rng))
                if context.length + len(answer) > MAX_CONTEXT - 64:
                    return
                yield [ask(context, [answer], delay)]
                more = rng.random() < 1 - 1 / p.mean_turns
                repeat = rng.random() < p.regenerate_share
                delay = (p.regenerate_delay if repeat else p.think).steps(rng)
            answered = context.answered(answer)
            if rng.random() < p.edit_share:
                earlier = rng.randrange(len(before))
                answered = before[earlier]
                del before[earlier:]

    def _message(self, rng: Random) -> Iterator[Tokens]:
        p = self._parameters
        if rng.random() < p.attachment_share:
            yield self._corpus.text(rng, p.attachment.tokens(rng))
        yield self._corpus.text(rng, p.message.tokens(rng))


class SharedSessions:
    """One question, seldom two, behind one of many instructions of Zipf popularity."""

    def __init__(self, parameters: Shared, corpus: Corpus, rng: Random) -> None:
        self._parameters = parameters
        self._corpus = corpus
        self._systems = [
            corpus.text(rng, rng.randint(*parameters.prompt_tokens))
            for _ in range(parameters.prompts)
        ]
        self._cumulated = zipf_weights(parameters.prompts, parameters.exponent)

    def __call__(self, rng: Random, number: int) -> Session:
        (system,) = rng.choices(self._systems, cum_weights=self._cumulated)
        return self._session(rng, number, Context().message(system))

    def _session(self, rng: Random, number: int, context: Context) -> Iterator[Stage]:
        p, corpus = self._parameters, self._corpus
        delay = 0
        while True:
            question = corpus.text(rng, p.question.tokens(rng))
            context = context.message(corpus.unique(number), question)
            answer = corpus.text(rng, p.answer.tokens(rng))
            yield [ask(context, [answer], delay)]
            if len(context.ends) > 2 or rng.random() >= p.second_turn_share:
                return
            context = context.answered(answer)
            delay = p.second_turn_delay.steps(rng)


def zipf_weights(count: int, exponent: float) -> list[float]:
    """Cumulated weights of ranks 1 to `count`."""
    return list(accumulate(rank**-exponent for rank in range(1, count + 1)))
