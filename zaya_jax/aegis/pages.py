"""What our HTML pages share: a frame that asks nobody for anything, and the bar of what time went into.

What others wrote reaches a page escaped, or as JSON in which no tag can begin, which its script writes as
text; a policy in the page has the browser run no other script and ask for no other file.
"""

import base64
import html
import json
import pathlib
import string
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax import durable
from zaya_jax.aegis.goodput import BUCKETS, MEANINGS, Goodput

BAR_WIDTH = 10_000
"""Of the bar, in its own units: a ten-thousandth of a run is less than a pixel."""
_HERE = pathlib.Path(__file__).parent
STYLE, SCRIPT = _HERE / "page.css", _HERE / "page.js"
"""That all pages have in common."""
_FRAME = string.Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'sha256-$script_hash'; style-src 'sha256-$style_hash'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title><style>$style</style></head><body>
$body<div id="tip"></div>
<script type="application/json" id="data">$data</script>
<script>$script</script></body></html>
""")


def make_page(
    title: str,
    body: str,
    *,
    data: Mapping[str, Any],
    styles: Sequence[pathlib.Path],
    scripts: Sequence[pathlib.Path],
) -> str:
    """A page that needs no other file.

    Args:
      title: as text.
      body: HTML, in which all that others wrote is escaped.
      data: that the script finds as `data`.
      styles: files, behind the style that all pages share.
      scripts: files, behind the script that all pages share.
    """
    style = "".join(path.read_text() for path in (STYLE, *styles))
    script = "".join(path.read_text() for path in (SCRIPT, *scripts))
    page = _FRAME.substitute(
        title=html.escape(title),
        body=body,
        data=as_inert_json(data),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )
    # JSON may name halves of characters, and a folder bytes that are none: no file of UTF-8 can hold either.
    return page.encode(errors="replace").decode()


def as_inert_json(content: Mapping[str, Any]) -> str:
    """JSON in which no tag begins or ends, whatever its strings hold."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _hash(text: str) -> str:
    return base64.b64encode(bytes.fromhex(durable.sha256(text.encode()))).decode()


def class_of(bucket: str) -> str:
    """The class that gives a bucket its colour."""
    return f"b-{bucket.replace(' ', '-')}"


def bar_of(goodput: Goodput) -> str:
    """What the time of a run went into, as SVG."""
    place, found = 0.0, []
    for bucket in BUCKETS:
        width = BAR_WIDTH * goodput.seconds[bucket] / max(goodput.total, 1e-9)
        found.append(
            f'<rect class="{class_of(bucket)}" x="{place:.0f}" width="{width:.0f}" height="24">'
            f"<title>{bucket}: {MEANINGS[bucket]}</title></rect>"
        )
        place += width
    view = f'viewBox="0 0 {BAR_WIDTH} 24" preserveAspectRatio="none"'
    return f'<svg class="bar" {view}>{"".join(found)}</svg>'


def legend_of(goodput: Goodput) -> str:
    """The buckets of a run's time that hold any of it, as a list."""
    items = "".join(
        f'<li title="{MEANINGS[bucket]}"><svg viewBox="0 0 10 10"><rect class="{class_of(bucket)}" '
        f'width="10" height="10"/></svg>{bucket} {seconds / max(goodput.total, 1e-9):.1%} '
        f"({seconds:,.0f} s)</li>"
        for bucket in BUCKETS
        if (seconds := goodput.seconds[bucket])
    )
    return f'<ul class="buckets">{items}</ul>'
