"""The bodies of requests, field by field: what is read, and what /openapi.json shows."""

# mypy: disable-error-code="valid-type"

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from megatron_hybrid import request as limits
from megatron_hybrid.request import SamplingParams
from megatron_hybrid.server.http.protocol.messages import Messages, OnlyEmptyList
from megatron_hybrid.server.http.protocol.parsing import Body, Unsupported, only
from megatron_hybrid.server.http.protocol.structural_tags import StructuralTag
from megatron_hybrid.server.http.protocol.tools import (
    AnyObject,
    AnyToolChoice,
    Description,
    Name,
    ToolList,
)

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_BAD_WORDS = limits.MAX_BAD_WORDS // 2  # each may become two
MAX_CHOICE_TEXTS = 1024
MAX_WORD_LENGTH = 64  # of what OpenAI has a few fixed words for
MAX_METADATA = 64
MAX_TIMEOUT = 86_400.0
MAX_PATH_LENGTH = 4096
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
TOKEN_ID = "Token id"  # by which /openapi.json finds them, to say which the model knows
_PLAIN = SamplingParams()

Count = Annotated[int, Meta(ge=0, le=limits.MAX_TOKENS)]
Length = Annotated[int, Meta(ge=1, le=limits.MAX_TOKENS)]
# -1 says the same as null, as vLLM has it.
Budget = Annotated[int, Meta(ge=-1, le=limits.MAX_TOKENS)]
TokenId = Annotated[int, Meta(ge=0, title=TOKEN_ID)]
Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Penalty = Annotated[float, Meta(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)]
Factor = Annotated[float, Meta(ge=limits.MIN_REPETITION_PENALTY, le=limits.MAX_REPETITION_PENALTY)]
Bias = Annotated[float, Meta(ge=-limits.MAX_LOGIT_BIAS, le=limits.MAX_LOGIT_BIAS)]
LogitBias = Annotated[
    dict[Count, Bias],
    Meta(
        max_length=limits.MAX_LOGIT_BIASES,
        extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}},
    ),
]
Word = Annotated[str, Meta(max_length=MAX_WORD_LENGTH)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
BadWord = Annotated[str, Meta(min_length=1, max_length=limits.MAX_BAD_WORD_LENGTH)]
Logprobs = Annotated[int, Meta(ge=0, le=limits.MAX_LOGPROBS)]
Filled = Annotated[str, Meta(min_length=1)]
FilledIds = Annotated[list[TokenId], Meta(min_length=1)]
GrammarText = Annotated[str, Meta(min_length=1, max_length=limits.MAX_GRAMMAR_LENGTH)]
Choices = Annotated[list[GrammarText], Meta(min_length=1, max_length=MAX_CHOICE_TEXTS)]


_OnlyTrue, _OnlyFalse, _OnlyOne = only(True), only(False), only(1)
_OnlyEmptyText, _OnlyTextModality = only(""), only(["text"])
_OnlyNoneOrAuto, _OnlyNoBudget = only("none", "auto"), only(-1)


class Drawing(Body):
    """How the next token is drawn, by the names of SamplingParams.

    temperature: 0 takes the most likely token.
    top_p: Only the likeliest tokens that together have this probability.
    top_k: Only this many of the likeliest tokens; 0 or -1: all.
    min_p: Only tokens this likely in relation to the likeliest one.
    repetition_penalty: Makes tokens of prompt and answer less likely if above 1.
    seed: The same seed gives the same tokens, whatever else runs beside it.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=limits.MAX_TEMPERATURE)] | None = (
        _PLAIN.temperature
    )
    top_p: Annotated[float, Meta(ge=limits.MIN_TOP_P, le=1.0)] | None = _PLAIN.top_p
    top_k: Annotated[int, Meta(ge=-1, le=limits.MAX_TOKENS)] | None = _PLAIN.top_k
    min_p: Share | None = _PLAIN.min_p
    repetition_penalty: Factor | None = _PLAIN.repetition_penalty
    # SamplingParams checks it: msgspec's own limits are below 2**63.
    seed: (
        Annotated[int, Meta(extra_json_schema={"minimum": -(2**63), "maximum": 2**64 - 1})] | None
    ) = None


class Sampling(Drawing):
    """How tokens are chosen, and what ends an answer.

    n: Answers to each prompt.
    stop: Strings that end the answer; not part of it.
    stop_token_ids: Token ids that end the answer.
    ignore_eos: Go on after the model's own end of the answer.
    min_tokens: The answer does not end by itself before these.
    presence_penalty: Subtracted from the logits of tokens that the answer holds.
    frequency_penalty: Subtracted from a token's logit as often as the answer holds it.
    logit_bias: By token id, what is added to its logit.
    allowed_token_ids: The answer has no other ids. Not beside a form of the answer.
    bad_words: Texts that the answer does not hold, unless nothing else may come: neither as they
        begin a text nor as they stand behind a space.
    """

    n: Annotated[int, Meta(ge=1, le=limits.MAX_CHOICES)] | None = _PLAIN.n
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=limits.MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = _PLAIN.ignore_eos
    min_tokens: Count | None = _PLAIN.min_tokens
    presence_penalty: Penalty | None = _PLAIN.presence_penalty
    frequency_penalty: Penalty | None = _PLAIN.frequency_penalty
    logit_bias: LogitBias | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1, max_length=limits.MAX_ALLOWED_TOKEN_IDS)] | None
    ) = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None


class PlainText(Body, tag_field="type", tag="text"):
    """Any text."""


class JsonObject(Body, tag_field="type", tag="json_object"):
    """Any JSON object."""


class NamedSchema(Body):
    """OpenAI's frame for a JSON Schema.

    schema: The answer's JSON Schema; left out: any JSON object. An object has no properties but
        those that its schema names, unless it says otherwise. A schema with a feature that cannot
        be followed is refused.
    strict: Changes nothing: the answer always follows the schema.
    """

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}\Z")]
    description: Description | None = None
    schema: AnyObject | None = None
    strict: bool | None = None


class JsonSchemaFormat(Body, tag_field="type", tag="json_schema"):
    """JSON that follows a schema."""

    json_schema: NamedSchema


class GrammarFormat(Body, tag_field="type", tag="grammar"):
    """Text that follows a grammar, in GBNF or Lark."""

    grammar: GrammarText


class RegexFormat(Body, tag_field="type", tag="regex"):
    """Text that a regular expression matches as a whole."""

    value: GrammarText


class StructuredOutputs(Body):
    """vLLM's forms of an answer; only one of them.

    json: A JSON Schema, as an object or as text.
    regex: A regular expression that matches the whole answer.
    choice: The answer is one of these texts.
    grammar: In GBNF (with a rule named root) or in llguidance's Lark (with one named start).
    json_object: Any JSON object.
    structural_tag: What response_format of this type has besides, as an object or as text.
    disable_any_whitespace: Changes nothing: JSON comes without free white space.
    """

    json: AnyObject | GrammarText | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    json_object: bool | None = None
    structural_tag: AnyObject | GrammarText | None = None
    disable_any_whitespace: bool | None = None

    disable_additional_properties: Unsupported | None = None
    whitespace_pattern: Unsupported | None = None


class StreamOptions(Body):
    """What a stream holds besides the answer.

    include_usage: Send a last chunk with the usage of the whole request.
    continuous_usage_stats: With include_usage: give every chunk the usage of its own choice so far.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False
    include_obfuscation: _OnlyFalse | None = None


class CustomParams(Body):
    """SGLang's.

    thinking_budget: SGLang's name of thinking_token_budget.
    """

    thinking_budget: Budget | None = None


class KvTransferParams(Body, forbid_unknown_fields=False):
    """vLLM's frame for what a server says that has computed the prompt, or computes it. Its clients
    put more fields in (do_remote_prefill, remote_host and others), which change nothing here.

    peer: That server's address, as its answer has it; one of --disaggregation-peers.
    request: Its request, as the first event of a stream has it: what that computes is read
        meanwhile.
    """

    peer: Name | None = None
    request: Name | None = None


class AnswerRequest(Sampling):
    """What both endpoints understand.

    model: The model's name; left out: the one that is served.
    stream: Send the answer as server-sent events while it is generated.
    stream_options: Needs `stream` to be true.
    response_format: The answer's form, unless max_tokens cuts it short.
    structured_outputs: The same in vLLM's words; not beside response_format.
    guided_json: The older name of structured_outputs.json.
    guided_regex: The older name of structured_outputs.regex.
    guided_choice: The older name of structured_outputs.choice.
    guided_grammar: The older name of structured_outputs.grammar.
    json_schema: SGLang's name of structured_outputs.json.
    regex: SGLang's name of structured_outputs.regex.
    ebnf: SGLang's name of structured_outputs.grammar.
    return_token_ids: Give the token ids of the prompt and, as token_ids of every choice, of the
        answer.
    return_weight_versions: Say, with the end of every choice, which tokens are of which weights;
        an answer that goes on over an update says so in any case.
    skip_special_tokens: false: the text shows special tokens, too.
    include_stop_str_in_output: The text ends with the stop string, or the text of the token id,
        that ended it; with that of a special one only if they are shown.
    cache_salt: Requests share cached prefixes only if their salts are equal.
    priority: A smaller number runs first.
    cache_checkpoints: Positions in the prompt to keep a state at.
    kv_transfer_params: What a server with --role prefill has answered to the same request.
    truncate_prompt_tokens: Only this many tokens of the prompt, the last ones; -1: as many as leave
        room for the answer.
    timeout: Seconds after which the request is given up with status 504; the server's own limit
        holds too.
    user: Whose request it is, for the client's own records.
    safety_identifier: The newer name of user.
    metadata: For the client's own records; nothing keeps it here.
    store: Changes nothing: no answer is stored for a later request to ask for.
    service_tier: Changes nothing; priority says who runs first.
    prompt_cache_key: Changes nothing: equal beginnings of prompts are found by themselves.
    prompt_cache_retention: Changes nothing: what is cached stays while there is room.
    prompt_cache_options: Changes nothing: the cache chooses by itself.
    """

    model: Name | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: (
        PlainText | JsonObject | JsonSchemaFormat | GrammarFormat | RegexFormat | StructuralTag
        | None
    ) = None  # fmt: skip
    structured_outputs: StructuredOutputs | None = None
    guided_json: AnyObject | GrammarText | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    json_schema: AnyObject | GrammarText | None = None
    regex: GrammarText | None = None
    ebnf: GrammarText | None = None
    return_token_ids: bool | None = False
    return_weight_versions: bool | None = False
    skip_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    cache_salt: Name | None = None
    priority: Annotated[int, Meta(ge=-limits.MAX_PRIORITY, le=limits.MAX_PRIORITY)] | None = 0
    cache_checkpoints: (
        Annotated[list[Length], Meta(max_length=limits.MAX_CACHE_CHECKPOINTS)] | None
    ) = None
    kv_transfer_params: KvTransferParams | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=limits.MAX_TOKENS)] | None = None
    timeout: Annotated[float, Meta(gt=0.0, le=MAX_TIMEOUT)] | None = None
    user: Name | None = None
    safety_identifier: Name | None = None
    metadata: (
        Annotated[dict[Name, Name | int | float | bool | None], Meta(max_length=MAX_METADATA)]
        | None
    ) = None
    store: bool | None = False
    service_tier: Word | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_retention: Word | None = None
    prompt_cache_options: AnyObject | None = None

    # OpenAI's, and of vLLM's and SGLang's those that clients and routers send without being asked.
    spaces_between_special_tokens: _OnlyTrue | None = None
    use_beam_search: _OnlyFalse | None = None
    length_penalty: _OnlyOne | None = None
    best_of: _OnlyOne | None = None
    prompt_logprobs: Unsupported | None = None
    no_stop_trim: _OnlyFalse | None = None
    return_hidden_states: _OnlyFalse | None = None


class ChatRequest(AnswerRequest, kw_only=True):
    """Of /v1/chat/completions.

    chat_template_kwargs: Variables of the model's chat template.
    reasoning_effort: The template's variable of this name, unless chat_template_kwargs has it;
        none also turns thoughts off.
    enable_thinking: The template's variable of this name, unless chat_template_kwargs has it.
    thinking_token_budget: After so many tokens of thoughts they are ended; 0: at once; -1 or left
        out: when the model ends them. Needs a model whose thoughts have marks.
    thinking_budget: Qwen's name of thinking_token_budget.
    custom_params: SGLang's place for its name of thinking_token_budget.
    tools: Functions that the answer may call; their names differ.
    tool_choice: Whether, or which of the tools, the answer calls.
    parallel_tool_calls: Whether an answer may hold more than one call.
    max_tokens: The older name of max_completion_tokens.
    max_completion_tokens: The answer's longest length; left out: as long as fits.
    logprobs: Give the log-probability of every token of the answer.
    top_logprobs: And of this many likeliest tokens at its place; needs logprobs.
    add_generation_prompt: false: nothing announces the answer; left out: true, unless
        continue_final_message is.
    continue_final_message: The answer goes on with the last message, which is the assistant's.
    verbosity: Changes nothing: ask for short answers in a message.
    """

    messages: Messages
    chat_template_kwargs: AnyObject | None = None
    reasoning_effort: Word | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Budget | None = None
    thinking_budget: Budget | None = None
    custom_params: CustomParams | None = None
    tools: ToolList | None = None
    tool_choice: AnyToolChoice = None
    parallel_tool_calls: bool | None = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    logprobs: bool | None = False
    top_logprobs: Logprobs | None = None
    verbosity: Word | None = None

    functions: OnlyEmptyList | None = None
    function_call: _OnlyNoneOrAuto | None = None
    modalities: _OnlyTextModality | None = None
    audio: Unsupported | None = None
    prediction: Unsupported | None = None
    moderation: Unsupported | None = None
    web_search_options: Unsupported | None = None
    echo: _OnlyFalse | None = None
    add_special_tokens: _OnlyFalse | None = None
    chat_template: Unsupported | None = None
    documents: Unsupported | None = None
    include_reasoning: _OnlyTrue | None = None
    separate_reasoning: _OnlyTrue | None = None
    stream_reasoning: _OnlyTrue | None = None


class CompletionRequest(AnswerRequest, kw_only=True):
    """Of /v1/completions.

    prompt: Text, texts, token ids, or lists of token ids.
    max_tokens: The answer's longest length; 0 needs echo, and gives only the prompt.
    logprobs: Give the log-probability of every token and of this many likeliest ones.
    echo: Give the prompt's text before the answer's, and its log-probabilities.
    """

    prompt: Filled | Annotated[list[Filled | TokenId | FilledIds], Meta(min_length=1)]
    max_tokens: Count | None = COMPLETION_MAX_TOKENS
    logprobs: Logprobs | None = None
    echo: bool | None = False

    suffix: _OnlyEmptyText | None = None
    thinking_token_budget: _OnlyNoBudget | None = None
    thinking_budget: _OnlyNoBudget | None = None
    add_special_tokens: _OnlyTrue | None = None


class TokenizeTextRequest(Body):
    """Of /tokenize."""

    prompt: str
    add_special_tokens: bool | None = True


class TokenizeChatRequest(Body):
    """Of /tokenize: the fields of a ChatRequest that its prompt is made of."""

    messages: Messages
    chat_template_kwargs: AnyObject | None = None
    reasoning_effort: Word | None = None
    enable_thinking: bool | None = None
    tools: ToolList | None = None
    tool_choice: AnyToolChoice = None
    parallel_tool_calls: bool | None = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    cache_salt: Name | None = None


class DetokenizeRequest(Body):
    """Of /detokenize."""

    tokens: list[TokenId]


class AbortRequest(Body):
    """Of /abort.

    request_id: The `id` of an answer.
    """

    request_id: Name
