"""The picture of the cache on the page at /: its figures, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.http.browsing import STATS, Site, Visit, expect, needs_browser


def test_an_engine_that_is_down_is_shown_and_so_is_its_return(
    site: Site, visit: Callable[..., Visit]
) -> None:
    down = {"error": {"message": "The engine restarts.", "type": "server_error"}}
    answers = {"now": (503, down)}
    home = visit()
    home.figures(lambda: answers["now"])
    home.page.goto(site.url)
    connection = home.page.locator("#connection")
    expect(connection).to_have_text("engine down")
    expect(home.page.locator("#notice")).to_have_text("The engine restarts.")
    answers["now"] = (200, STATS)
    expect(connection).to_have_text("live")
    expect(home.page.locator("#notice")).to_be_empty()
    answers["now"] = (200, {**STATS, "engine": {**STATS["engine"], "paused": True}})
    expect(connection).to_have_text("engine paused")
    home.page.unroute("**/stats")
    home.context.set_offline(True)
    expect(connection).to_have_text("no connection")
    home.context.set_offline(False)
    expect(connection).to_have_text("live")


def test_the_picture_shows_the_figures_of_the_server(at_home: Visit) -> None:
    page = at_home.page
    for name, shown in (
        ("skipped", "75 %"),
        ("running", "5"),
        ("waiting", "2"),
        ("first", "120 ms"),
        ("between", "–"),
    ):
        expect(page.locator(f"#tile-{name}")).to_have_text(shown)
    expect(page.locator("#kv .legend li")).to_have_text(
        ["in use150", "cached < 10 s200", "cached older50", "free600"]
    )
    expect(page.locator("#state .legend li")).to_have_text(
        ["live5", "cached < 10 s8", "cached older3", "free24"]
    )
    widths = page.locator("#kv .piece").evaluate_all(
        "pieces => pieces.map((piece) => piece.getBoundingClientRect().width)"
    )
    assert widths[3] == max(widths) and widths[2] == min(widths)
    assert widths[1] / widths[3] == pytest.approx(200 / 600, rel=0.1)
    expect(page.get_by_role("img", name=re.compile("^KV blocks: in use 150"))).to_be_visible()
    rows = dict(
        zip(
            page.locator("#lost dt").all_inner_texts(),
            page.locator("#lost dd").all_inner_texts(),
            strict=True,
        )
    )
    assert rows["behind the last grid position"] == "48"
    assert rows["a new cause"] == "7"
    assert rows["its state had to go"] == "0"
    assert at_home.errors == []


def test_memory_of_the_host_and_files_are_shown_where_there_are_some(
    site: Site, visit: Callable[..., Visit]
) -> None:
    tiers = {
        "tier_bytes": {"host": 2**34, "disk": 2**40},
        "tier_bytes_used": {"host": 2**32, "disk": 2**39},
    }
    answers = {"now": (200, STATS)}
    home = visit()
    home.figures(lambda: answers["now"])
    home.page.goto(site.url)
    expect(home.page.locator("#kv .legend li").first).to_have_text("in use150")
    expect(home.page.locator("#host-part")).to_be_hidden()
    expect(home.page.locator("#files-part")).to_be_hidden()
    answers["now"] = (200, {**STATS, "engine": {**STATS["engine"], **tiers}})
    expect(home.page.locator("#host .legend li")).to_have_text(["kept4,096", "free12,288"])
    expect(home.page.locator("#files .legend li")).to_have_text(["kept524,288", "free524,288"])
    assert home.errors == []


def test_prefill_is_drawn_as_rates(site: Site, visit: Callable[..., Visit]) -> None:
    asked = {"times": 0}

    def answer() -> tuple[int, Any]:
        n = asked["times"] = asked["times"] + 1
        engine = {**STATS["engine"], "computed_tokens": 100 * n, "skipped_tokens": 400 * n}
        return 200, {**STATS, "time": 2.0 * n, "engine": engine}

    home = visit()
    home.figures(answer)
    home.page.goto(site.url)
    numbers = home.page.locator("#prefill .legend b")
    expect(numbers).to_have_text(["50", "200"])
    drawn = home.page.locator("#prefill path").evaluate_all(
        "paths => paths.map((path) => path.getBBox().height)"
    )
    assert drawn[1] / drawn[0] == pytest.approx(4, rel=0.05)


def test_figures_that_are_missing_are_no_error(site: Site, visit: Callable[..., Visit]) -> None:
    home = visit()
    home.figures(lambda: (200, {}))
    home.open(site.url)
    expect(home.page.locator("#tile-running")).to_have_text("–")
    assert home.errors == []


def test_a_hidden_page_does_not_ask(site: Site, visit: Callable[..., Visit]) -> None:
    asked: list[bool] = []
    home = visit()
    home.figures(lambda: asked.append(True) or (200, STATS))
    home.page.add_init_script(
        "Object.defineProperty(document, 'hidden', { get: () => window.isHidden === true })"
    )
    home.open(site.url)
    turn = """(hidden) => {
        window.isHidden = hidden;
        document.dispatchEvent(new Event("visibilitychange"));
    }"""
    home.page.evaluate(turn, True)
    home.page.wait_for_timeout(200)  # one may be on its way
    before = len(asked)
    home.page.wait_for_timeout(2500)
    assert len(asked) == before
    with home.page.expect_request("**/stats"):
        home.page.evaluate(turn, False)


@needs_browser
def test_the_last_minute_stands_beside_the_whole_time(
    site: Site, visit: Callable[..., Visit]
) -> None:
    now: dict[str, Any] = {"time": 1000.0, "counts": [4, 8, 9], "skipped": 9000}

    def figures() -> tuple[int, Any]:
        counts = now["counts"]
        latency = {
            "count": counts[-1],
            "p50": 0.12,
            "buckets": [[bound, n] for bound, n in zip((0.1, 0.2, 0.5), counts, strict=True)],
        }
        engine = {
            **STATS["engine"],
            "skipped_tokens": now["skipped"],
            "latency": {"time_to_first_token_seconds": latency},
        }
        return 200, {**STATS, "time": now["time"], "engine": engine}

    home = visit()
    home.figures(figures)
    home.open(site.url)
    first, skipped = (home.page.locator(f"#recent-{name}") for name in ("first", "skipped"))
    expect(first).to_have_text("last min –")
    # Four more requests: one up to 0.1 s, three between 0.2 and 0.5; the middle is 1/3 into these.
    now.update(time=1030.0, counts=[5, 9, 13], skipped=9700)
    expect(first).to_have_text("last min 300 ms")
    expect(skipped).to_have_text("last min 100 %")
    expect(home.page.locator("#tile-first")).to_have_text("120 ms")
    now.update(time=1095.0, counts=[7, 11, 15])  # of which the first four are too long ago
    expect(first).to_have_text("last min 50 ms")
    now.update(time=1200.0)
    expect(first).to_have_text("last min –")
    assert home.errors == []


@needs_browser
def test_every_figure_says_what_it_means_to_the_keyboard_and_the_pointer(at_home: Visit) -> None:
    page = at_home.page
    tip = page.locator(".tip")
    labels = page.locator("#cache .explained")
    rows = page.locator("#cache .tiles dt, #cache .legend li:not(.when), #cache .lost dt").all()
    unknown = 1  # a cause that this page has not heard of
    assert labels.count() == len(rows) - unknown
    page.locator("#reset").focus()
    for label in labels.all():
        page.keyboard.press("Tab")
        expect(label).to_be_focused()
        expect(tip).to_be_visible()
        meaning = page.locator(f"#{label.get_attribute('aria-describedby')}").inner_text()
        assert tip.inner_text() == meaning and len(meaning) > 30
        left, right = tip.evaluate(
            "n => [n.getBoundingClientRect().left, n.getBoundingClientRect().right]"
        )
        assert left >= 0 and right <= page.viewport_size["width"]
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()
    page.locator("#reset").focus()
    running = page.locator(".tiles div").nth(1)
    running.hover()
    expect(tip).to_contain_text("at this moment")
    box = tip.bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 5)  # one can go and read it
    expect(tip).to_be_visible()
    page.get_by_label("Message").hover()
    expect(tip).to_be_hidden()
    assert at_home.errors == []
