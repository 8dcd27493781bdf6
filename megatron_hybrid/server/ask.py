"""The first question: sent twice over HTTP, so that the second answer shows the cache at work."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_hybrid.server.options import LaunchOptions, ServerOptions
from megatron_hybrid.server.tls import own_context

ANSWER_TOKENS = 128
POLL_SECONDS = 0.1


@dataclass
class FirstQuestion:
    """Asks a running server and prints its answers; `failed` says whether one was missing."""

    launch: LaunchOptions
    options: ServerOptions
    stop: Callable[[], None]  # the server, if it is to end when the question is answered
    failed: bool = False

    def ask(self, url: str) -> None:
        """Ask, ask again, print both; meant for a thread, since the engine serves meanwhile."""
        try:
            self._wait_for(url)
            print(f"\nQuestion: {self.launch.ask}")
            for name in ("Answer", "Asked again"):
                started = time.monotonic()
                print(
                    f"{name}: {self._answer(url)}, {time.monotonic() - started:.2f} s", flush=True
                )
        except (OSError, KeyError, ValueError) as error:
            self.failed = True
            print(f"The question could not be asked: {_reason(error)}", flush=True)
        if self.launch.exit_after_answer:
            self.stop()

    def _wait_for(self, url: str) -> None:
        while True:
            try:
                self._send("GET", f"{url}/health", None)
                return
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    raise
            time.sleep(POLL_SECONDS)

    def _answer(self, url: str) -> str:
        messages = [{"role": "user", "content": self.launch.ask}]
        if self.launch.system:
            messages.insert(0, {"role": "system", "content": self.launch.system})
        prompt = self._send("POST", f"{url}/tokenize", {"messages": messages})
        room = prompt["max_model_len"] - prompt["count"]
        body = {
            "model": self.options.model_name,
            "messages": messages,
            "temperature": 0,
            "max_completion_tokens": max(1, min(ANSWER_TOKENS, room)),
        }
        answer = self._send("POST", f"{url}/v1/chat/completions", body)
        usage = answer["usage"]
        cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", "?")
        text = answer["choices"][0]["message"]["content"].strip()
        return f"{text}\n  {cached} of {usage['prompt_tokens']} prompt tokens from the cache"

    def _send(self, method: str, url: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.options.api_keys:
            headers["Authorization"] = f"Bearer {self.options.api_keys[0].key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers, method=method)
        # No proxy of the environment stands between us and ourselves.
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if certfile := self.options.ssl_certfile:
            handlers.append(urllib.request.HTTPSHandler(context=own_context(certfile)))
        opener = urllib.request.build_opener(*handlers)
        with opener.open(request, timeout=600) as response:
            return json.load(response)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return error.read().decode("utf-8", "replace")
    return str(error)
