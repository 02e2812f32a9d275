"""Whether each link of a folder of HTML leads somewhere, and no page needs a network."""

import html.parser
import pathlib
import urllib.parse

RESOURCES = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src", "video": "src"}
"""What a browser fetches by itself, and where a tag says from where."""


class _Page(html.parser.HTMLParser):
    """The anchors of a page, its links, and what it fetches."""

    def __init__(self):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.resources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Takes down what one tag has."""
        values = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        if tag == "a" and (link := values.get("href")):
            self.links.append(link)
        if source := values.get(RESOURCES.get(tag, "")):
            self.resources.append(source)


def check_links(folder: pathlib.Path) -> list[str]:
    """A sentence for each link to a page or a place that is not there, and for each resource of a network."""
    pages = {}
    for file in sorted(folder.rglob("*.html")):
        pages[file.resolve()] = page = _Page()
        page.feed(file.read_text(encoding="utf-8"))
    return [
        problem
        for file, page in pages.items()
        for problem in [
            *(_broken(link, file, pages) for link in page.links),
            *(_fetched(link, file, pages) for link in page.resources),
        ]
        if problem
    ]


def _fetched(link: str, file: pathlib.Path, pages: dict[pathlib.Path, _Page]) -> str | None:
    if urllib.parse.urlsplit(link).netloc:
        return f"{file.name} fetches {link}; a page must open without a network"
    return _broken(link, file, pages)


def _broken(link: str, file: pathlib.Path, pages: dict[pathlib.Path, _Page]) -> str | None:
    parts = urllib.parse.urlsplit(link)
    if parts.scheme or parts.netloc:
        return None
    target = (file.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else file
    if not target.exists():
        return f"{file.name} links to {link}, which is not there"
    anchor = urllib.parse.unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return f"{file.name} links to {link}, a place that {target.name} does not have"
    return None
