"""The fields of requests for answers, as tables: parsers read by them, /openapi.json shows them."""

from __future__ import annotations

from megatron_hybrid.request import (
    MAX_CACHE_CHECKPOINTS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_NAME_LENGTH,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKEN_IDS,
    MIN_REPETITION_PENALTY,
    MIN_TOP_P,
)
from megatron_hybrid.server.http.field_types import (
    AnyObject,
    Boolean,
    FieldType,
    Integer,
    Integers,
    Labels,
    LogitBias,
    Number,
    StopStrings,
    Text,
    Unsupported,
)

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_WORD_LENGTH = 64  # of what OpenAI has a few fixed words for
MAX_METADATA = 64
MAX_TOKENS = 2**31 - 1
MAX_TIMEOUT = 86_400.0
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions

# Names are those of SamplingParams.
SAMPLING: dict[str, FieldType] = {
    "temperature": Number(0.0, 100.0, "0 takes the most likely token.", 1.0),
    "top_p": Number(
        MIN_TOP_P, 1.0, "Only the likeliest tokens that together have this probability.", 1.0
    ),
    "top_k": Integer(-1, MAX_TOKENS, "Only this many of the likeliest tokens; 0 or -1: all.", 0),
    "min_p": Number(0.0, 1.0, "Only tokens this likely in relation to the likeliest one.", 0.0),
    "seed": Integer(
        -(2**63), 2**64 - 1, "The same seed gives the same tokens, whatever else runs beside it."
    ),
    "n": Integer(1, MAX_CHOICES, "Answers to each prompt.", 1),
    "stop": StopStrings(
        MAX_STOP_STRINGS, MAX_STOP_LENGTH, "Strings that end the answer; not part of it."
    ),
    "stop_token_ids": Integers(0, MAX_TOKENS, MAX_STOP_TOKEN_IDS, "Token ids that end the answer."),
    "ignore_eos": Boolean("Go on after the model's own end of the answer."),
    "min_tokens": Integer(0, MAX_TOKENS, "The answer does not end by itself before these.", 0),
    "presence_penalty": Number(
        -MAX_PENALTY,
        MAX_PENALTY,
        "Subtracted from the logits of tokens that the answer holds.",
        0.0,
    ),
    "frequency_penalty": Number(
        -MAX_PENALTY,
        MAX_PENALTY,
        "Subtracted from a token's logit as often as the answer holds it.",
        0.0,
    ),
    "repetition_penalty": Number(
        MIN_REPETITION_PENALTY,
        MAX_REPETITION_PENALTY,
        "Makes tokens of prompt and answer less likely if above 1.",
        1.0,
    ),
    "logit_bias": LogitBias(
        MAX_LOGIT_BIASES,
        -MAX_LOGIT_BIAS,
        MAX_LOGIT_BIAS,
        "By token id, what is added to its logit.",
    ),
}

# What else both endpoints understand; `stream_options` and `response_format` are objects.
COMMON: dict[str, FieldType] = {
    "model": Text(MAX_NAME_LENGTH, "The model's name; left out: the one that is served."),
    "user": Text(MAX_NAME_LENGTH, "Whose request it is, for the client's own records."),
    "safety_identifier": Text(MAX_NAME_LENGTH, "The newer name of user."),
    "metadata": Labels(
        MAX_METADATA, MAX_NAME_LENGTH, "For the client's own records; nothing keeps it here."
    ),
    "store": Boolean("Changes nothing: no answer is stored for a later request to ask for."),
    "service_tier": Text(MAX_WORD_LENGTH, "Changes nothing; priority says who runs first."),
    "prompt_cache_key": Text(
        MAX_NAME_LENGTH, "Changes nothing: equal beginnings of prompts are found by themselves."
    ),
    "prompt_cache_retention": Text(
        MAX_WORD_LENGTH, "Changes nothing: what is cached stays while there is room."
    ),
    "prompt_cache_options": AnyObject("Changes nothing: the cache chooses by itself."),
    "return_token_ids": Boolean(
        "Give the token ids of the prompt and, as token_ids of every choice, of the answer."
    ),
    "stream": Boolean("Send the answer as server-sent events while it is generated."),
    "cache_salt": Text(
        MAX_NAME_LENGTH, "Requests share cached prefixes only if their salts are equal."
    ),
    "priority": Integer(-MAX_PRIORITY, MAX_PRIORITY, "A smaller number runs first.", 0),
    "cache_checkpoints": Integers(
        1, MAX_TOKENS, MAX_CACHE_CHECKPOINTS, "Positions in the prompt to keep a state at."
    ),
    "timeout": Number(
        0.0,
        MAX_TIMEOUT,
        "Seconds after which the request is given up with status 504; the server's own limit "
        "holds too.",
        above_low=True,
    ),
}

CHAT: dict[str, FieldType] = {
    "max_tokens": Integer(1, MAX_TOKENS, "The older name of max_completion_tokens."),
    "max_completion_tokens": Integer(
        1, MAX_TOKENS, "The answer's longest length; left out: as long as fits."
    ),
    "logprobs": Boolean("Give the log-probability of every token of the answer."),
    "top_logprobs": Integer(
        0, MAX_LOGPROBS, "And of this many likeliest tokens at its place; needs logprobs."
    ),
    "verbosity": Text(MAX_WORD_LENGTH, "Changes nothing: ask for short answers in a message."),
}

# Of chats, for their template.
TEMPLATE: dict[str, FieldType] = {
    "chat_template_kwargs": AnyObject("Variables of the model's chat template."),
    "reasoning_effort": Text(
        MAX_WORD_LENGTH, "The template's variable of this name, unless chat_template_kwargs has it."
    ),
}

COMPLETION: dict[str, FieldType] = {
    "max_tokens": Integer(
        0,
        MAX_TOKENS,
        "The answer's longest length; 0 needs echo, and gives only the prompt.",
        COMPLETION_MAX_TOKENS,
    ),
    "logprobs": Integer(
        0, MAX_LOGPROBS, "Give the log-probability of every token and of this many likeliest ones."
    ),
    "echo": Boolean("Give the prompt's text before the answer's, and its log-probabilities."),
}

# OpenAI's, and of vLLM's and SGLang's those that clients and routers send without being asked to.
_UNSUPPORTED: dict[str, FieldType] = {
    "skip_special_tokens": Unsupported(True),
    "spaces_between_special_tokens": Unsupported(True),
    "include_stop_str_in_output": Unsupported(False),
    "use_beam_search": Unsupported(False),
    "length_penalty": Unsupported(1.0),
    "best_of": Unsupported(1),
    "truncate_prompt_tokens": Unsupported(),
    "prompt_logprobs": Unsupported(),
    "guided_json": Unsupported(),
    "guided_regex": Unsupported(),
    "guided_choice": Unsupported(),
    "guided_grammar": Unsupported(),
    "structured_outputs": Unsupported(),
    "no_stop_trim": Unsupported(False),
    "return_hidden_states": Unsupported(False),
}
UNSUPPORTED_CHAT: dict[str, FieldType] = {
    **_UNSUPPORTED,
    "functions": Unsupported([]),
    "function_call": Unsupported("none", "auto"),
    "modalities": Unsupported(["text"]),
    "audio": Unsupported(),
    "prediction": Unsupported(),
    "moderation": Unsupported(),
    "web_search_options": Unsupported(),
    "echo": Unsupported(False),
    "add_generation_prompt": Unsupported(True),
    "continue_final_message": Unsupported(False),
    "add_special_tokens": Unsupported(False),
    "chat_template": Unsupported(),
    "documents": Unsupported(),
    "separate_reasoning": Unsupported(True),
    "stream_reasoning": Unsupported(True),
}
UNSUPPORTED_COMPLETION: dict[str, FieldType] = {
    **_UNSUPPORTED,
    "suffix": Unsupported(""),
    "add_special_tokens": Unsupported(True),
}
STREAM_OPTIONS: dict[str, FieldType] = {
    "include_usage": Boolean("Send a last chunk with the usage of the whole request."),
    "continuous_usage_stats": Boolean(
        "With include_usage: give every chunk the usage of its own choice so far."
    ),
    "include_obfuscation": Unsupported(False),
}
