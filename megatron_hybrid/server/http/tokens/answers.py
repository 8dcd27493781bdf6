"""What both routes for tokens do alike: begin, and keep what a choice says of its end."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import json

from megatron_hybrid.server.http.choice import Choice
from megatron_hybrid.server.http.generation import Generation
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.http.streaming import Answers, Chunk
from megatron_hybrid.server.http.tokens.asked import PreparedPrompt

DONE = b"data: [DONE]\n\n"


class TokenAnswers(Answers):
    """Of the prompts of one request, choice j of prompt i at i * n + j."""

    def __init__(
        self,
        serving: Serving,
        prompts: Sequence[PreparedPrompt],
        generation: Generation,
        *,
        with_text: bool,
    ) -> None:
        """Begins; raises what `Generation.start` raises. with_text: answers are read, too; those
        with stop strings are in any case."""
        wanted = prompts[0].generation
        self._n = wanted.params.n
        super().__init__(serving, generation, wanted, number=len(prompts) * self._n)
        self._prompts = prompts
        self._choices: list[Choice] = []

        def make_choice(index: int) -> Choice:
            own = prompts[index // self._n].generation
            reads = with_text or own.params.stop
            choice = Choice(index, serving.tokenizer if reads else None, own)
            self._choices.append(choice)
            return choice

        generation.start(
            [one.token_ids for one in prompts],
            make_choice,
            each=[one.generation for one in prompts],
        )

    def _weight_versions(self, index: int) -> list[Chunk]:
        """Which weights have computed which tokens of an answer."""
        return [span._asdict() for span in self._choices[index].version_spans()]

    def last_events(self) -> bytes:
        return DONE

    def failed(self, error: Chunk) -> bytes:
        return event(error) + DONE


def event(data: Chunk) -> bytes:
    """As a server-sent event."""
    return b"data: " + json.encode(data) + b"\n\n"
