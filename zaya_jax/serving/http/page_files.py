"""Static files of the chat page: no build step, and nothing from other servers.

Everybody may load the page; its script prompts for the key. `HEADERS` allow only these scripts and styles,
and no frame of another site in which a user could be tricked into clicking.
"""

import dataclasses
import pathlib
from collections.abc import Mapping

from zaya_jax.files import durable
from zaya_jax.html_page import frame

FOLDER = pathlib.Path(__file__).parents[1] / "page"
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
    # Another version of the server has another page: browsers must check with the ETag before they use a
    # copy.
    "Cache-Control": "no-cache",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageFile:
    """A static file as it is sent.

    Attributes:
      content: bytes of the file.
      media_type: value of the Content-Type header.
      tag: value of the ETag header, a hash of the content.
    """

    content: bytes
    media_type: str
    tag: str


def page_files() -> Mapping[str, PageFile]:
    """Returns all files of the page by URL path, such as "/page.css"; the page itself is "/"."""
    paths = {f"/{path.name}": path for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES}
    # The page is only at "/", so that relative links in it have one meaning.
    paths["/"] = paths.pop("/index.html")
    paths["/shared.css"] = frame.STYLE
    # Read once: the files are small, and a request for one never touches the disk.
    return {url: _read(path) for url, path in paths.items()}


def _read(path: pathlib.Path) -> PageFile:
    content = path.read_bytes()
    # ETags are quoted (RFC 9110, section 8.8.3).
    tag = f'"{durable.sha256(content)[:16]}"'
    return PageFile(content=content, media_type=TYPES[path.suffix], tag=tag)
