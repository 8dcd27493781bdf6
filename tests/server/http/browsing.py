"""A browser at the page of a server: what the tests of the page do there, and what they see."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from typing import Any

import pytest
from werkzeug.serving import make_server

from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.serving import Serving
from tests.server.running import ROOT

playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect
PATIENCE_MS = 30_000
expect.set_options(timeout=PATIENCE_MS)

# Of the first a window costs a tenth of a second, of the others, which draw their own bars for
# nobody, more than one.
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")
IMAGES = ROOT / "docs" / "images"
WRITE_IMAGES = bool(os.environ.get("MEGATRON_HYBRID_WRITE_IMAGES"))  # set it to renew those there
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run
    --disable-background-networking --disable-component-update --disable-sync""".split()
EVIL_HOST = "evil.example"  # a name whose owner lets it point to the visitor's own machine
FLAGS.append(f"--host-resolver-rules=MAP {EVIL_HOST} 127.0.0.1")
STATS: dict[str, Any] = {
    "model": "fake",
    "time": 100.0,
    "uptime": 60.0,
    "engine": {
        "weight_bytes": {"bfloat16": 1000},
        "start_seconds": {"imports": 1.5},
        "kv_blocks": 1000,
        "kv_free": 600,
        "kv_used": 150,
        "kv_cached": 320,  # some of them are in use
        "kv_evictable": 250,
        "kv_cached_by_age": [["< 10 s", 200], ["older", 50]],
        "state_slots": 40,
        "state_live": 5,
        "state_cached": 11,
        "state_cached_by_age": [["< 10 s", 8], ["older", 3]],
        "computed_tokens": 3000,
        "skipped_tokens": 9000,
        "lost_tokens": {"grid": 48, "a_new_cause": 7},
        "generated_tokens": 500,
        "requests_running": 5,
        "requests_waiting": 2,
        "latency": {
            "time_to_first_token_seconds": {
                "count": 9,
                "sum": 1.0,
                "p50": 0.12,
                "p95": 0.3,
                "buckets": [[0.1, 4], [0.2, 8], [0.5, 9]],
            }
        },
        "preemptions": 0,
        "paused": False,
    },
}


class Visit:
    """A page in a browser of its own, and what went wrong in it."""

    def __init__(self, browser: Any, **settings: Any) -> None:
        self.context = browser.new_context(**settings)
        self.context.set_default_timeout(PATIENCE_MS)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.addresses: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.addresses.append(request.url))
        self.page.on("console", self._hear)

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} {message.location['url']}")

    def open(self, url: str) -> None:
        """Go there, and wait until the figures have come."""
        self.page.goto(url)
        expect(self.page.locator("#connection")).to_have_text("live")

    def set(self, **settings: str) -> None:
        """Fill in settings, by the names of their fields."""
        self.page.locator(".settings").evaluate("node => { node.open = true; }")
        for name, text in settings.items():
            self.page.locator(f"[name={name}]").fill(text)

    def answers(self, *deltas: dict[str, Any]) -> list[Any]:
        """Let all chats be answered with these deltas; the list of bodies that are sent from now
        on."""
        bodies: list[Any] = []
        usage = {
            "prompt_tokens": 20,
            "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 12},
        }
        chunks = [
            json.dumps({"choices": [{"index": 0, "delta": delta}], "usage": usage})
            for delta in deltas
        ]

        def fulfill(route: Any) -> None:
            bodies.append(route.request.post_data_json)
            body = "".join(f"data: {chunk}\r\n\r\n" for chunk in [*chunks, "[DONE]"])
            route.fulfill(content_type="text/event-stream", body=body)

        self.page.route("**/v1/chat/completions", fulfill)
        return bodies

    def figures(self, answer: Callable[[], tuple[int, Any]]) -> None:
        """Answer GET /stats with this status and JSON."""

        def fulfill(route: Any) -> None:
            status, body = answer()
            route.fulfill(status=status, content_type="application/json", body=json.dumps(body))

        self.page.route("**/stats", fulfill)

    def ask(self, text: str) -> Any:
        """Send with the keyboard; the turn, once its answer has ended."""
        self.page.get_by_label("Message").fill(text)
        self.page.keyboard.press("Enter")
        turn = self.page.locator(".turn").last
        expect(turn.locator(".question .text")).to_have_text(text)
        expect(turn.locator(".answer")).to_have_attribute("aria-busy", "false")
        return turn

    def overflow(self) -> int:
        """How many pixels the page is wider than the screen, or the conversation than its box."""
        return self.page.evaluate(
            """() => Math.max(...[document.documentElement, document.querySelector(".log")]
                .map((node) => node.scrollWidth - node.clientWidth))"""
        )


class Site:
    """The application around the fake engine, or another one, on a port."""

    def __init__(self, serving: Serving | Callable[..., Any]) -> None:
        app = create_app(serving) if isinstance(serving, Serving) else serving
        self._server = make_server("127.0.0.1", 0, app, threaded=True)
        self.port = self._server.server_port
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(5)
        self._server.server_close()


# What a page can try without asking first, and with it: a list of [what, answer or null].
ATTACK = """async ([target, paths]) => {
  const text = '{"prompt": "Hello", "max_tokens": 2}';
  const json = {"Content-Type": "application/json"};
  const plain = {method: "POST", mode: "no-cors"};
  const ways = {
    "as text": {...plain, headers: {"Content-Type": "text/plain"}, body: text},
    "as JSON": {...plain, headers: json, body: text},
    "without a type": {...plain, body: new Blob([text])},
    "without a body": plain,
    "asking first": {method: "POST", headers: json, body: text},
  };
  const found = [];
  for (const path of paths) {
    for (const [way, request] of Object.entries(ways)) {
      const answer = await fetch(target + path, request).catch(() => null);
      found.push([`${path} ${way}`, answer && (await answer.text())]);
    }
    const frame = document.createElement("iframe");
    frame.name = "f" + path;
    document.body.append(frame);
    for (const kind of ["text/plain", "application/x-www-form-urlencoded"]) {
      const form = document.createElement("form");
      Object.assign(form, {method: "POST", action: target + path, target: frame.name});
      form.enctype = kind;
      form.innerHTML = `<input name='{"prompt": "Hello", "a": "' value='"}'>`;
      document.body.append(form);
      const loaded = new Promise((resolve) => frame.addEventListener("load", resolve));
      form.submit();
      await loaded;
    }
  }
  return found;
}"""
# Every text with the contrast (WCAG 2) between its colour and the ground below it.
CONTRASTS = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (text) => {
    const [r, g, b] = rgb(text).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (let up = node; up; up = up.parentElement) {
      const colour = getComputedStyle(up).backgroundColor;
      if (rgb(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || !node.checkVisibility()) continue;
    const [a, b] = [getComputedStyle(node).color, ground(node)].map(light);
    found.push([texts.currentNode.data, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]);
  }
  return found;
}"""


def press_until(page: Any, key: str, selector: str) -> None:
    """Go on with Tab until this is in focus, and is seen to be."""
    wanted = page.locator(selector)
    for _ in range(60):
        page.keyboard.press(key)
        outline = "node => document.activeElement === node && getComputedStyle(node).outlineStyle"
        if style := wanted.evaluate(outline):
            assert style == "solid"
            return
    raise AssertionError(f"{key} does not lead to {selector}")


def cached_share(turn: Any) -> float:
    """What the turn's figures say, which its bar must show too."""
    text = turn.locator(".cached").inner_text()
    found = re.match(r"([\d,]+) of ([\d,]+) prompt tokens cached", text)
    assert found is not None, text
    cached, prompt = (int(number.replace(",", "")) for number in found.groups())
    width = turn.locator(".share-cached").evaluate("node => parseFloat(node.style.width)")
    assert width == pytest.approx(100 * cached / prompt, abs=0.1)
    return cached / prompt


def cached_states(page: Any) -> int:
    """Of all ages."""
    rows = page.locator("#state .legend li", has_text="cached").locator("b").all_inner_texts()
    return sum(int(number.replace(",", "")) for number in rows)


def kept_chats(page: Any) -> list[dict[str, Any]]:
    """What the browser keeps, the newest chat first."""
    return page.evaluate(
        """async () => {
          const { Store } = await import("./dashboard/store.js");
          const store = await Store.open();
          const list = await store.list();
          return Promise.all(list.map(({ id }) => store.get(id)));
        }"""
    )
