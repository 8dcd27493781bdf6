"""The page at /: chats, which the browser keeps, and a live picture of the cache.

Plain HTML, CSS and ES modules in `static/`, without a build step and without anything from other
hosts: `static/vendor/` has the libraries, as their authors minified them. The browser is told to
refuse whatever does not come from here. The page holds no secret: it is served without a key and
asks for one where the server wants it.
"""

from __future__ import annotations

from flask import Blueprint, Flask, Response

NAME = "dashboard"
# Nothing inline, nothing from elsewhere, and nobody shows this page inside theirs. Text becomes
# markup only through DOMPurify (static/purified.js).
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def install(app: Flask) -> None:
    """GET / and, under /dashboard/, the files of the page."""
    pages = Blueprint(NAME, __name__, static_folder="static", static_url_path=f"/{NAME}")

    @pages.get("/")
    def page() -> Response:
        return pages.send_static_file("index.html")

    @pages.after_request
    def add_headers(response: Response) -> Response:
        response.headers.update(_HEADERS)
        return response

    app.register_blueprint(pages)
