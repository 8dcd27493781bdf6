"""A browser before the page at /, for the tests that need one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_hybrid.server.http.serving import Serving


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from tests.server.http.browsing import CHROMIUM, FLAGS, playwright

    assert CHROMIUM is not None
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """A function that opens a window of its own (browsing.Visit)."""
    from tests.server.http.browsing import Visit

    visits: list[Visit] = []

    def start(**settings: Any) -> Visit:
        visits.append(Visit(browser, **settings))
        return visits[-1]

    yield start
    for one in visits:
        one.context.close()


@pytest.fixture
def site(serving: Serving) -> Iterator[Any]:
    """The application around the fake engine (browsing.Site)."""
    from tests.server.http.browsing import Site

    site = Site(serving)
    yield site
    site.close()


@pytest.fixture
def at_home(site: Any, visit: Callable[..., Any]) -> Any:
    """The page of the fake engine, with figures that do not move."""
    from tests.server.http.browsing import STATS

    home = visit()
    home.figures(lambda: (200, STATS))
    home.open(site.url)
    return home
