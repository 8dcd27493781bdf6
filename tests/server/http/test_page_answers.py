"""Answers on the page at /: Markdown, code, formulas, thoughts, calls of tools; none of it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tests.server.http.browsing import IMAGES, WRITE_IMAGES, Site, Visit, expect, needs_browser

TEXT = """# A heading

Some *emphasis* and `code`, a [link](https://example.com/a) and one [defined below][d]:
a new line, at https://example.com/b, not in main.rs.

1. One
2. Two
   - nested

3. Three, behind an empty line

| name | number |
|:-----|-------:|
| a_b_c | 1.5 |

```python
def double(n: int) -> int:
    return 2 * n  # twice
```

Formulas: $a_1 * b_2 * c$ and \\(x_i^*\\), not $5 or $10.
\\[
E = \\sum_i a_i
- b_{*}
\\]

> A quote\r
> of two lines\r
\r
---

1. a

2 is no item

[d]: https://example.com/d
"""
WEATHER = """It is, **all day**:

| city | rain |
|---|--:|
| Oslo | 7 mm |

```python
umbrella = rain > 1  # mm
```
"""
# What people try, each with a script that would leave a mark.
MARKUP = """<script>window.ran = 1</script><img src="/nowhere" onerror="window.ran = 1"><b>bold</b>
[a](javascript:window.ran=1) [b](JaVaScRiPt:window.ran=1) [c](data:text/html,x) [d](vbscript:x)
![i](javascript:window.ran=1) <javascript:window.ran=1> <a href="javascript:window.ran=1">e</a>
<svg onload="window.ran = 1"><style>* { display: none }</style><iframe srcdoc="x"></iframe>

```"><img src=x onerror="window.ran=1">
<script>window.ran = 1</script>
```

| <img src=x onerror="window.ran=1"> |
|---|
| $<img src=x onerror="window.ran=1">$ |

\\[
<img src=x onerror="window.ran=1">
\\]
"""


@needs_browser
def test_an_answer_in_pieces_is_shown_as_the_whole_one(at_home: Visit) -> None:
    """Wherever it is cut; and what has ended is not made again."""
    found = at_home.page.evaluate(
        """async (texts) => {
          const { MarkdownView } = await import("./dashboard/markdown.js");
          return texts.map((text) => {
            const [whole, pieces] = [0, 1].map(() => document.createElement("div"));
            new MarkdownView(whole).finish(text);
            const view = new MarkdownView(pieces);
            for (let end = 1; end <= text.length; end++) view.show(text.slice(0, end));
            const table = pieces.querySelector("table");
            view.finish(text);
            const isKept = table !== null && table === pieces.querySelector("table");
            return [whole.innerHTML, pieces.innerHTML, isKept];
          });
        }""",
        [TEXT, TEXT.partition("[d]: ")[0], MARKUP],
    )
    assert [one[0] == one[1] for one in found] == [True, True, True]
    assert "https://example.com/d" in found[0][0]  # for which all had to be made again
    assert [one[2] for one in found] == [False, True, True]


@needs_browser
def test_answers_are_markdown_with_code_that_can_be_copied(at_home: Visit) -> None:
    at_home.context.grant_permissions(["clipboard-read", "clipboard-write"])
    at_home.answers(*({"content": TEXT[i : i + 7]} for i in range(0, len(TEXT), 7)))
    text = at_home.ask("Hello").locator(".answer .text")
    expect(text.locator("h4")).to_have_text("A heading")
    expect(text.locator("em")).to_have_text("emphasis")
    expect(text.locator("li li")).to_have_text("nested")
    expect(text.locator("td")).to_have_text(["a_b_c", "1.5"])
    expect(text.locator(".maths")).to_have_text(
        ["$a_1 * b_2 * c$", "\\(x_i^*\\)", "\\[\nE = \\sum_i a_i\n- b_{*}\n\\]"]
    )
    links = text.locator("a").evaluate_all("links => links.map((a) => [a.href, a.rel, a.target])")
    assert links == [[f"https://example.com/{x}", "noopener noreferrer", "_blank"] for x in "adb"]
    align = text.locator("td").evaluate_all(
        "cells => cells.map((c) => getComputedStyle(c).textAlign)"
    )
    assert align == ["left", "right"]
    assert {"def", "return"} <= set(text.locator(".hljs-keyword").all_inner_texts())
    text.get_by_role("button", name="Copy code").press("Enter")
    expect(text.get_by_role("button", name="Copied")).to_be_visible()
    copied = at_home.page.evaluate("() => navigator.clipboard.readText()")
    assert copied == "def double(n: int) -> int:\n    return 2 * n  # twice\n"
    # A page that came without TLS from another machine has no such clipboard.
    at_home.page.evaluate("() => Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    at_home.page.get_by_role("button", name="Copy", exact=True).press("Enter")
    expect(at_home.page.locator(".turn-buttons")).to_contain_text("Copied")
    at_home.page.get_by_label("Message").press("Control+v")
    expect(at_home.page.get_by_label("Message")).not_to_be_empty()
    assert at_home.page.get_by_label("Message").input_value() == TEXT.replace("\r", "")
    assert at_home.errors == []


@needs_browser
def test_tokens_that_come_quickly_are_painted_together(at_home: Visit) -> None:
    found = at_home.page.evaluate(
        """async () => {
          const { newTurn } = await import("./dashboard/messages.js");
          const { Turn } = await import("./dashboard/turn.js");
          let paintings = 0;
          const on = { painting: (paint) => { paintings++; paint(); } };
          const turn = new Turn(newTurn("?", { system: "", fields: {} }, null), on);
          const begun = performance.now();
          let words = 0;
          while (performance.now() - begun < 500) {
            turn.add({ content: `word${words++} ` }, {});
            await new Promise((resolve) => setTimeout(resolve, 1));
          }
          const shown = turn.text.textContent.trim().split(" ").length;
          return { words, paintings, shown, mostPaintings: (performance.now() - begun) / 60 + 1 };
        }"""
    )
    # Every 60 ms, the first at once.
    assert 1 <= found["paintings"] <= found["mostPaintings"]
    assert 1 <= found["shown"] <= found["words"]


@needs_browser
def test_whatever_a_model_or_a_person_says_stays_text(at_home: Visit) -> None:
    page = at_home.page
    called = {"id": "1", "function": {"name": MARKUP, "arguments": json.dumps({"a": MARKUP})}}
    at_home.answers(
        {"reasoning_content": MARKUP},
        {"content": MARKUP[:300]},
        {"content": MARKUP[300:]},
        {"tool_calls": [{"index": 0, **called}]},
    )
    at_home.set(system=MARKUP)
    turn = at_home.ask(MARKUP)
    turn.locator(".thoughts summary").click()
    for place in (".question .text", ".thoughts-text", ".answer .text", ".call"):
        expect(turn.locator(place)).to_contain_text("<script>window.ran = 1</script>")
    first = MARKUP.split("\n")[0]
    expect(page.locator("#chat-title")).to_have_text(f"{first[:60]}…")
    page.get_by_role("button", name="Options of").click()
    page.get_by_label("Title").fill(first)
    page.keyboard.press("Enter")
    expect(page.locator("#chat-title")).to_have_text(first)
    expect(page.locator("#chat-list a")).to_have_text([first])
    turn.get_by_role("button", name="curl").click()
    expect(page.locator("#curl-command code")).to_contain_text("<iframe")
    page.keyboard.press("Escape")
    page.reload()
    expect(page.locator(".turn .answer .text")).to_contain_text("<script>")
    made = "script:not([src]), img, svg:not(.chart svg), iframe, .turn style, .turn b, [onerror]"
    assert page.locator(made).count() == 0
    schemes = page.locator("a").evaluate_all("links => links.map((a) => a.protocol)")
    assert set(schemes) <= {"http:"}  # the list of chats
    assert page.evaluate("() => window.ran") is None
    assert at_home.errors == []
    # What markdown-it might let through, DOMPurify does not.
    purified = page.evaluate(
        """async (html) => {
          const { purified } = await import("./dashboard/purified.js");
          const box = document.createElement("div");
          box.append(purified(html, ["b"], ["class"]));
          return box.innerHTML;
        }""",
        "<style>a</style><b class='x' data-y='' aria-z='' onclick=''>c</b><img src='/nowhere'>",
    )
    assert purified == '<b class="x">c</b>'
    # Even without the libraries the browser makes no markup of text.
    assert "TrustedHTML" in page.evaluate(
        "() => { try { document.body.innerHTML = '<b>'; } catch (e) { return e.message; } }"
    )


@needs_browser
def test_thoughts_are_folded_and_go_back_with_the_answer(at_home: Visit) -> None:
    bodies = at_home.answers(
        {"reasoning_content": "<b>Hm", "reasoning": "<b>Hm"}, {"content": "A fox."}
    )
    turn = at_home.ask("Hello")
    expect(turn.locator(".text")).to_have_text(["Hello", "A fox."])
    thoughts = turn.locator(".thoughts-text")
    expect(thoughts).to_be_hidden()
    turn.locator("summary").press("Enter")
    expect(thoughts).to_be_visible()
    expect(thoughts).to_have_text("<b>Hm")
    expect(at_home.ask("Again").locator(".text")).to_have_text(["Again", "A fox."])
    said = {"role": "assistant", "content": "A fox.", "reasoning_content": "<b>Hm"}
    assert bodies[1]["messages"][1] == said
    assert at_home.errors == []


@needs_browser
def test_calls_are_shown_and_their_results_given_back(at_home: Visit) -> None:
    page = at_home.page
    weather = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    framed = {"type": "function", "function": weather}
    pieces: list[dict[str, Any]] = [
        {"index": 0, "id": "one", "type": "function", "function": {"name": "weather"}},
        {"index": 0, "function": {"arguments": '{"city":'}},
        {"index": 0, "function": {"arguments": '"Oslo"}'}},
        {"index": 1, "id": "two", "function": {"name": "weather", "arguments": "{}"}},
    ]
    bodies = at_home.answers(*({"tool_calls": [piece]} for piece in pieces))
    at_home.set(tools=json.dumps([weather, framed]))
    at_home.ask("Is it raining?")
    turn = page.locator(".turn").first
    assert bodies[0]["tools"] == [framed, framed]
    expect(turn.locator(".call code").first).to_have_text('{\n  "city": "Oslo"\n}')
    expect(turn.locator(".call strong")).to_have_text(["weather", "weather"])
    page.unroute("**/v1/chat/completions")
    bodies = at_home.answers({"content": WEATHER})
    turn.get_by_label("Result of weather").first.focus()
    page.keyboard.type('{"rain": true}')
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.type("dry")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(page.locator(".turn").last.locator(".answer td")).to_have_text(["Oslo", "7 mm"])
    expect(turn.get_by_role("button", name="Give results back")).to_be_hidden()
    asked, answer, *results = bodies[0]["messages"]
    assert asked == {"role": "user", "content": "Is it raining?"}
    assert answer["tool_calls"][0] == {
        "id": "one",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city":"Oslo"}'},
    }
    assert results == [
        {"role": "tool", "tool_call_id": "one", "content": '{"rain": true}'},
        {"role": "tool", "tool_call_id": "two", "content": "dry"},
    ]
    page.get_by_role("button", name="Ask again").click()
    expect(page.locator(".turn")).to_have_count(2)
    expect(page.locator(".turn").last.locator(".answer")).to_have_attribute("aria-busy", "false")
    assert bodies[1]["messages"] == bodies[0]["messages"]
    assert at_home.errors == []
    if WRITE_IMAGES:
        page.emulate_media(color_scheme="dark", reduced_motion="reduce")
        page.set_viewport_size({"width": 390, "height": 844})
        page.locator(".settings").evaluate("node => { node.open = false; }")
        turn.locator(".call").last.evaluate(
            "node => { node.closest('.log').scrollTop = node.offsetTop - 80; scrollTo(0, 0); }"
        )
        page.screenshot(path=IMAGES / "dashboard_phone.png")


@needs_browser
def test_json_that_was_asked_for_is_no_markdown(at_home: Visit) -> None:
    bodies = at_home.answers({"content": '{"a_b_c": "*x*",'}, {"content": ' "d": 1}'})
    at_home.set(schema='{"type": "object"}')
    turn = at_home.ask("Hello")
    expect(turn.locator(".answer code")).to_have_text('{"a_b_c": "*x*", "d": 1}')
    assert turn.locator(".answer em").count() == 0
    assert bodies[0]["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}},
    }


@needs_browser
def test_long_words_code_and_tables_scroll_within_themselves(
    site: Site, visit: Callable[..., Visit]
) -> None:
    home = visit(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    home.open(site.url)
    wide = " | ".join(f"column {i}" for i in range(20))
    rule = "|".join(["---"] * 20)
    home.answers(
        {"content": f"{'W' * 99}\n\n```\n{'W' * 99}\n```\n\n| {wide} |\n|{rule}|\n| {wide} |"}
    )
    turn = home.ask("W" * 99)
    assert home.overflow() <= 0
    for box in (".answer pre", ".answer .wide"):
        assert turn.locator(box).evaluate(
            "node => { node.scrollLeft = 9; return node.scrollLeft; }"
        )
        assert turn.locator(box).evaluate("node => node.tabIndex") == 0
    assert re.search("W{99}", turn.locator(".answer").inner_text())
