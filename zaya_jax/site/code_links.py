"""A Sphinx extension: names of our packages in backticks become links to the API reference.

In Markdown a full name such as `zaya_jax.model.router.route` does; in docstrings also a name of the same
module, or one that the module imports.
"""

import re
import sys
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging

_NAME = re.compile(r"(?:zaya_jax|pallas_kernels)(?:\.\w+)+|[A-Za-z_]\w*(?:\.\w+)*")
_FULL_NAME = re.compile(r"(?:zaya_jax|pallas_kernels)\.")
_FILE = re.compile(r"\.(?:py|md|sh|json|toml|html)$")
_LOGGER = logging.getLogger(__name__)


class CodeLinks(SphinxPostTransform):
    """Wraps literals that name an object of ours in a link."""

    # Before Sphinx resolves references, which has priority 10.
    default_priority = 5

    def run(self, **kwargs: Any) -> None:
        """Replaces the literals of one page."""
        objects = self.env.get_domain("py").objects  # pyright: ignore[reportAttributeAccessIssue]
        # A list, because the loop changes the tree that it goes through.
        for literal in list(self.document.findall(nodes.literal)):
            text = literal.astext().removesuffix("()")
            is_linked = isinstance(literal.parent, nodes.reference | addnodes.pending_xref)
            if not _NAME.fullmatch(text) or _FILE.search(text) or is_linked:
                continue
            entry = _entry(_full_names(text, _module(literal)), objects)
            if entry is None:
                if _FULL_NAME.match(text):
                    _LOGGER.warning("no page documents `%s`", text, location=literal, type="ref")
                continue
            uri = self.app.builder.get_relative_uri(self.env.docname, entry.docname)
            link = nodes.reference("", "", internal=True, refuri=f"{uri}#{entry.node_id}")
            literal.replace_self(link)
            link += literal


def _module(node: nodes.Node) -> str:
    """Module of the innermost documented object around a node; "" for prose."""
    while node is not None:
        if isinstance(node, addnodes.desc) and isinstance(signature := node[0], nodes.Element):
            return signature.get("module") or ""
        node = node.parent
    return ""


def _full_names(name: str, module: str) -> list[str]:
    """Full names that a name in a module may have, most specific first.

    The name may be defined there, be imported from where it is defined, or be an attribute of a class whose
    docstring explains it.
    """
    names = [name, f"{module}.{name}"]
    for parent, child in ((module, name), name.rpartition(".")[::2]):
        first, _, rest = child.partition(".")
        item = getattr(sys.modules.get(parent), first, None)
        where, qualified = getattr(item, "__module__", None), getattr(item, "__qualname__", None)
        if where and qualified:
            names.append(".".join(filter(None, (where, qualified, rest))))
    return names


def _entry(names: list[str], objects: dict[str, Any]) -> Any:
    """The documented object of the first known name; else the class that an attribute belongs to."""
    for name in names:
        if name in objects:
            return objects[name]
    for name in names:
        owner = objects.get(name.rpartition(".")[0])
        if owner is not None and owner.objtype in ("class", "exception"):
            return owner
    return None


def _to_restructured_text(
    app: Sphinx, what: str, name: str, item: Any, options: Any, lines: list[str]
) -> None:
    """Adapts a docstring to reStructuredText, which Sphinx expects: literal stars, and indented code."""
    for i, line in enumerate(lines):
        # Docstrings use stars for products and keyword-only arguments, not for emphasis.
        parts = re.split(r"(`+[^`]*`+)", line)
        parts[::2] = (re.sub(r"(?<!\\)\*", r"\\*", part) for part in parts[::2])
        lines[i] = "".join(parts)
        following = lines[i + 1 : i + 3]
        if line.endswith(":") and len(following) == 2 and following[0] == "" and following[1][:4] == " " * 4:
            # A second colon makes the indented text that follows a literal block.
            lines[i] += ":"


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the extension."""
    # RST's default role would make a citation of `name`; here it is code, as in Markdown.
    app.config.default_role = "literal"
    app.add_post_transform(CodeLinks)
    app.connect("autodoc-process-docstring", _to_restructured_text, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
