"""GrowingOutput: a RequestOutput that an LLM is about to return, while its tokens come."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hybrid.request import FinishReason, RequestEvent, RequestOutput
from megatron_hybrid.routed_experts import RoutedExperts
from megatron_hybrid.text.answer_text import AnswerText
from megatron_hybrid.text.tokenizer import Tokenizer


class GrowingOutput(AnswerText):
    """One choice's output while it grows. `ended`: the engine's last event is here. With a
    `finish_reason` before that it ended here, by a stop string or an error, of which the engine has
    yet to learn."""

    def __init__(
        self, output: RequestOutput, tokenizer: Tokenizer | None, stop: Sequence[str]
    ) -> None:
        super().__init__(tokenizer, stop)
        self.output = output
        self.key = (output.request_id, output.index)
        self.ended = False

    def advance(self, event: RequestEvent) -> None:
        """Go on with the event."""
        if event.finish_reason is not None:
            self.ended = True
            self.output.counters = event.counters
        if self.finish_reason is None:
            self._go_on(event)
        if event.routed_experts is not None:
            self._take_experts(event.routed_experts)

    def _go_on(self, event: RequestEvent) -> None:
        output, new = self.output, self.take(event)
        output.text += new.text
        output.token_ids += new.token_ids
        if event.logprobs is not None:
            output.logprobs = (output.logprobs or []) + new.logprobs
        if event.prompt_logprobs is not None:
            output.prompt_logprobs = event.prompt_logprobs
        output.cached_tokens = self.cached_tokens
        output.error = event.error
        output.finish_reason, output.stop_reason = self.finish_reason, self.stop_reason
        if output.finish_reason is not None:
            output.weight_versions = self.version_spans()

    def _take_experts(self, experts: RoutedExperts) -> None:
        """Of what there is of the answer, which may be less than the engine has computed."""
        tokens = len(self.output.prompt_token_ids) + len(self.output.token_ids)
        self.output.routed_experts = experts.until(tokens).array()

    def fail(self, error: Exception) -> None:
        """`advance` raised this."""
        self.finish_reason = self.output.finish_reason = FinishReason.ERROR
        self.output.error = f"The answer can't be turned into text: {type(error).__name__}: {error}"
