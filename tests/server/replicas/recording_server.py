"""A server that writes down which bodies come through a router, and answers all of them alike."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any

from tests.server.running import http_server

MODEL = "m"
_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
_SAID = {"type": "output_text", "text": "Hi", "annotations": []}
_FOUND: dict[str, Any] = {
    "/health": {"status": "ok"},
    "/v1/models": {
        "object": "list",
        "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "megatron_hybrid"}],
    },
    "/version": {"version": "0"},
    "/server_info": {"served_model_name": MODEL},
    "/model_info": {"model_path": "/nowhere", "tokenizer_path": "/nowhere", "is_generation": True},
    "/v1/chat/completions": {
        **{"id": "chatcmpl-1", "object": "chat.completion", "created": 0, "model": MODEL},
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi"},
                "finish_reason": "stop",
                "logprobs": None,
            }
        ],
        "usage": _USAGE,
    },
    "/v1/completions": {
        **{"id": "cmpl-1", "object": "text_completion", "created": 0, "model": MODEL},
        "choices": [{"index": 0, "text": "Hi", "finish_reason": "stop", "logprobs": None}],
        "usage": _USAGE,
    },
    "/v1/responses": {
        **{"id": "resp_1", "object": "response", "created_at": 0, "status": "completed"},
        **{"model": MODEL, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []},
        "output": [
            {
                **{"id": "msg_1", "type": "message", "status": "completed"},
                **{"role": "assistant", "content": [_SAID]},
            }
        ],
        "usage": {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2},
    },
    "/v1/messages": {
        **{"id": "msg_1", "type": "message", "role": "assistant", "model": MODEL},
        **{"content": [{"type": "text", "text": "Hi"}], "stop_reason": "end_turn"},
        "usage": {"input_tokens": 1, "output_tokens": 1},
    },
}
REFUSAL = {
    "error": {
        **{"message": "temperature is wrong.", "type": "invalid_request_error"},
        **{"param": "temperature", "code": "out_of_range"},
    }
}


class RecordingServer:
    """`arrived`: path and body of what was posted, not to be rendered; `refuses`: all of it, with
    REFUSAL."""

    def __init__(self) -> None:
        self.arrived: list[tuple[str, dict[str, Any]]] = []
        self.refuses = False
        recorder = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # else the body waits until its headers are acknowledged

            def do_GET(self) -> None:
                self.answer(_FOUND.get(self.path.partition("?")[0]))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if not self.path.endswith("/render"):
                    recorder.arrived.append((self.path, json.loads(body)))
                self.answer(None if recorder.refuses else _FOUND.get(self.path), 400)

            def answer(self, found: Any, otherwise: int = 404) -> None:
                data = json.dumps(REFUSAL if found is None else found).encode()
                self.send_response(otherwise if found is None else 200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *of: Any) -> None:
                """Say nothing."""

        self._serving = http_server(Handler)

    def __enter__(self) -> RecordingServer:
        self.url = self._serving.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._serving.__exit__(kind, error, traceback)
