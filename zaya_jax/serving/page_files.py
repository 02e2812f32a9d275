"""The files of the server's own page: static, no build step, nothing from elsewhere.

The page is given to everybody; it asks for the key by itself. `HEADERS` keep it safe: no script and no style
but these files, and no frame around it in which another site could have it clicked.
"""

import dataclasses
import pathlib
from collections.abc import Mapping

from zaya_jax import durable
from zaya_jax.aegis import pages

FOLDER = pathlib.Path(__file__).parent / "page"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # With another version of the server comes another page: a browser asks each time, and gives its tag.
    "Cache-Control": "no-cache",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageFile:
    """A file as it is sent, with the tag by which a browser knows that it has it."""

    content: bytes
    media_type: str
    tag: str


def page_files() -> Mapping[str, PageFile]:
    """All files of the page by their path at the server, such as "/page.css"; the page itself is "/"."""
    places = {f"/{path.name}": path for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES}
    places["/"] = places.pop("/index.html")
    places["/house.css"] = pages.STYLE
    return {at: _read(path) for at, path in places.items()}


def _read(path: pathlib.Path) -> PageFile:
    content = path.read_bytes()
    # ETags are quoted (RFC 9110, section 8.8.3).
    tag = f'"{durable.sha256(content)[:16]}"'
    return PageFile(content=content, media_type=TYPES[path.suffix], tag=tag)
