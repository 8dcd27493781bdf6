"""What `st run` checks besides its own checks; SCHEMATHESIS_HOOKS names this module."""

from __future__ import annotations

import json
import os
from itertools import count
from typing import Any

import schemathesis

# Codes of refusals that the description rules out: the body had the wrong shape.
_WRONG_SHAPE = {
    "invalid_type",
    "invalid_json",
    "missing_required_parameter",
    "unknown_parameter",
    "unsupported_parameter",
}
# Where the shape does not say all: what the model's vocabulary, context or template allows, two
# fields that contradict each other, a JSON Schema that no answer can follow, a folder's contents,
# a name that is not loaded.
_DEEPER = (
    *("prompt", "messages", "tokens", "logit_bias", "response_format", "cache_checkpoints"),
    *("max_tokens", "max_completion_tokens", "min_tokens", "stream_options", "top_logprobs"),
    *("chat_template_kwargs", "tools", "tool_choice", "path", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("cache_control", "output_config", "output_format"),
    *("bad_words", "allowed_token_ids", "add_generation_prompt", "continue_final_message"),
    *("input", "text", "max_output_tokens"),
    *("thinking_token_budget", "thinking_budget", "custom_params"),
    *("json_schema", "regex", "ebnf", "truncate_prompt_tokens"),
    *("weight_dir", "update_info", "init_info", "host", "group_name", "names", "model_path"),
    *("serialized_named_tensors", "body", "action"),
    *("input_ids", "sampling_params", "logprob_start_len", "top_logprobs_num", "return_logprob"),
    *("lora_path", "lora_name", "rid"),
)


# Of the cases at the edges of fields, many thousands, CI sends every twelfth, the same ones in each
# run. Routes that have the same fields take turns.
_SHARE = 1 if os.environ.get("TESTS") == "all" else 12
_cases = count()


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """Whether this case is sent."""
    at_edges = case.meta is not None and case.meta.phase.name.value == "coverage"
    return not at_edges or next(_cases) % _SHARE == 0


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Time limits that no request keeps end in 504, which is right but teaches nothing."""
    body = case.body
    if isinstance(body, dict) and isinstance(limit := body.get("timeout"), (int, float)):
        body["timeout"] = limit if limit <= 0 or isinstance(limit, bool) else max(limit, 60)


@schemathesis.check
def refusals_of_valid_bodies_have_a_reason(ctx: Any, response: Any, case: Any) -> None:
    """A body that follows the description is refused only for what a description cannot say."""
    if (
        response.status_code != 400
        or case.meta is None
        or not case.meta.generation.mode.is_positive
    ):
        return
    error = response.json()["error"]
    if "code" not in error:  # Anthropic's: only its sentence names the field
        without = "has no place for tools" in error["message"]
        field = "tools" if without else error["message"].split(" ")[0]
        error |= {"code": error["details"]["error_code"], "param": field}
    # JSON Schema counts 2.0 as an integer; the server takes whole numbers without a fraction.
    _, is_one, rule = error["message"].partition(".0; it must be ")
    if error["code"] == "invalid_type" and is_one and "a whole number" in rule:
        return
    # Whether there may be tools is up to the model's chat template.
    assert error["code"] not in _WRONG_SHAPE or error["param"] == "tools", error
    assert error["param"].partition(".")[0].partition("[")[0] in _DEEPER, error


@schemathesis.check
def streams_are_server_sent_events(ctx: Any, response: Any, case: Any) -> None:
    """Every line of a stream is an event with JSON, and the last one says that it is complete."""
    if "text/event-stream" not in (response.headers.get("content-type") or [""])[0]:
        return
    *events, last, end = response.content.decode("utf-8").split("\n\n")
    assert end == ""
    if case.path == "/v1/responses":
        check_events_of_a_response([*events, last])
        return
    if case.path == "/v1/messages":
        check_events_of_a_message([*events, last])
        return
    assert last == "data: [DONE]"
    for event in events:
        assert event.startswith("data: ")
        chunk = json.loads(event.removeprefix("data: "))
        assert "choices" in chunk or "output_ids" in chunk, chunk


def check_events_of_a_response(events: list[str]) -> None:
    for number, event in enumerate(events):
        name, data = event.removeprefix("event: ").split("\ndata: ")
        said = json.loads(data)
        assert (said["type"], said["sequence_number"]) == (name, number)
    assert name in ("response.completed", "response.incomplete"), events[-1]


def check_events_of_a_message(events: list[str]) -> None:
    for event in events:
        name, data = event.removeprefix("event: ").split("\ndata: ")
        assert json.loads(data)["type"] == name
    assert events[0].startswith("event: message_start") and name == "message_stop"
