"""HTML pages in one file that loads nothing else.

Text from logs and runs reaches a page escaped, or as JSON that contains no tags and that scripts insert as
text. A content security policy lets the browser run only the page's own script, and load no other file.
"""

import base64
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from zaya_jax.files import durable

_HERE = pathlib.Path(__file__).parent
STYLE, SCRIPT = _HERE / "page.css", _HERE / "page.js"
"""Style and script that all pages share."""
TEMPLATE = _HERE / "page.html.jinja"
"""Template of a page, which marks its body, style, script and data as safe."""


def make_page(
    title: str,
    body: str,
    *,
    data: Mapping[str, Any],
    styles: Sequence[pathlib.Path],
    scripts: Sequence[pathlib.Path],
) -> str:
    """Returns the text of an HTML page.

    Args:
      title: title, as plain text.
      body: HTML in which all foreign text is escaped.
      data: JSON values that the scripts find in the constant `data`.
      styles: CSS files, which follow the style that all pages share.
      scripts: JavaScript files, which follow the script that all pages share.
    """
    style = "".join(path.read_text() for path in (STYLE, *styles))
    script = "".join(path.read_text() for path in (SCRIPT, *scripts))
    page = render(
        TEMPLATE,
        title=title,
        body=body,
        data=as_inert_json(data),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
    )
    # JSON may contain unpaired surrogates, and folder names bytes that are not UTF-8; neither can be encoded.
    return page.encode(errors="replace").decode()


def render(template: pathlib.Path, **values: Any) -> str:
    """Returns the HTML of a Jinja template, in which all values are escaped unless it marks them as safe.

    Args:
      template: path of the template.
      **values: values of its variables; one that is missing is an error.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        # Lines with statements alone leave no empty lines in the page.
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(values)


def as_inert_json(content: Mapping[str, Any]) -> str:
    """Returns JSON that contains no HTML tags, whatever its strings are."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    # A string with "</script>" would otherwise end the block that holds it.
    return text.replace("<", "\\u003c")


def _hash(text: str) -> str:
    # The hashes allow exactly the two inline blocks; inline style attributes and event handlers stay
    # forbidden.
    return base64.b64encode(bytes.fromhex(durable.sha256(text.encode()))).decode()
