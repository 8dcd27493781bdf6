"""The page at /, used as people use it: in a browser, around the fake engine and a real model."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

from megatron_hybrid.server.http import dashboard
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.keys import ApiKey
from megatron_hybrid.server.options import ServerOptions
from megatron_hybrid.text.tokenizer import Tokenizer
from tests.server.conftest import RunningLoop
from tests.server.fake_engine import FakeEngine
from tests.server.http.browsing import (
    CONTRASTS,
    IMAGES,
    STATS,
    WRITE_IMAGES,
    Site,
    Visit,
    cached_share,
    cached_states,
    expect,
    kept_chats,
    needs_browser,
    press_until,
)
from tests.server.running import ServerProcess, wait_until
from tests.thorough import thorough, usually

STATIC = Path(dashboard.__file__).parent / "static"
AXE = "axe-core@4.14.1"
TEXT = """# Heading

A [link](https://example.com), `code`, $x_1$ and

| a | b |
|---|--:|
| 1 | 2 |

```python
def double(n: int) -> int:
    return 2 * n  # "twice", not 3 times
```

> A quote
"""


def test_the_page_lets_the_browser_load_nothing_from_elsewhere(http: FlaskClient) -> None:
    for path in ("/", "/dashboard/main.js", "/dashboard/style.css"):
        answer = http.get(path)
        assert answer.status_code == 200
        policy = answer.headers["Content-Security-Policy"]
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        assert rules.pop("require-trusted-types-for") == "'script'"
        assert rules.pop("trusted-types") == "dompurify"
        assert rules["default-src"] == "'none'"
        assert set(rules.values()) <= {"'none'", "'self'"}
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_every_file_that_the_page_names_is_served(http: FlaskClient) -> None:
    named = set(re.findall(r'(?:src|href)="([^"]+)"', http.get("/").text))
    assert "dashboard/main.js" in named
    for script in STATIC.glob("*.js"):
        imported = re.findall(r'^(?:import|.* from) "\./([^"]+)"', script.read_text(), re.M)
        named |= {f"dashboard/{name}" for name in imported}
    assert named == {
        f"dashboard/{path.relative_to(STATIC)}"
        for path in STATIC.rglob("*")
        if path.suffix in {".js", ".css", ".svg"}
    }
    for name in named:
        assert http.get(f"/{name}").status_code == 200
    assert http.get("/dashboard/../__init__.py").status_code == 404
    assert http.get("/dashboard/nothing.js").get_json()["error"]["message"]


def test_scripts_never_make_markup_of_text() -> None:
    for path in STATIC.glob("*.*"):
        text = path.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert not re.search(r"<script>|<style|\son[a-z]+=\"|\sstyle=\"", text)
        assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {"http://www.w3.org/2000/svg"}
        assert ("DOMPurify." in text) == (path.name == "purified.js")


def test_libraries_are_those_that_were_published_and_small() -> None:
    listed = (STATIC / "vendor" / "README.md").read_text()
    rows = re.findall(r"^\| (\S+\.js) \| (\S+) \| (\S+) \| .* \| ([0-9a-f]{64}) \|$", listed, re.M)
    files = {path.name: path.read_bytes() for path in (STATIC / "vendor").glob("*.js")}
    sums = {name: hashlib.sha256(file).hexdigest() for name, file in files.items()}
    assert {name: checksum for name, _, _, checksum in rows} == sums
    assert sum(map(len, files.values())) < 300_000
    licences = (STATIC / "vendor" / "LICENSES.txt").read_text()
    assert all(f"{package} {version}" in licences for _, package, version, _ in rows)


@needs_browser
def test_a_server_with_a_key_is_asked_with_the_one_that_people_give(
    running: RunningLoop, tokenizer: Tokenizer, options: ServerOptions, visit: Callable[..., Visit]
) -> None:
    keyed = ServerOptions(
        tokenizer_folder=options.tokenizer_folder,
        model_name="fake",
        api_keys=(ApiKey("sesame", "door"),),
    )
    site = Site(Serving(running.engines, tokenizer, keyed))
    try:
        home = visit()
        page = home.page
        page.goto(site.url)
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_be_visible()
        expect(page.locator("#connection")).to_have_text("key needed")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_have_text("The server does not take that key.")
        page.keyboard.type("sesame")
        page.keyboard.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#connection")).to_have_text("live")
        home.set(temperature="0")
        expect(home.ask("Hello").locator(".answer .text")).to_contain_text("Hello")
        page.reload()
        expect(page.locator("#connection")).to_have_text("live")
        expect(dialog).to_be_hidden()
        assert page.evaluate("() => localStorage.length") == 0
        assert page.locator(".turn").count() == 1  # the chat is kept, the key with it is not
        assert "sesame" not in json.dumps(kept_chats(page))
    finally:
        site.close()


@needs_browser
def test_a_key_given_while_figures_are_awaited_is_tried(
    site: Site, visit: Callable[..., Visit]
) -> None:
    refused = {"status": 401, "json": {"error": {"message": "A key is needed."}}}
    awaited: list[Any] = []

    def figures(route: Any) -> None:
        if "sesame" in route.request.headers.get("authorization", ""):
            route.fulfill(json=STATS)
        elif route.request.headers.get("authorization"):
            awaited.append(route)
        else:
            route.fulfill(**refused)

    page = visit().page
    page.route("**/stats", figures)
    page.goto(site.url)
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog).to_be_visible()
    with page.expect_request("**/stats"):
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
    page.get_by_role("button", name="API key").click()
    page.keyboard.type("sesame")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    awaited[0].fulfill(**refused)
    expect(page.locator("#connection")).to_have_text("live")


@needs_browser
def test_stop_ends_the_answer_in_the_engine(at_home: Visit, engine: FakeEngine) -> None:
    engine.step_seconds = 0.5  # it has eight tokens to say: time for a slow machine to stop it
    page = at_home.page
    for stop in (
        lambda: page.keyboard.press("Escape"),
        page.get_by_role("button", name="Stop").click,
    ):
        aborted = sum(line.startswith("abort") for line in engine.log)
        page.get_by_label("Message").fill("The quick brown fox and numbers")
        page.keyboard.press("Enter")
        turn = page.locator(".turn").last
        expect(turn.locator(".answer .text")).not_to_be_empty()
        stop()
        expect(turn.locator(".figures")).to_contain_text("stopped")
        wait_until(lambda n=aborted: sum(s.startswith("abort") for s in engine.log) > n)
        expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert at_home.errors == []


@needs_browser
def test_an_edited_message_replaces_what_followed_it(at_home: Visit, engine: FakeEngine) -> None:
    at_home.page.get_by_text("Settings").click()
    at_home.page.get_by_label("Most tokens").fill("2")
    for text in ("one", "two", "three"):
        at_home.ask(text)
    questions = at_home.page.locator(".question .text")
    expect(questions).to_have_text(["one", "two", "three"])
    at_home.page.locator(".turn").nth(1).get_by_role("button", name="Edit").click()
    expect(at_home.page.get_by_label("Message")).to_have_value("two")
    at_home.page.keyboard.press("Escape")
    expect(at_home.page.get_by_label("Message")).to_have_value("")
    at_home.page.locator(".turn").nth(1).get_by_role("button", name="Edit").click()
    at_home.ask("four")
    expect(questions).to_have_text(["one", "four"])
    # Its first tokens are those of the conversation up to the edited message.
    second, last = engine.added[1].prompt, engine.added[-1].prompt
    shared = os.path.commonprefix([second, last])
    assert len(shared) > len(engine.added[0].prompt)
    at_home.page.get_by_role("button", name="Ask again").click()
    wait_until(lambda: engine.added[-1] is not engine.added[3] and len(engine.added) == 5)
    assert engine.added[4].prompt == engine.added[3].prompt
    assert at_home.errors == []


@needs_browser
def test_what_the_server_refuses_is_said_and_the_next_question_is_served(at_home: Visit) -> None:
    at_home.page.get_by_text("Settings").click()
    limit = at_home.page.get_by_label("Most tokens")
    limit.fill("5000")
    turn = at_home.ask("Hello")
    expect(turn.get_by_role("alert")).to_contain_text("--inference-max-seq-length")
    limit.fill("4")
    expect(at_home.ask("Hello").locator(".figures")).to_contain_text("prompt tokens")


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_from_their_ground(
    site: Site, visit: Callable[..., Visit], scheme: str
) -> None:
    home = visit(color_scheme=scheme, reduced_motion="reduce")
    home.figures(lambda: (200, STATS))
    home.open(site.url)
    home.ask("Hello")
    contrasts = home.page.evaluate(CONTRASTS)
    assert len(contrasts) > 40
    assert {text: ratio for text, ratio in contrasts if ratio < 4.5} == {}
    moving = home.page.evaluate("() => document.getAnimations().length")
    assert moving == 0


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, which finds what keeps people from using a page."""
    folder = tmp_path_factory.mktemp("axe")
    if (npm := shutil.which("npm")) is None:
        pytest.skip("there is no npm on this machine")
    fetched = subprocess.run([npm, "pack", AXE], cwd=folder, capture_output=True, timeout=120)
    if fetched.returncode:
        pytest.skip(f"npm could not fetch {AXE}")
    with tarfile.open(next(folder.glob("*.tgz"))) as package:
        script = package.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


@thorough
@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1400])
def test_axe_core_finds_nothing(
    site: Site, visit: Callable[..., Visit], axe: str, scheme: str, width: int
) -> None:
    # Whose own script makes markup of text.
    home = visit(bypass_csp=True, color_scheme=scheme, viewport={"width": width, "height": 900})
    page = home.page
    home.figures(lambda: (200, STATS))
    home.open(site.url)
    page.evaluate(axe)

    def check() -> None:
        found = page.evaluate("() => axe.run().then(({ violations }) => violations)")
        assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []

    check()
    called = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    home.answers(
        {"reasoning_content": "Hm."}, {"content": TEXT}, {"tool_calls": [{"index": 0, **called}]}
    )
    home.set(temperature="0")
    turn = home.ask("Hello")
    turn.locator(".thoughts summary").click()
    check()
    page.locator(".explained").first.focus()
    check()
    turn.get_by_role("button", name="curl").click()
    check()
    page.keyboard.press("Escape")
    if width < 1000:
        page.get_by_role("button", name="Chats").click()
    page.get_by_role("button", name="Options of").click()
    check()


@needs_browser
@pytest.mark.parametrize("width", usually([360], [360, 390, 768, 1000, 1251]))
def test_narrow_screens_need_no_scrolling_sideways(
    site: Site, visit: Callable[..., Visit], width: int
) -> None:
    home = visit(viewport={"width": width, "height": 740}, is_mobile=True, has_touch=True)
    home.figures(lambda: (200, STATS))
    home.open(site.url)
    home.page.get_by_text("Settings").click()
    home.page.get_by_label("Most tokens").fill("60")
    home.ask("W" * 60)
    assert home.overflow() <= 0
    for name in ("Send", "New chat", "Reset cache", "Edit", "Ask again"):
        box = home.page.get_by_role("button", name=name).bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= width
    assert home.errors == []


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("tools/run_text_generation_server.py", "--port", "0") as server:
        yield server


SYSTEM = (
    2
    * """You answer questions about what was said. The code of the gate is 7315.
The cat is called Pixel. The meeting is in Oslo. """
)


@needs_browser
def test_a_chat_by_keyboard_with_a_real_model_shows_the_cache_at_work(
    server: ServerProcess, visit: Callable[..., Visit]
) -> None:
    home = visit(viewport={"width": 1440, "height": 960})
    page = home.page
    home.open(server.url)
    expect(page.locator("#model")).to_have_text("reference_model")
    expect(page.get_by_label("Message")).to_be_focused()
    before = cached_states(page)

    press_until(page, "Shift+Tab", ".settings summary")
    page.keyboard.press("Enter")
    press_until(page, "Tab", "#system")
    page.keyboard.insert_text(SYSTEM)
    press_until(page, "Tab", "#temperature")
    page.keyboard.type("0")
    press_until(page, "Shift+Tab", ".settings summary")
    page.keyboard.press("Enter")
    press_until(page, "Tab", "#question")
    shares = []
    for question, part in (
        ("What is the cat called?", "Pixel"),
        ("The code of the door is 2201. What is the code of the gate?", "7315"),
        ("And where is the meeting?", "Oslo"),
    ):
        page.keyboard.type(question)
        page.keyboard.press("Enter")
        turn = page.locator(".turn").last
        expect(turn.locator(".question .text")).to_have_text(question)
        expect(turn.locator(".answer")).to_have_attribute("aria-busy", "false")
        expect(turn.locator(".answer .text")).to_contain_text(part)
        expect(turn.locator(".figures")).to_contain_text(re.compile(r"first token [\d.]+ m?s"))
        expect(turn.locator(".figures")).to_contain_text(re.compile(r"[\d,]+ tokens at [\d.]+/s"))
        shares.append(cached_share(turn))
        expect(page.get_by_label("Message")).to_be_focused()
    assert shares[0] == 0
    assert all(share > 0.3 for share in shares[1:])

    wait_until(lambda: cached_states(page) > before)
    expect(page.locator("#tile-skipped")).to_have_text(re.compile(r"^[1-9]\d? %$"))
    assert page.locator("#prefill path.cached-0").get_attribute("d")
    if WRITE_IMAGES:
        page.screenshot(path=IMAGES / "dashboard.png", full_page=True)

    press_until(page, "Tab", "#reset")
    page.keyboard.press("Enter")
    expect(page.locator("#notice")).to_have_text("The cache is empty now.")
    wait_until(lambda: cached_states(page) == 0)
    press_until(page, "Shift+Tab", "#question")
    page.keyboard.type("What is the cat called?")
    page.keyboard.press("Enter")
    expect(page.locator(".turn").last.locator(".cached")).to_contain_text("(0 %)")

    assert home.errors == []
    assert {address.startswith(server.url) for address in home.addresses} == {True}
