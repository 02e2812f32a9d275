"""Docstrings of Google's form, as the Markdown that a page shows of them."""

import dataclasses
import inspect
import re
from collections.abc import Iterator

SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises")
_SECTION = re.compile(rf"^({'|'.join(SECTIONS)}):\s*$")
_ENTRY = re.compile(r"^(\*{0,2}\w[\w.]*(?: [^:]*)?|[\w, ]+): ?(.*)$")


@dataclasses.dataclass(frozen=True)
class Docstring:
    """A docstring in its parts.

    Attributes:
      text: what stands before all sections.
      sections: their texts by name, without the indentation.
    """

    text: str
    sections: dict[str, str]

    @property
    def summary(self) -> str:
        """The first paragraph of the text."""
        return self.text.partition("\n\n")[0]

    def entries(self, section: str) -> dict[str, str]:
        """What a section says by name: of a field, an argument, an error."""
        return dict(_entries(self.sections.get(section, "")))


def parse(raw: str | None) -> Docstring:
    """Takes a docstring apart, as it stands in the source."""
    parts: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(raw or "").splitlines():
        if found := _SECTION.match(line):
            name = found[1]
            parts[name] = []
        elif name and line and not line.startswith(" "):  # prose goes on behind a section
            name = ""
            parts[""] += ["", line]
        else:
            parts[name].append(line)
    text = "\n".join(parts.pop("")).strip()
    return Docstring(text, {name: inspect.cleandoc("\n" + "\n".join(lines)) for name, lines in parts.items()})


def _entries(text: str) -> Iterator[tuple[str, str]]:
    name, lines = "", []
    for line in text.splitlines():
        found = None if line.startswith(" ") else _ENTRY.match(line)
        if found:
            if name:
                yield name, " ".join(lines)
            name, lines = found[1], [found[2]]
        else:
            lines.append(line.strip())
    if name:
        yield name, " ".join(lines)


def to_markdown(docstring: Docstring, *, leave_out: tuple[str, ...] = ()) -> str:
    """The text and then each section as a list.

    Args:
      docstring: in its parts.
      leave_out: sections that are shown elsewhere, as a class's attributes are.
    """
    blocks = [docstring.text]
    for name, text in docstring.sections.items():
        if name in leave_out:
            continue
        entries = {} if name in ("Returns", "Yields") else docstring.entries(name)
        if entries:
            blocks.append(
                f"**{name}**\n\n" + "\n".join(f"- `{key}`: {each}" for key, each in entries.items())
            )
        else:
            blocks.append(f"**{name}**\n\n{text}")
    return "\n\n".join(filter(None, blocks))
