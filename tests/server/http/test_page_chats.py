"""Chats on the page at /: kept, named, exported and deleted; settings, context, commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.server.fake_engine import FakeEngine
from tests.server.http.browsing import (
    Site,
    Visit,
    expect,
    kept_chats,
    needs_browser,
    press_until,
)


def saved(page: Any, button: str) -> tuple[str, str]:
    """The name and text of the file that a button of the open dialog gives."""
    with page.expect_download() as download:
        page.get_by_role("button", name=button).press("Enter")
    return download.value.suggested_filename, Path(download.value.path()).read_text()


@needs_browser
def test_chats_are_kept_renamed_exported_and_deleted_by_keyboard(at_home: Visit) -> None:
    page = at_home.page
    called = {"id": "1", "function": {"name": "f", "arguments": '{"a": "```"}'}}
    at_home.answers(
        {"reasoning_content": "Hm."},
        {"content": "# Yes"},
        {"tool_calls": [{"index": 0, **called}]},
    )
    at_home.set(temperature="0.5", system="Be kind.")
    at_home.ask("What is a fox?\nA second line")
    at_home.ask("And a dog?")
    page.get_by_role("button", name="New chat").press("Enter")
    expect(page.locator(".turn")).to_have_count(0)
    expect(page.get_by_label("Message")).to_be_focused()
    at_home.ask("Another one")
    links = page.locator("#chat-list a")
    expect(links).to_have_text(["Another one", "What is a fox?"])
    expect(page.locator("#chat-list [aria-current]")).to_have_text(["Another one"])

    press_until(page, "Shift+Tab", "#chat-list li:nth-child(2) a")
    page.keyboard.press("Enter")
    questions = page.locator(".question .text")
    expect(questions).to_have_text(["What is a fox?\nA second line", "And a dog?"])
    page.reload()
    expect(questions).to_have_count(2)
    expect(page.locator(".answer h4")).to_have_text(["Yes", "Yes"])
    expect(page.locator(".thoughts-text")).to_have_text(["Hm.", "Hm."])
    expect(page.locator(".figures").last).to_contain_text("12 of 20 prompt tokens cached (60 %)")
    expect(page.locator("[name=temperature]")).to_have_value("0.5")
    page.go_back()
    expect(questions).to_have_text(["Another one"])
    page.go_forward()

    press_until(page, "Shift+Tab", "#chat-list li:nth-child(2) button")
    page.keyboard.press("Enter")
    page.keyboard.type("Of foxes & dogs")
    page.keyboard.press("Enter")
    expect(links).to_have_text(["Another one", "Of foxes & dogs"])
    expect(page.get_by_role("heading", name="Of foxes & dogs")).to_be_visible()
    page.keyboard.press("Enter")  # the button has the focus again

    name, text = saved(page, "Export as JSON")
    assert name == "Of-foxes-dogs.json"
    exported = json.loads(text)
    assert exported["title"] == "Of foxes & dogs"
    assert exported["settings"] == {"temperature": "0.5", "system": "Be kind."}
    assert [one["role"] for one in exported["messages"]] == ["user", "assistant", "tool"] * 2
    assert exported["messages"][1]["reasoning_content"] == "Hm."
    name, text = saved(page, "Export as Markdown")
    assert name == "Of-foxes-dogs.md"
    assert text.startswith("# Of foxes & dogs\n\n## Question\n\nWhat is a fox?\nA second line\n\n")
    assert '### Call of f\n\n````json\n{"a": "```"}\n````\n' in text

    delete = page.get_by_role("button", name="Delete", exact=True)
    delete.press("Enter")
    page.get_by_role("button", name="Delete for good").press("Enter")
    expect(links).to_have_text(["Another one"])
    expect(page.locator(".turn")).to_have_count(0)
    assert [one["title"] for one in kept_chats(page)] == ["Another one"]
    page.get_by_role("button", name="Delete all").press("Enter")
    page.get_by_role("button", name="Delete all for good").press("Enter")
    expect(page.locator("#no-chats")).to_be_visible()
    assert kept_chats(page) == []
    assert at_home.errors == []


@needs_browser
def test_a_browser_without_room_says_so_and_chats_on(
    site: Site, visit: Callable[..., Visit]
) -> None:
    home = visit()
    devtools = home.context.new_cdp_session(home.page)
    origin = {"origin": site.url.removesuffix("/")}
    devtools.send("Storage.overrideQuotaForOrigin", {**origin, "quotaSize": 100_000})
    home.open(site.url)
    home.answers({"content": "A fox."})
    home.ask("One")
    long = "Two" * 100_000
    expect(home.ask(long).locator(".answer .text")).to_have_text("A fox.")
    note = home.page.locator("#chats-note")
    expect(note).to_contain_text("has no more room")
    assert [turn["question"] for turn in kept_chats(home.page)[0]["turns"]] == ["One"]
    devtools.send("Storage.overrideQuotaForOrigin", origin)
    home.ask("Three")
    expect(note).to_be_empty()
    questions = [turn["question"] for turn in kept_chats(home.page)[0]["turns"]]
    assert questions == ["One", long, "Three"]
    assert home.errors == []


@needs_browser
def test_a_browser_that_keeps_nothing_says_so_and_chats(
    site: Site, visit: Callable[..., Visit]
) -> None:
    home = visit()
    home.page.add_init_script("IDBFactory.prototype.open = () => { throw Error(); };")
    home.open(site.url)
    home.answers({"content": "A fox."})
    expect(home.ask("One").locator(".answer .text")).to_have_text("A fox.")
    expect(home.page.locator("#chats-note")).to_contain_text("keeps no chats")
    assert home.errors == []


@needs_browser
def test_another_chat_and_a_reload_stop_the_answer_and_keep_what_there_is_of_it(
    at_home: Visit, engine: FakeEngine
) -> None:
    engine.step_seconds = 0.2
    page = at_home.page
    figures, text = page.locator(".figures").last, page.locator(".answer .text").last
    page.get_by_label("Message").fill("The quick brown fox")
    page.keyboard.press("Enter")
    expect(text).not_to_be_empty()
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.locator("#chat-list a").click()
    expect(figures).to_contain_text("stopped")
    expect(text).not_to_be_empty()

    page.get_by_role("button", name="Ask again").click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(text).not_to_be_empty()
    page.reload()
    expect(figures).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert at_home.errors == []


@needs_browser
def test_settings_go_with_the_request_and_empty_ones_are_left_to_the_server(
    at_home: Visit,
) -> None:
    page = at_home.page
    bodies = at_home.answers({"content": "A fox."})
    at_home.ask("Hello")
    assert bodies[0] == {
        "messages": [{"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    expect(page.locator("#settings-summary")).to_have_text("the server's own")
    at_home.set(
        system="Be kind.",
        temperature="0",
        top_p="0.9",
        top_k="40",
        min_p="0.05",
        seed="7",
        presence_penalty="0.5",
        frequency_penalty="-0.5",
        repetition_penalty="1.1",
        min_tokens="2",
        thinking_token_budget="5",
        max_completion_tokens="9",
        stop="END\n\n***",
        more='{"logit_bias": {"42": -5}}',
    )
    page.get_by_label("Reasoning effort").select_option("low")
    page.get_by_label("Thinking").select_option("Off")
    page.get_by_label("Calls of tools").select_option("None")
    # What the server says about itself.
    expect(page.locator("[name=top_p]")).to_have_attribute("placeholder", "1 by default")
    expect(page.locator("[name=temperature]")).to_have_attribute("min", "0")
    at_home.ask("Again")
    sent = bodies[1]
    assert sent.pop("messages")[0] == {"role": "system", "content": "Be kind."}
    assert sent.pop("stream") and sent.pop("stream_options")
    assert sent == {
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "seed": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 2,
        "thinking_token_budget": 5,
        "max_completion_tokens": 9,
        "stop": ["END", "***"],
        "logit_bias": {"42": -5},
        "reasoning_effort": "low",
        "enable_thinking": False,
        "tool_choice": "none",
    }
    for name, text, sentence in (
        ("schema", '["object"]', "A JSON schema is an object: {...}."),
        ("tools", "{}", "Tools are a list of functions: [...]."),
        ("tools", "[{", "This is not JSON: "),
        ("more", '{"n": 2}', "The page itself says n."),
        ("temperature", "-1", "0"),
    ):
        page.locator(f"[name={name}]").fill(text)
        page.get_by_label("Message").fill("Never sent")
        page.keyboard.press("Enter")
        field = page.locator(f"[name={name}]")
        expect(field).to_be_focused()
        assert sentence in field.evaluate("node => node.validationMessage")
        field.fill("")
    assert len(bodies) == 2
    page.get_by_role("button", name="Leave all to the server").click()
    expect(page.locator("#settings-summary")).to_have_text("the server's own")
    assert at_home.errors == []


@needs_browser
def test_the_command_of_a_request_is_what_was_sent_without_the_key(at_home: Visit) -> None:
    page = at_home.page
    page.evaluate("() => sessionStorage.setItem('megatron_hybrid.api_key', 'sesame')")
    page.reload()
    bodies = at_home.answers({"content": "It's $HOME."})
    at_home.set(system='It\'s "quoted" \\ `here`', seed="3")
    at_home.ask("What's 1 + 1?\n'Two'")
    at_home.set(seed="")
    at_home.ask("Why?")
    for turn, body in zip(page.locator(".turn").all(), bodies, strict=True):
        turn.get_by_role("button", name="curl").press("Enter")
        command = page.locator("#curl-command code").inner_text()
        assert "sesame" not in command
        words = shlex.split(command.replace("\\\n", ""))
        assert words[:3] == ["curl", "-N", page.url.partition("#")[0] + "v1/chat/completions"]
        assert words[3:7] == [
            *("-H", "Content-Type: application/json"),
            *("-H", "Authorization: Bearer $API_KEY"),
        ]
        assert words[7] == "-d" and json.loads(words[8]) == body
        page.keyboard.press("Escape")
        expect(page.locator("#curl-dialog")).to_be_hidden()


@needs_browser
def test_other_tabs_list_what_is_new_and_settings_are_kept_once(at_home: Visit) -> None:
    other = at_home.context.new_page()
    other.goto(at_home.page.url)
    at_home.answers({"content": "A fox."})
    at_home.set(system="Be kind. " * 1000)
    at_home.ask("Hello")
    at_home.ask("Again")
    expect(other.locator("#chat-list a")).to_have_text(["Hello"])
    other.locator("#chat-list a").click()
    expect(other.locator(".answer .text")).to_have_text(["A fox.", "A fox."])
    shared = other.evaluate(
        """async () => {
          const { Store } = await import("./dashboard/store.js");
          const { turns } = await (await Store.open()).get(location.hash.slice(1));
          return turns.length === 2 && turns[0].request === turns[1].request;
        }"""
    )
    assert shared


@needs_browser
def test_the_context_that_is_left_is_said(at_home: Visit) -> None:
    at_home.answers({"content": "A fox."})
    context = at_home.page.locator("#context")
    at_home.ask("Hello")
    expect(context).to_have_text("104 of 128 tokens of context left")
    at_home.page.get_by_role("button", name="New chat").click()
    expect(context).to_be_empty()
