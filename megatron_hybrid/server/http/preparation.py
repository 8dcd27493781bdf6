"""From the bytes of a body to what the engine is asked for: JSON, checks, grammars, tokens.

All of it is a function of the body and of what the server knows, so that a large body can be
prepared in another process (preparers.py): much of it holds the interpreter, and with it every
stream of a worker, for as long as it takes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import takewhile

from msgspec import json

from megatron_hybrid.errors import InvalidRequestError
from megatron_hybrid.request import MAX_TOKENS, Grammar, SamplingParams
from megatron_hybrid.request_checks import validate_prompt
from megatron_hybrid.scoring import joined, kept_at, params_behind
from megatron_hybrid.server.http.logprobs import EchoedPrompt
from megatron_hybrid.server.http.prepared import (
    PreparedChat,
    PreparedCompletion,
    PreparedScores,
)
from megatron_hybrid.server.http.protocol.anthropic_chat import (
    parse_count_tokens,
    parse_messages,
)
from megatron_hybrid.server.http.protocol.generation_request import (
    Chat,
    ChatPrompt,
    GenerationRequest,
    chat_prompt,
    of_prompt_alone,
    parse_chat,
    parse_completion,
)
from megatron_hybrid.server.http.protocol.parsing import Bytes, parse_body, read
from megatron_hybrid.server.http.protocol.requests import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from megatron_hybrid.server.http.protocol.scoring import check_size, parse_score
from megatron_hybrid.server.http.responses.preparing import PreparedResponse, Preparer
from megatron_hybrid.server.http.served_names import adapter_called, with_adapter
from megatron_hybrid.server.http.tokens.asked import AskedPrompt, PreparedPrompt
from megatron_hybrid.server.http.tokens.generate_parsing import PreparedGenerate, parse_generate
from megatron_hybrid.server.http.tokens.inference_body import PreparedInference, parse_inference
from megatron_hybrid.server.http.tool_calls.calling import ToolCalling
from megatron_hybrid.server.http.truncation import kept, last_of
from megatron_hybrid.server.keys import NOBODY, Caller
from megatron_hybrid.server.link.answer_memory import AnswerMemoryClient, ChatKeys
from megatron_hybrid.server.link.messages import EngineReady
from megatron_hybrid.server.link.response_memory import ResponseMemoryClient
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.text.after_thoughts import after_thoughts
from megatron_hybrid.text.answer_places import GeneratedAnswer
from megatron_hybrid.text.bad_words import with_token_ids
from megatron_hybrid.text.block_ends import BlockEnd
from megatron_hybrid.text.reasoning import (
    Opening,
    choose,
    opening_after,
    opening_of_rest,
    with_thoughts_inside,
)
from megatron_hybrid.text.structural_tags import as_lark
from megatron_hybrid.text.thinking import with_marks
from megatron_hybrid.text.tokenizer import EncodedPrompt, Ending, Tokenizer

MAX_DETOKENIZED = 1_000_000  # ids, unless the context is longer
LEAST_LONGEST_TEXT = 2**20  # characters


class Preparation:
    """One process's means: tokenizer, chat template, and the memory of answers that were given.

    connect: makes this process's connection to that memory, when it is first needed; None: chats
    are only their text. connect_responses: the same for stored responses; None: there are none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        options: ServerOptions,
        connect: Callable[[], AnswerMemoryClient] | None = None,
        connect_responses: Callable[[], ResponseMemoryClient] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.tool_calling = ToolCalling(tokenizer, options.tool_call_parser)
        self.reasoning = choose(tokenizer.chat_template, options.reasoning_parser)
        self._connect = connect
        self._connect_responses = connect_responses

    @cached_property
    def answers(self) -> AnswerMemoryClient | None:
        """The memory of answers."""
        return None if self._connect is None else self._connect()

    @cached_property
    def responses(self) -> ResponseMemoryClient | None:
        """The memory of stored responses."""
        return None if self._connect_responses is None else self._connect_responses()

    @cached_property
    def _takes_later_system(self) -> bool:
        """Whether the chat template shows system messages that do not stand at the beginning."""
        said = [{"role": "user", "content": "?"}, {"role": "system", "content": "Later."}]
        try:
            return "Later." in self.tokenizer.render_chat(said)
        except Exception:  # templates are the model's code and may raise anything
            return False

    # Each takes a body, and raises InvalidRequestError or UnknownModel. engine: it says how much
    # fits. caller: whose the body is.

    def chat(self, body: Bytes, engine: EngineReady, caller: Caller = NOBODY) -> PreparedChat:
        """Of /v1/chat/completions."""
        return self._prepared(parse_chat(parse_body(body), self.options), engine, caller)

    def _prepared(self, request: Chat, engine: EngineReady, caller: Caller) -> PreparedChat:
        """A chat in whichever form it came."""
        own = with_adapter(request.generation, self.options, engine)
        params = self.tool_calling.params(request.tools, own.params)
        params.validate()  # once more, with what holds it to calls
        wanted = self._in_token_ids(replace(own, params=params))
        wanted = _salted(wanted, caller)
        keys = ChatKeys(wanted.cache_salt, request.messages)
        encoded = self._encode_chat(request, keys, engine, request.field, request.marks)
        prompt, message_ends, block_ends = last_of(encoded, kept(wanted, engine))
        wanted = replace(wanted, cache_checkpoints=wanted.cache_checkpoints + block_ends)
        token_ids = self._checked(request.field, prompt, wanted, engine)
        _check_cache_checkpoints(request.field, prompt, wanted)
        # What describes the tools is in the prompt by now.
        tools = replace(request.tools, descriptions=[])
        begins = self._opening(token_ids, request)
        if self.reasoning is not None and wanted.params.grammar is not None:
            begins, held = self._after_thoughts(wanted.params.grammar, begins)
            wanted = replace(wanted, params=replace(wanted.params, grammar=held))
        wanted = replace(wanted, params=self._with_budget(wanted.params, request, begins))
        wanted = _answered_here(wanted, engine)
        return PreparedChat(wanted, token_ids, message_ends, tools, keys, begins)

    def messages(self, body: Bytes, engine: EngineReady, caller: Caller = NOBODY) -> PreparedChat:
        """Of /v1/messages."""
        later = self._takes_later_system
        chat = parse_messages(parse_body(body), self.options, later_system=later)
        return self._prepared(chat, engine, caller)

    def count_tokens(self, body: Bytes, engine: EngineReady, caller: Caller = NOBODY) -> bytes:
        """Of /v1/messages/count_tokens; the answer's body."""
        later = self._takes_later_system
        prompt, asked = parse_count_tokens(parse_body(body), self.options, later_system=later)
        adapter_called(asked.model, self.options, engine)
        keys = ChatKeys(caller.salt_for(asked.cache_salt or ""), prompt.messages)
        tokens = self._encode_chat(prompt, keys, engine).token_ids
        return json.encode({"input_tokens": len(tokens)})

    def response(
        self, body: Bytes, engine: EngineReady, caller: Caller = NOBODY
    ) -> PreparedResponse:
        """Of /v1/responses. Raises NotStored and StoreUnavailable, too."""

        def encode(chat: Chat) -> PreparedChat:
            try:
                return self._prepared(chat, engine, caller)
            except InvalidRequestError as error:
                if error.field != "messages":
                    raise
                code = error.code or ""
                raise InvalidRequestError("input", str(error), error.status, code) from error

        options = self.options
        preparer = Preparer(options, options.model_name, self.responses, caller.owner, encode)
        return preparer.prepare(parse_body(body))

    def completion(
        self, body: Bytes, engine: EngineReady, caller: Caller = NOBODY
    ) -> PreparedCompletion:
        """Of /v1/completions."""
        request = parse_completion(parse_body(body), self.options)
        own = with_adapter(request.generation, self.options, engine)
        wanted = _salted(self._in_token_ids(own), caller)
        prompts = []
        for number, given in enumerate(request.prompts):
            prompt = self._encode("prompt", given, engine) if isinstance(given, str) else given
            prompt = last_of(EncodedPrompt(prompt), kept(wanted, engine)).token_ids
            prompts.append(self._checked("prompt", prompt, wanted, engine))
            name = f"prompt[{number}]" if len(request.prompts) > 1 else "prompt"
            _check_cache_checkpoints(name, prompt, wanted)
        wanted = _answered_here(wanted, engine)
        pairs = zip(request.prompts, prompts, strict=True) if request.echo else ()
        return PreparedCompletion(wanted, prompts, [self._echoed(*pair) for pair in pairs])

    def score(self, body: Bytes, engine: EngineReady, caller: Caller = NOBODY) -> PreparedScores:
        """Of /score_tokens."""
        request = parse_score(parse_body(body), self.options)
        own = with_adapter(request.generation, self.options, engine)
        prompt, answers = request.prompt, list[list[int]]()
        if isinstance(prompt, str):
            prompt = self._encode("prompt", prompt, engine)
        for number, given in enumerate(request.answers):
            name = f"answers[{number}]"
            if isinstance(given, str):
                given = self._encode(name, given, engine, add_special_tokens=False)
            answers.append(given)
        check_size(len(prompt), answers)
        limit, flag = engine.max_seq_length, engine.max_seq_length_flag
        prompts = [
            array(
                "i",
                joined(
                    prompt,
                    answer,
                    engine.vocab_size,
                    limit,
                    flag=flag,
                    answer_name=f"answers[{number}]",
                ),
            )
            for number, answer in enumerate(answers)
        ]
        params = params_behind(len(prompt), request.top_logprobs or 0)
        kept = kept_at(len(prompt))
        wanted = replace(own, params=params, cache_checkpoints=kept)
        return PreparedScores(
            _salted(wanted, caller), prompts, len(prompt), request.top_logprobs is not None
        )

    def generate(
        self, body: Bytes, engine: EngineReady, caller: Caller = NOBODY
    ) -> PreparedGenerate:
        """Of /generate."""
        asked = parse_generate(parse_body(body), self.options)
        prompts = [self._in_tokens(one, engine, caller) for one in asked.prompts]
        return PreparedGenerate(prompts, asked.form)

    def inference(
        self, body: Bytes, engine: EngineReady, caller: Caller = NOBODY
    ) -> PreparedInference:
        """Of /inference/v1/generate."""
        asked = parse_inference(parse_body(body), self.options)
        prompt = self._in_tokens(asked.prompt, engine, caller)
        return PreparedInference([prompt], asked.with_prompt)

    def _in_tokens(self, asked: AskedPrompt, engine: EngineReady, caller: Caller) -> PreparedPrompt:
        """A prompt of a body with token ids."""
        field, prompt = asked.field, asked.prompt
        if isinstance(prompt, str):
            prompt = self._encode(field, prompt, engine)
        with asked.words.used():
            own = with_adapter(asked.generation, self.options, engine)
            wanted = _salted(self._in_token_ids(own), caller)
            token_ids = self._checked(field, prompt, wanted, engine)
            form, begins = self.reasoning, Opening.CONTENT
            if form is not None and wanted.params.thinking_token_budget is not None:
                begins = opening_after(form, token_ids, self.tokenizer)
            params = with_marks(wanted.params, form, begins, self.tokenizer)
            params.validate_vocabulary(engine.vocab_size)
        return PreparedPrompt(_answered_here(replace(wanted, params=params), engine), token_ids)

    def tokenize(self, body: Bytes, engine: EngineReady, caller: Caller = NOBODY) -> bytes:
        """Of /tokenize; the answer's body."""
        values, options = parse_body(body), self.options
        if values.get("messages") is not None:
            chat = read(TokenizeChatRequest, values, options)
            prompt = chat_prompt(chat, options)
            keys = ChatKeys(caller.salt_for(chat.cache_salt or ""), prompt.messages)
            tokens = self._encode_chat(prompt, keys, engine).token_ids
        else:
            text = read(TokenizeTextRequest, values, options)
            special = text.add_special_tokens is not False
            tokens = self._encode("prompt", text.prompt, engine, add_special_tokens=special)
        limit = engine.max_seq_length
        return json.encode({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    def detokenize(self, body: Bytes, engine: EngineReady) -> bytes:
        """Of /detokenize; the answer's body."""
        tokens = read(DetokenizeRequest, parse_body(body)).tokens
        most = max(MAX_DETOKENIZED, engine.max_seq_length)
        if len(tokens) > most:
            raise InvalidRequestError(
                "tokens", f"tokens has {len(tokens)} entries; the limit is {most}."
            )
        if tokens:
            validate_prompt(tokens, engine.vocab_size, most + 1, "tokens")
        return json.encode({"prompt": self.tokenizer.decode(tokens, skip_special_tokens=False)})

    def _in_token_ids(self, request: GenerationRequest) -> GenerationRequest:
        """With texts that the engine has to know in its own terms."""
        params = with_token_ids(request.params, self.tokenizer)
        if params.grammar is not None:
            grammar = as_lark(params.grammar, self.tokenizer.added_tokens)
            params = replace(params, grammar=grammar)
        return replace(request, params=params)

    def _encode_chat(
        self,
        chat: ChatPrompt,
        keys: ChatKeys,
        engine: EngineReady,
        field: str = "messages",
        marks: Sequence[BlockEnd] = (),
    ) -> EncodedPrompt:
        """The prompt of a chat, which the client knows by that name; answers in it that are
        remembered are the tokens that they were."""
        self.tool_calling.check(chat.tools)
        messages = chat.messages
        if self.reasoning is not None:
            template = self.tokenizer.chat_template
            messages = with_thoughts_inside(self.reasoning, template, messages)
        return self.tokenizer.encode_chat_with_ends(
            messages,
            chat.template_arguments,
            chat.tools.descriptions,
            answers=self._remembered(keys),
            same_calls=partial(self.tool_calling.says_the_same, chat.tools.schemas),
            check=lambda text: self._check_length(field, text, engine),
            ending=chat.ending,
            block_ends=marks,
        )

    def _opening(self, prompt: Sequence[int], request: Chat) -> Opening:
        """How the answers begin."""
        if self.reasoning is None:
            return Opening.CONTENT
        if request.ending is Ending.CONTINUED:
            content = request.messages[-1]["content"]
            parts = [content] if isinstance(content, str) else [part["text"] for part in content]
            return opening_of_rest(self.reasoning, "\n".join(parts))
        return opening_after(self.reasoning, prompt, self.tokenizer)

    def _after_thoughts(self, grammar: Grammar, begins: Opening) -> tuple[Opening, Grammar]:
        """How the answers begin, and what holds them; a grammar begins after the thoughts."""
        assert self.reasoning is not None
        if begins is Opening.CONTENT:
            return begins, grammar
        held = after_thoughts(grammar, self.reasoning, begins, self.tokenizer)
        return (Opening.CONTENT, grammar) if held is None else (begins, held)

    def _with_budget(
        self, params: SamplingParams, request: Chat, begins: Opening
    ) -> SamplingParams:
        """With a budget of thoughts as the engine has to know it. One that is meant for the chat
        template holds, too, where the model thinks."""
        if params.thinking_token_budget is None and self.reasoning is not None:
            for name in ("thinking_token_budget", "thinking_budget"):
                given = request.template_arguments.get(name)
                if type(given) is int and 0 <= given <= MAX_TOKENS:
                    params = replace(params, thinking_token_budget=given)
        return with_marks(params, self.reasoning, begins, self.tokenizer)

    def _remembered(self, keys: ChatKeys) -> dict[int, GeneratedAnswer]:
        if not keys.asked or self.answers is None:
            return {}
        found = self.answers.find([asked.key for asked in keys.asked])
        return {
            asked.number: answer
            for asked, answer in zip(keys.asked, found, strict=True)
            if answer is not None
        }

    def _encode(
        self, field: str, text: str, engine: EngineReady, *, add_special_tokens: bool = True
    ) -> list[int]:
        self._check_length(field, text, engine)
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _check_length(self, field: str, text: str, engine: EngineReady) -> None:
        """Refuse a text before it is encoded if it has more tokens than fit in any case."""
        longest = max(
            LEAST_LONGEST_TEXT, engine.max_seq_length * self.tokenizer.most_characters_of_a_token
        )
        if len(text) > longest:
            raise InvalidRequestError(
                field,
                f"{field} comes to {len(text)} characters; the limit for prompt and answer "
                f"together is {engine.max_seq_length} tokens ({engine.max_seq_length_flag}), which "
                f"no text of more than {longest} characters fits into.",
                status=413,
            )

    def _checked(
        self, field: str, prompt: Sequence[int], request: GenerationRequest, engine: EngineReady
    ) -> array[int]:
        """The prompt's ids, which fit; refuses what can never run before it takes a place in the
        queue."""
        limit, flag = engine.max_seq_length, engine.max_seq_length_flag
        validate_prompt(prompt, engine.vocab_size, limit, field, flag=flag)
        name = request.max_tokens_field
        request.params.longest_answer(len(prompt), limit, flag, name=name, prompt=field)
        return array("i", prompt)

    def _echoed(self, given: str | list[int], token_ids: array[int]) -> EchoedPrompt:
        if isinstance(given, str):
            encoding = self.tokenizer.backend.encode(given, add_special_tokens=True)
            if len(encoding.ids) == len(token_ids):  # none is cut off
                added = len(list(takewhile(bool, encoding.special_tokens_mask)))
                return EchoedPrompt(token_ids, given, added)
        return EchoedPrompt(token_ids, self.tokenizer.decode(token_ids, skip_special_tokens=False))


def _salted(request: GenerationRequest, caller: Caller) -> GenerationRequest:
    """With the cache salt that the caller's key makes of the request's own."""
    return replace(request, cache_salt=caller.salt_for(request.cache_salt))


def _answered_here(request: GenerationRequest, engine: EngineReady) -> GenerationRequest:
    """What of a request that was checked as it came is done here: on a server that hands prompts
    over, no more than these."""
    if not engine.handover_address:
        return request
    return replace(request, params=of_prompt_alone(request.params))


def _check_cache_checkpoints(name: str, prompt: Sequence[int], request: GenerationRequest) -> None:
    """Refuse positions beyond this prompt, which the client knows by that name."""
    last = max(request.cache_checkpoints, default=0)
    if last > len(prompt):
        raise InvalidRequestError(
            "cache_checkpoints",
            f"cache_checkpoints holds position {last}, but {name} has {len(prompt)} tokens.",
        )
