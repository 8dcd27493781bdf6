"""LLM: offline use in one process, five lines to a first token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, cast

from tqdm import tqdm

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.detokenizer import IncrementalDetokenizer
from megatron_hybrid.engine.build import build_engine, model_folder
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.errors import ConfigurationError, InvalidRequestError
from megatron_hybrid.request import FinishReason, RequestEvent, RequestOutput, SamplingParams
from megatron_hybrid.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, ready to generate.

    `load`: a Hugging Face folder; None: the reference model. Keyword arguments: EngineConfig's
    fields; or `config`, a whole EngineConfig. Under torchrun every rank makes the same calls.
    """

    def __init__(
        self, load: str | None = None, *, config: EngineConfig | None = None, **options: Any
    ) -> None:
        if config is None:
            config = EngineConfig.from_mapping({"load": load, **options}, "LLM")
        elif load is not None or options:
            raise ConfigurationError("LLM takes either config or single options, not both.")
        self.config = config
        self.engine: DynamicInferenceEngine = build_engine(config)
        self._folder = model_folder(config)
        self._tokenizer: Tokenizer | ConfigurationError | None = None
        self._ids = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, read when first needed: token ids work without one."""
        if self._tokenizer is None:
            try:
                self._tokenizer = Tokenizer.load(self._folder)
            except ConfigurationError as error:
                self._tokenizer = error  # asked once: there may be thousands of prompts
        if isinstance(self._tokenizer, ConfigurationError):
            raise self._tokenizer
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer all prompts, texts or token ids, batched; outputs in the order of the prompts.

        `params`: one for all, or one for each. A progress bar shows on long batches. Raises
        InvalidRequestError, and generates nothing, if a request can't be served.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        several = cast(Sequence[Prompt], [prompts] if single else prompts)
        return self._run([self._token_ids(prompt) for prompt in several], params, progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, rendered by the model's chat template."""
        single = len(messages) > 0 and isinstance(messages[0], Mapping)
        chats = cast(Sequence[Messages], [messages] if single else messages)
        return self._run([self.tokenizer.encode_chat(chat) for chat in chats], params, progress)

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """The output so far, again after every step that adds to it. Ending the loop early
        aborts the request."""
        if not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
            token_ids = self.tokenizer.encode_chat(cast(Messages, prompt))
        else:
            token_ids = self._token_ids(cast(Prompt, prompt))
        (answer,) = self._submit([token_ids], params)
        try:
            while not answer.done:
                for event in self.engine.step():
                    if event.request_id == answer.output.request_id:
                        answer.take(event)
                        yield answer.output
        finally:
            self.engine.abort(answer.output.request_id)

    def stats(self) -> dict[str, Any]:
        """The counters of docs/prefix_cache.md."""
        return self.engine.stats()

    def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
    ) -> list[RequestOutput]:
        answers = self._submit(prompts, params)
        by_id = {answer.output.request_id: answer for answer in answers}
        show = progress and len(answers) > 1
        with tqdm(total=len(answers), unit="request", disable=None if show else True) as bar:
            while by_id:
                for event in self.engine.step():
                    answer = by_id.get(event.request_id)
                    if answer is None:  # ended by a stop string, and its abort is on the way
                        continue
                    answer.take(event)
                    if answer.done:
                        if event.finish_reason is None:  # a stop string, which is ours to see
                            self.engine.abort(event.request_id)
                        del by_id[event.request_id]
                        bar.update()
        return [answer.output for answer in answers]

    def _submit(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[_Answer]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise InvalidRequestError(
                "params", f"There are {len(prompts)} prompts but {len(params)} SamplingParams."
            )
        answers: list[_Answer] = []
        try:
            for token_ids, one in zip(prompts, params, strict=True):
                request_id = f"llm-{next(self._ids)}"
                answer = _Answer(request_id, token_ids, self._detokenizer(one))
                self.engine.add_request(request_id, token_ids, one)
                answers.append(answer)
        except InvalidRequestError:
            for answer in answers:
                self.engine.abort(answer.output.request_id)
            raise
        return answers

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return [int(token) for token in prompt]

    def _detokenizer(self, params: SamplingParams) -> IncrementalDetokenizer | None:
        try:
            return IncrementalDetokenizer(self.tokenizer, params.stop)
        except ConfigurationError:
            if params.stop:
                raise
            return None  # a model without a tokenizer answers in token ids


class _Answer:
    """One request's output while it grows."""

    def __init__(
        self, request_id: str, prompt: list[int], detokenizer: IncrementalDetokenizer | None
    ) -> None:
        self.output = RequestOutput(request_id, prompt)
        self._detokenizer = detokenizer

    @property
    def done(self) -> bool:
        return self.output.finish_reason is not None

    def take(self, event: RequestEvent) -> None:
        output = self.output
        output.cached_tokens = event.cached_tokens
        output.token_ids += event.token_ids
        if event.logprobs is not None:
            output.logprobs = (output.logprobs or []) + event.logprobs
        if event.prompt_logprobs is not None:
            output.prompt_logprobs = event.prompt_logprobs
        output.error = event.error
        if event.finish_reason is not None:
            output.finish_reason = event.finish_reason
            output.stop_reason = event.stop_token_id
        if self._detokenizer is None:
            return
        output.text += self._detokenizer.push(event.token_ids)
        if event.finish_reason is not None:
            output.text += self._detokenizer.flush()
        if self._detokenizer.stop_hit is not None:
            used = self._detokenizer.tokens_used
            del output.token_ids[used:]
            if output.logprobs is not None:
                del output.logprobs[used:]
            output.finish_reason = FinishReason.STOP
            output.stop_reason = self._detokenizer.stop_hit
