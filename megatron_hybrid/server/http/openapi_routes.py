"""Every route, what it accepts and what it answers: the table that /openapi.json is made of."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatron_hybrid.server.http.anthropic.errors import OVERLOADED
from megatron_hybrid.server.http.protocol import (
    adapters,
    answers,
    anthropic,
    anthropic_answers,
    requests,
    response_answers,
    scoring,
    weights,
)
from megatron_hybrid.server.http.protocol.parsing import Body
from megatron_hybrid.server.http.protocol.response_queries import InputItemsQuery, RetrieveQuery
from megatron_hybrid.server.http.protocol.responses import ResponsesRequest
from megatron_hybrid.server.http.tokens import shapes as tokens
from megatron_hybrid.server.http.tokens.control_bodies import AbortRequestBody
from megatron_hybrid.server.http.tokens.generate_body import GenerateRequest
from megatron_hybrid.server.http.tokens.inference_body import InferenceRequest

# For load balancers and scrapers, which hold no key, and for the page that asks for one.
OPEN_ROUTES = ("/health", "/ping", "/metrics", "/openapi.json", "/")
JSON = "application/json"
_ASKS = (500, 503)
_GENERATES = (404, 504, *_ASKS)
_CONTROLS = (409, *_ASKS)


class Route(NamedTuple):
    """One operation. `answer`: what a 200 holds, of the content type `kind`; `events`: what a
    stream holds, and `stream` says it; `errors`: other statuses, besides those that every route
    with a body or a key has, and `error` what they hold; `query`: the kind that has its parameters.
    """

    path: str
    summary: str
    answer: Any
    body: Any = ()  # a kind, or one of several
    errors: tuple[int, ...] = ()
    method: str = "post"
    kind: str = JSON
    events: Any = None
    stream: str = ""
    query: type[Body] | None = None
    error: Any = answers.Error

    @property
    def bodies(self) -> tuple[type, ...]:
        """What it takes one of."""
        return self.body if isinstance(self.body, tuple) else (self.body,)


def _get(path: str, summary: str, answer: Any, *errors: int, kind: str = JSON) -> Route:
    return Route(path, summary, answer, errors=errors, method="get", kind=kind)


def _control(path: str, summary: str, body: Any = ()) -> Route:
    return Route(path, summary, answers.Controlled, body, _CONTROLS)


def _sglang(path: str, summary: str, body: Any) -> Route:
    return Route(path, summary, answers.Succeeded, body, _CONTROLS, error=answers.Failed)


_CHAT = ("/v1/chat/completions", "Answer a chat.")
_TEXT = ("/v1/completions", "Continue texts.")
_MESSAGES = ("/v1/messages", "Answer a chat, in Anthropic's form.", anthropic_answers.Message)
_COUNT = ("/v1/messages/count_tokens", "How long its prompt is.", anthropic_answers.InputTokens)
_TOKENIZE = ("/tokenize", "Text or a chat as token ids.", answers.Tokens)
_SCORE = ("/score_tokens", "How likely answers are behind a prompt.", answers.Scores)
_RENDER_CHAT = (f"{_CHAT[0]}/render", "Its prompt as token ids.", answers.RenderedPrompt)
_RENDER_TEXT = (f"{_TEXT[0]}/render", "Its prompts as token ids.", list[answers.RenderedPrompt])
_PAUSE = "Start no more requests; answered when none runs."
_UPDATE = "Overwrite the model's weights, from a folder or another process."
_CHECK = "A digest of all weights, and whether it is the one of before."
_LOAD = ("/load_lora_adapter", "Let requests have an adapter.", adapters.LoadAdapter)
_UNLOAD = ("/unload_lora_adapter", "No more requests have it.", adapters.UnloadAdapter)
_FROM_TENSORS = (
    "/load_lora_adapter_from_tensors",
    "Let requests have an adapter whose tensors come from another process.",
    adapters.LoadAdapterFromTensors,
)
_SLEEP = "Give the device's memory back; requests wait meanwhile."
_WAKE = "Take the device's memory again, and go on when all is there."
_START = ("The updates that come are pieces of one.", weights.StartUpdateRequest)
_FINISH = ("All pieces are there.", weights.FinishUpdateRequest)
_GROUP = "Meet a trainer in a group through which it sends weights."
_INFO = ("What a router wants to know: the model's name.", answers.ServerInfo)
_MODEL_INFO = ("What a router wants to know of the model.", answers.ModelInfo)
_LOADS = ("/v1/loads", "How much each replica has to do.", answers.Loads, 503)
_GET_LOAD = ("/get_load", "The same as /load.", answers.RunningOrWaiting, 503)
_TO_DONE = (
    "as its data, or an Error, after which no other chunk comes; the last one's data is [DONE]."
)
_RESPOND = ("/v1/responses", "Answer, and store the answer.", response_answers.Response)
_RESPONSE = "/v1/responses/{name}"
_READ = (_RESPONSE, "A stored response.", response_answers.Response)
_ITEMS = (f"{_RESPONSE}/input_items", "What it answers.", response_answers.ItemList)
_DROP = (_RESPONSE, "Store it no more.", response_answers.ResponseDeleted)
_CANCEL = (f"{_RESPONSE}/cancel", "Always refused.", response_answers.Response)
_STORED = (400, 404, 503)
_GENERATE = ("/generate", "Continue prompts of token ids, as SGLang has it.")
_INFER = ("/inference/v1/generate", "Continue a prompt of token ids, as vLLM has it.")
_FLUSH = ("/flush_cache", "Forget every cached prefix, unless requests run or wait.", str)
_GENERATES_ONE = ("/health_generate", "Whether tokens are generated.", tokens.Healthy)
_VERSION = ("What trainers call the weights.", tokens.WeightVersion, 503)
ROUTES = [
    Route(
        *(*_CHAT, answers.ChatCompletion, requests.ChatRequest, _GENERATES),
        events=answers.ChatCompletionChunk,
        stream=f"ChatCompletionChunk {_TO_DONE}",
    ),
    Route(
        *(*_TEXT, answers.Completion, requests.CompletionRequest, _GENERATES),
        events=answers.CompletionChunk,
        stream=f"CompletionChunk {_TO_DONE}",
    ),
    Route(
        *(*_RESPOND, ResponsesRequest, _GENERATES),
        events=response_answers.ResponseEvent,
        stream="Response...Event as its data, and its type as its name.",
    ),
    Route(
        *(*_MESSAGES, anthropic.MessagesRequest, (*_GENERATES, OVERLOADED)),
        events=anthropic_answers.Event,
        stream="Message..., ContentBlock... or Ping as its data, and its type as its name.",
        error=anthropic_answers.MessagesError,
    ),
    Route(
        *(*_GENERATE, tokens.GeneratedOrList, GenerateRequest, _GENERATES),
        events=tokens.Generated,
        stream=f"Generated {_TO_DONE}",
    ),
    Route(
        *(*_INFER, tokens.Inferred, InferenceRequest, _GENERATES),
        events=tokens.InferredChunk,
        stream=f"InferredChunk {_TO_DONE}",
    ),
    Route(
        *(*_COUNT, anthropic.CountTokensRequest, (404, *_ASKS)),
        error=anthropic_answers.MessagesError,
    ),
    Route(*_READ, method="get", errors=_STORED, query=RetrieveQuery),
    Route(*_ITEMS, method="get", errors=_STORED, query=InputItemsQuery),
    Route(*_DROP, method="delete", errors=_STORED),
    Route(*_CANCEL, errors=_STORED),
    _get("/v1/models", "The model that is served.", answers.ModelList),
    _get("/v1/models/{name}", "One model.", answers.Model, 404),
    _get("/health", "Whether requests are taken.", answers.Health, 503),
    _get("/ping", "The same as /health.", answers.Health, 503),
    _get("/load", "How many requests run or wait.", answers.Load, 503),
    _get("/version", "This package's version.", answers.Version),
    _get("/metrics", "Figures for Prometheus.", str, kind="text/plain"),
    _get("/stats", "Figures as JSON.", answers.Stats, 503),
    *(_get(path, *_INFO) for path in ("/server_info", "/get_server_info")),
    *(_get(path, *_MODEL_INFO) for path in ("/model_info", "/get_model_info")),
    _get(*_GET_LOAD),
    _get(*_LOADS),
    _get("/openapi.json", "This description.", answers.Description),
    _get("/", "A page with a chat and the cache.", str, kind="text/html"),
    Route(*_SCORE, scoring.ScoreTokensRequest, _GENERATES),
    Route(*_RENDER_CHAT, requests.ChatRequest, (404, *_ASKS)),
    Route(*_RENDER_TEXT, requests.CompletionRequest, (404, *_ASKS)),
    Route(*_TOKENIZE, (requests.TokenizeTextRequest, requests.TokenizeChatRequest), _ASKS),
    Route("/detokenize", "Token ids as text.", answers.Text, requests.DetokenizeRequest, _ASKS),
    Route("/abort", "End an answer early.", answers.Aborted, requests.AbortRequest, _ASKS),
    Route("/abort_request", "End answers early.", answers.Aborted, AbortRequestBody, _ASKS),
    *(
        Route(*_FLUSH, errors=(400, 403, *_ASKS), method=method, kind="text/plain")
        for method in ("get", "post")
    ),
    *(Route(*_GENERATES_ONE, errors=_ASKS, method=method) for method in ("get", "post")),
    _get("/liveness", "Whether the engine's process answers.", tokens.Healthy, 503),
    *(_get(path, *_VERSION) for path in ("/weight_version", "/get_weight_version")),
    Route("/reset_prefix_cache", "Forget every cached prefix.", answers.Done, errors=_ASKS),
    _control("/pause", _PAUSE, weights.PauseRequest)._replace(query=weights.PauseQuery),
    _control("/resume", "Go on after a pause.", weights.ResumeRequest),
    _control("/update_weights", _UPDATE, weights.UpdateWeightsRequest),
    _control("/update_weight_version", "Name the weights.", weights.NameWeightsRequest),
    *(_control(f"/{one}_weight_update", *_START) for one in ("start", "begin")),
    *(_control(f"/{one}_weight_update", *_FINISH) for one in ("finish", "end")),
    _control("/init_weight_transfer_engine", _GROUP, weights.InitTransferRequest),
    _control("/shutdown_weight_transfer_engine", "Leave that group."),
    _control("/init_broadcaster", _GROUP, weights.InitBroadcasterRequest),
    _get("/is_paused", "Whether requests wait for /resume.", answers.Paused, 403, 503),
    _get("/weight_info", "What answers call the weights.", answers.WeightInfo, 403, 503),
    *(
        Route(f"/v1{path}", summary, str, body, (404, *_CONTROLS), kind="text/plain")
        for path, summary, body in (_LOAD, _UNLOAD)
    ),
    *(
        Route(path, summary, answers.Loaded, body, (*more, *_CONTROLS), error=answers.NotLoaded)
        for (path, summary, body), more in ((_LOAD, (404,)), (_UNLOAD, ()), (_FROM_TENSORS, ()))
    ),
    _control("/sleep", _SLEEP)._replace(query=weights.SleepQuery),
    _control("/release_kv_cache_memory", _SLEEP),
    _control("/wake_up", _WAKE)._replace(query=weights.WakeUpQuery),
    _get("/is_sleeping", "The same as /is_paused.", answers.Sleeping, 403, 503),
    *(
        Route(path, summary, None, weights.MemoryRequest, (403, *_CONTROLS), method)
        for path, summary in (
            ("/release_memory_occupation", _SLEEP),
            ("/resume_memory_occupation", _WAKE),
        )
        for method in ("get", "post")
    ),
    _sglang("/weights_checker", _CHECK, weights.CheckWeightsRequest)._replace(
        answer=answers.CheckedWeights
    ),
    _get(
        "/get_world_size", "Ranks that a group with a trainer has.", answers.WorldSize, 403, 503
    )._replace(query=weights.WorldSizeQuery),
    _sglang("/pause_generation", _PAUSE, weights.PauseGenerationRequest),
    _sglang("/continue_generation", "Go on after a pause.", weights.ResumeRequest),
    _sglang("/init_weights_update_group", _GROUP, weights.InitGroupRequest),
    _sglang("/destroy_weights_update_group", "Leave it.", weights.DestroyGroupRequest),
    _sglang("/update_weights_from_distributed", _UPDATE, weights.FromDistributedRequest),
    _sglang("/update_weights_from_tensor", _UPDATE, weights.FromTensorRequest),
    _sglang("/update_weights_from_disk", _UPDATE, weights.FromDiskRequest),
]
