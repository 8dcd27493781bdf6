"""LLM: offline use in one process, five lines to a first token."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from tqdm import tqdm

from megatron_hybrid.config import EngineConfig
from megatron_hybrid.engine.build import build_engine
from megatron_hybrid.engine.engine import DynamicInferenceEngine
from megatron_hybrid.engine.garbage import collecting_seldom
from megatron_hybrid.errors import ConfigurationError, InvalidRequestError
from megatron_hybrid.execution.plan import WeightsSource
from megatron_hybrid.growing_output import GrowingOutput
from megatron_hybrid.models.checkpoints import hub
from megatron_hybrid.models.checkpoints.folder import ModelFolder
from megatron_hybrid.prompt_encoder import PromptEncoder, begins_with, is_sequence, wrong_kind
from megatron_hybrid.request import RequestOutput, SamplingParams
from megatron_hybrid.request_checks import validate_prompt
from megatron_hybrid.scoring import AnswerScore, joined, kept_at, params_behind
from megatron_hybrid.text.bad_words import with_token_ids
from megatron_hybrid.text.reasoning import Opening, choose, opening_after
from megatron_hybrid.text.structural_tags import as_lark
from megatron_hybrid.text.thinking import with_marks
from megatron_hybrid.text.tokenizer import EncodedPrompt, Tokenizer
from megatron_hybrid.values import show

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]
AllParams = SamplingParams | Sequence[SamplingParams] | None


class _Options(NamedTuple):
    """What a call says of all its requests, besides how to sample."""

    cache_salt: str
    priority: int
    cache_checkpoints: Sequence[int]
    adapter: str | Sequence[str]  # one for all, or one for each

    def each(self, count: int) -> list[dict[str, Any]]:
        """Of so many requests."""
        adapters = self.adapter
        if isinstance(adapters, str) or not is_sequence(adapters):
            return [self._asdict()] * count
        if (given := len(adapters)) != count:
            says = f"There are {count} prompts but {given} adapters."
            raise InvalidRequestError("adapter", says)
        return [self._replace(adapter=adapter)._asdict() for adapter in adapters]


class LLM:
    """A model, ready to generate.

    `load`: a Hugging Face folder, or a model's name on the Hugging Face hub (OWNER/NAME), whose
    files are downloaded unless the cache has them, and of which `revision` may name a branch, tag
    or commit; None: the reference model. Keyword arguments: EngineConfig's fields; or `config`, a
    whole EngineConfig. Under torchrun every rank makes the same calls.
    """

    def __init__(
        self,
        load: str | None = None,
        *,
        revision: str | None = None,
        config: EngineConfig | None = None,
        **options: Any,
    ) -> None:
        if config is None:
            config = EngineConfig.from_mapping({"load": load, **options}, "LLM")
        elif load is not None or options:
            raise ConfigurationError("LLM takes either config or single options, not both.")
        if not isinstance(config, EngineConfig):
            raise ConfigurationError(f"config is {show(config)}; it must be an EngineConfig.")
        self.config = config = hub.with_files(config, revision)
        self.engine: DynamicInferenceEngine = build_engine(config)
        self._folder = ModelFolder.of(config).tokenizer
        self._tokenizer: Tokenizer | ConfigurationError | None = None
        self._encoder = PromptEncoder(lambda: self.tokenizer)
        self._ids = itertools.count()
        self._open: dict[
            tuple[str, int], GrowingOutput
        ] = {}  # by request id and index of the choice

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
        params: AllParams = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        cache_checkpoints: Sequence[int] = (),
        adapter: str | Sequence[str] = "",
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer all prompts, texts or token ids, batched; outputs in the order of the prompts.

        `params`: one for all, or one for each. With n > 1 an output is the first answer, and its
        `choices` are all of them. `cache_salt`: prefixes are shared only under the same one.
        `priority`: a smaller number runs first. `cache_checkpoints`: positions in each prompt at
        whose exact end a state is to be kept. `adapter`: a name of `load_adapter`, or one for each
        prompt, "" for none. A progress bar shows on long batches. Raises InvalidRequestError, and
        generates nothing, if a request can't be served.

        Where replicas share experts, each calls it, with no prompts if it has none, and it returns
        when no replica has work left.
        """
        with self._joining_if_refused():
            encoded = self._encoder.prompts(prompts)
        return self._run(
            encoded, params, _Options(cache_salt, priority, cache_checkpoints, adapter), progress
        )

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: AllParams = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        cache_checkpoints: Sequence[int] = (),
        adapter: str | Sequence[str] = "",
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, rendered by the model's chat template; everything
        else as in `generate`."""
        with self._joining_if_refused():
            if not is_sequence(messages):
                raise wrong_kind(
                    "messages", messages, "a list of messages, or a list of such lists"
                )
            if begins_with(Mapping, messages):
                encoded = [self._encoder.chat(messages, "messages")]
            else:
                chats = enumerate(messages)
                encoded = [self._encoder.chat(chat, f"messages[{i}]") for i, chat in chats]
        return self._run(
            encoded, params, _Options(cache_salt, priority, cache_checkpoints, adapter), progress
        )

    def stream(
        self,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        cache_salt: str = "",
        priority: int = 0,
        cache_checkpoints: Sequence[int] = (),
        adapter: str = "",
    ) -> Iterator[RequestOutput]:
        """The output so far, again after every step that adds to it: always the same object, which
        grows, so copy what is to be kept as it is. Ending the loop early aborts the request.
        Raises InvalidRequestError for n > 1."""
        options = _Options(cache_salt, priority, cache_checkpoints, adapter)
        with self._joining_if_refused():
            if params is not None and not isinstance(params, SamplingParams):
                raise wrong_kind("params", params, "SamplingParams or None")
            if params is not None and params.n != 1:
                raise InvalidRequestError(
                    "n",
                    f"n is {params.n}; LLM.stream gives one answer. Use LLM.generate for several.",
                )
            if begins_with(Mapping, prompt):
                encoded = self._encoder.chat(prompt, "messages")
            else:
                encoded = self._encoder.prompt(prompt, "prompt")
            ((answer,),) = self._submit([encoded], params, options)
        shown, complete = 0, False
        try:
            while not complete:
                # An answer that was stopped here is shown when the engine has ended it too.
                longer = len(answer.output.token_ids) > shown and answer.finish_reason is None
                if longer or answer.ended:
                    shown, complete = len(answer.output.token_ids), answer.ended
                    yield answer.output
                else:
                    self._step()
        finally:
            self._abort([answer])
            self._join_others()

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        answers: Prompt | Sequence[Prompt | Sequence[Prompt]],
        *,
        top_logprobs: int = 0,
        cache_salt: str = "",
        priority: int = 0,
        adapter: str = "",
        progress: bool = True,
    ) -> list[list[AnswerScore]]:
        """How likely given answers are behind prompts, all batched: of each prompt, and of each of
        its answers. For each prompt there is an answer, text or token ids, or a list of several;
        texts of answers are encoded without special tokens. Nothing is generated; what is cached
        of a prompt is skipped. `top_logprobs`: of so many of the likeliest tokens, too. Everything
        else, and what is raised, as in `generate`."""
        with self._joining_if_refused():
            encoded = [prompt.token_ids for prompt in self._encoder.prompts(prompts)]
            several = self._encoder.answers(answers, prompts)
            both, params = [], []
            for i, (prompt, behind) in enumerate(zip(encoded, several, strict=True)):
                for name, answer in behind:
                    limit, flag = self.engine.max_seq_length, self.engine.max_seq_length_flag
                    names = {"prompt_name": f"prompts[{i}]", "answer_name": name}
                    ids = joined(prompt, answer, self.engine.vocab_size, limit, flag=flag, **names)
                    both.append(EncodedPrompt(ids, kept_at(len(prompt))))
                    params.append(params_behind(len(prompt), top_logprobs))
        outputs = iter(
            self._run(both, params, _Options(cache_salt, priority, (), adapter), progress)
        )
        return [[AnswerScore.of(ids, next(outputs)) for _, ids in behind] for behind in several]

    def pause(self, mode: str = "finish") -> None:
        """Begin no more answers. Those of open streams that have begun: "finish" computes them to
        their end now, "abort" ends them, "keep" leaves them where they are until `resume`."""
        self.engine.pause(mode)
        for _ in self._steps(lambda: self.engine.is_quiet):
            pass

    def resume(self) -> None:
        """Go on after `pause`."""
        self.engine.resume()

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the prefix cache and of the weights back to the device. Level 1: the
        host keeps the weights meanwhile; level 2: they are gone, and `wake_up(["weights"])`,
        `update_weights` and `wake_up(["kv_cache"])` bring new ones. Open streams go on afterwards.
        Needs enable_sleep_mode. Raises InvalidRequestError for another level, SleepError where that
        can't be."""
        if level not in (1, 2):
            raise InvalidRequestError("level", f"level is {show(level)}; it can be 1 or 2.")
        was_paused = self.engine.pause_mode is not None
        if not was_paused:
            self.pause("keep")
        try:
            self.engine.sleep(keep_weights=level == 1)
        finally:
            if not was_paused:
                self.engine.resume()  # once it is awake

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again that `sleep` gave back, of "weights", "kv_cache" or (None) both.
        Raises SleepError if there is not enough; then it may be tried again."""
        self.engine.wake_up(tags)

    def update_weights(
        self, source: WeightsSource, *, mode: str | None = None, version: str | None = None
    ) -> int:
        """Overwrite the model's weights in place and empty the prefix cache; the weights' epoch,
        which counts the updates.

        `source`: a Hugging Face folder of the same model, with all its weights; or tensors by
        Hugging Face's names, a mapping or pairs, of which some may be left out (pause first, to
        update a model in several parts). Under torchrun every rank passes whole tensors. `mode`:
        what becomes of open streams, as in `pause`; None: as the pause that holds, else "finish".
        Paused before, it stays paused. `version`: what `weight_versions` of answers call the new
        weights; None: their epoch. Raises WeightsError, and changes nothing, for weights that
        do not fit; WeightsLostError when they could be copied only in part: make a new LLM then.
        """
        was_paused = self.engine.pause_mode is not None
        if mode is not None or not was_paused:
            self.pause(mode or "finish")
        try:
            self.engine.update_weights(source, version)
        finally:
            if not was_paused:
                self.engine.resume()
        return self.engine.epoch

    def load_adapter(
        self, name: str, source: WeightsSource, config: Mapping[str, Any] | None = None
    ) -> None:
        """Let requests have a low-rank adapter by this name; needs enable_lora=True. Everything
        else: see DynamicInferenceEngine.load_adapter."""
        self.engine.load_adapter(name, source, config)

    def unload_adapter(self, name: str) -> None:
        """No further request can have it; streams that have begun go on with it."""
        self.engine.unload_adapter(name)

    @property
    def system_fingerprint(self) -> str:
        """The short name of what computes answers: device, versions, mode and weights of now."""
        return self.engine.weights.fingerprint.short

    def stats(self) -> dict[str, Any]:
        """The counters of docs/prefix_cache.md."""
        return self.engine.stats()

    def _run(
        self, prompts: list[EncodedPrompt], params: AllParams, options: _Options, progress: bool
    ) -> list[RequestOutput]:
        with self._joining_if_refused():
            requests = self._submit(prompts, params, options)
        running = {answer for answers in requests for answer in answers}
        show = progress and len(running) > 1
        try:
            total, hidden = len(running), None if show else True
            with collecting_seldom(), tqdm(total=total, unit="answer", disable=hidden) as bar:
                for answers in self._steps(lambda: not running):
                    ended = running.intersection(answers)
                    running.difference_update(ended)
                    bar.update(len(ended))
        finally:
            self._abort(running)  # none, unless a step failed or was interrupted
        return [answers[0].output for answers in requests]

    def _submit(
        self, prompts: list[EncodedPrompt], params: AllParams, options: _Options
    ) -> list[list[GrowingOutput]]:
        """Queue all prompts, or none; the answers to come, those of each prompt."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if not is_sequence(params):
            raise wrong_kind("params", params, "SamplingParams, or one for each prompt")
        if len(params) != len(prompts):
            raise InvalidRequestError(
                "params", f"There are {len(prompts)} prompts but {len(params)} SamplingParams."
            )
        for i, one in enumerate(params):
            if not isinstance(one, SamplingParams):
                raise wrong_kind(f"params[{i}]", one, "SamplingParams")
            one.validate()  # before there are n answers of it
        params = [
            self._as_engine_knows(one, prompt.token_ids)
            for one, prompt in zip(params, prompts, strict=True)
        ]
        requests = [
            self._answers(f"llm-{next(self._ids)}", prompt.token_ids, one)
            for prompt, one in zip(prompts, params, strict=True)
        ]
        each, submitted = options.each(len(prompts)), list[GrowingOutput]()
        try:
            for answers, prompt, one, own in zip(requests, prompts, params, each, strict=True):
                self.engine.add_request(
                    answers[0].output.request_id,
                    prompt.token_ids,
                    one,
                    message_ends=prompt.message_ends,
                    **own,
                )
                self._open.update((answer.key, answer) for answer in answers)
                submitted += answers
        except Exception:
            self._abort(submitted)
            raise
        return requests

    def _steps(self, done: Callable[[], bool]) -> Iterator[list[GrowingOutput]]:
        """The answers that ended with each step, until `done`; and on from there while another
        replica of a lockstep group has work, for which every replica calls this."""
        lockstep = self.engine.lockstep
        if lockstep is not None:
            lockstep.has_work = True  # one turn finds out
        while not done() or (lockstep is not None and lockstep.has_work):
            yield self._step()

    @contextmanager
    def _joining_if_refused(self) -> Iterator[None]:
        """What is refused here alone must not put the other replicas of a lockstep group out of
        step: they make this call too, and wait for us in it."""
        try:
            yield
        except Exception:
            self._join_others()
            raise

    def _join_others(self) -> None:
        """Take part in the steps of the other replicas of a lockstep group."""
        if self.engine.lockstep is not None:
            for _ in self._steps(lambda: True):
                pass

    def _step(self) -> list[GrowingOutput]:
        """One step of the engine, given to all answers that run; those that ended with it."""
        self.engine.sleeper.check()
        if self.engine.is_paused and not self.engine.has_work():
            raise RuntimeError("The engine is paused; call LLM.resume() to go on.")
        ended = []
        for event in self.engine.step():
            answer = self._open.get((event.request_id, event.index))
            if answer is None:  # nobody waits for it any more
                continue
            has_stopped = answer.finish_reason is not None
            try:
                answer.advance(event)
            except Exception as error:  # in the text of this one: the others go on
                logger.exception("An answer can't be turned into text.")
                answer.fail(error)
            if answer.ended:
                del self._open[answer.key]
                ended.append(answer)
            elif answer.finish_reason is not None and not has_stopped:  # which is ours to see
                self.engine.abort(*answer.key, answer.finish_reason)
        return ended

    def _abort(self, answers: Iterable[GrowingOutput]) -> None:
        """End whole requests, whose answers these are, for the engine and for us."""
        ended = [self._open.pop(answer.key) for answer in answers if answer.key in self._open]
        for request_id in sorted({answer.output.request_id for answer in ended}):
            self.engine.abort(request_id)

    def _as_engine_knows(self, params: SamplingParams, prompt: Sequence[int]) -> SamplingParams:
        """With what has to be said in tokens."""
        if any(isinstance(word, str) for word in params.bad_words):
            params = with_token_ids(params, self.tokenizer)
        if params.grammar is not None and params.grammar.kind == "structural_tag":
            added = self.tokenizer.added_tokens
            params = replace(params, grammar=as_lark(params.grammar, added))
        if isinstance(params.thinking_token_budget, int):
            validate_prompt(prompt, self.engine.vocab_size, self.engine.max_seq_length)
            form, begins = choose(self.tokenizer.chat_template), Opening.UNKNOWN
            if form is not None:
                begins = opening_after(form, prompt, self.tokenizer)
            params = with_marks(params, form, begins, self.tokenizer)
        return params

    def _answers(
        self, request_id: str, prompt: list[int], params: SamplingParams
    ) -> list[GrowingOutput]:
        tokenizer = None  # a model without one answers in token ids
        try:
            tokenizer = self.tokenizer
        except ConfigurationError:
            if params.stop:
                raise
        outputs = [RequestOutput(request_id, prompt, index=index) for index in range(params.n)]
        outputs[0].choices = outputs
        return [GrowingOutput(output, tokenizer, params.stop) for output in outputs]
