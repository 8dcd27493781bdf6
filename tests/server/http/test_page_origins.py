"""What a page of another origin can do with a server on this machine, in a browser."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_hybrid.server.http.app import create_app
from megatron_hybrid.server.http.serving import Serving
from megatron_hybrid.server.keys import ApiKey
from tests.server.fake_engine import FakeEngine
from tests.server.http.browsing import ATTACK, EVIL_HOST, Site, Visit, needs_browser


def other_site(environ: Any, start_response: Any) -> list[bytes]:
    """A page without anything, whose scripts are the tests'."""
    start_response("200 OK", [("Content-Type", "text/html")])
    return [b"<!doctype html><title>Elsewhere</title>"]


@pytest.fixture
def elsewhere() -> Iterator[Site]:
    site = Site(other_site)
    yield site
    site.close()


CONTROLLED = ["v1/completions", "reset_prefix_cache", "pause", "resume"]


@needs_browser
@pytest.mark.parametrize("sandboxed", [False, True])
def test_a_page_of_another_origin_cannot_make_the_server_do_anything(
    site: Site,
    elsewhere: Site,
    visit: Callable[..., Visit],
    engine: FakeEngine,
    sandboxed: bool,
) -> None:
    page = visit().page
    statuses: list[int] = []
    page.on("response", lambda answer: statuses.append(answer.status))
    page.goto(elsewhere.url)
    where = page
    if sandboxed:  # of the origin "null"
        page.set_content("<iframe sandbox='allow-scripts allow-forms' srcdoc='<p>'></iframe>")
        where = page.frames[1]
    statuses.clear()
    found = where.evaluate(ATTACK, [site.url, CONTROLLED])
    assert len(found) == 20
    assert {text for _, text in found} == {"", None}  # nothing that the page can read
    assert len(statuses) == 24 and set(statuses) == {403}  # preflights are not among them
    assert engine.log == [] and not engine.is_paused


@needs_browser
def test_a_page_whose_name_comes_to_point_here_is_not_served(
    serving: Serving, visit: Callable[..., Visit], engine: FakeEngine
) -> None:
    """DNS rebinding: to the browser, the attacker's page and this server are of one origin."""
    app = create_app(serving)

    def rebound(environ: Any, start_response: Any) -> Any:
        """The attacker's server while the page loads, ours from then on."""
        serve = other_site if environ["PATH_INFO"] == "/trap" else app
        return serve(environ, start_response)

    site = Site(rebound)
    try:
        page = visit().page
        evil = f"http://{EVIL_HOST}:{site.port}/"
        page.goto(f"{evil}trap")
        statuses: list[int] = []
        page.on("response", lambda answer: statuses.append(answer.status))
        found = page.evaluate(ATTACK, [evil, CONTROLLED])
        reads = """(paths) => Promise.all(paths.map((path) => fetch(path).then((a) => a.text())))"""
        found += [["", text] for text in page.evaluate(reads, ["stats", "metrics", "v1/models"])]
        assert len(found) == 23 and all("--allowed-hosts" in text for _, text in found)
        assert len(statuses) == 31 and set(statuses) == {403}
        assert engine.log == [] and not engine.is_paused
    finally:
        site.close()


@needs_browser
def test_an_allowed_page_of_another_origin_asks_and_reads(
    serving: Serving, elsewhere: Site, visit: Callable[..., Visit]
) -> None:
    origin = elsewhere.url.removesuffix("/")
    serving.options = dataclasses.replace(
        serving.options, allowed_origins=(origin,), api_keys=(ApiKey("sesame", "door"),)
    )
    site = Site(serving)
    try:
        page = visit().page
        page.goto(elsewhere.url)
        ask = """async ([url, key, body]) => {
            const headers = {
              "Content-Type": "application/json", "Authorization": `Bearer ${key}`,
              "X-Stainless-Lang": "js",
            };
            const request = {method: "POST", headers, body: JSON.stringify(body)};
            const answer = await fetch(url + "v1/completions", request);
            return [answer.status, await answer.text()];
        }"""
        body = {"prompt": "Hello", "max_tokens": 2, "temperature": 0}
        for key, more, status, text in (
            ("sesame", {}, 200, '"text_completion"'),
            ("sesame", {"stream": True}, 200, "[DONE]"),
            ("sesame", {"prompt": 5}, 400, '"param":"prompt"'),
            ("wrong", {}, 401, '"invalid_api_key"'),
        ):
            found, answer = page.evaluate(ask, [site.url, key, {**body, **more}])
            assert found == status and text in answer
    finally:
        site.close()
