"""The markups of tool calls: tags around a call and around a result, by vLLM's names of their parsers.

What is between the tags of a call is detected for each call: JSON, `{"name": ..., "arguments": {...}}`, or
tags, `<function=NAME><parameter=NAME>value</parameter></function>`.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping

FUNCTION, PARAMETER = "<function=", "<parameter="
FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"
_MAX_TAG_CHARACTERS = 256
"""Maximum length of an opening tag with a name: text is not held back for longer."""
_NAME = r"[^<>\n]*"


@dataclasses.dataclass(frozen=True)
class Markup:
    """Tags of tool calls.

    Attributes:
      name: name of the parser.
      call: tag that opens a call.
      call_end: tag that closes a call.
      response: tag that opens the result of a call.
      response_end: tag that closes the result of a call.
      has_inner_tags: whether calls consist of tags rather than JSON. These tags are then removed from the
        content, where they are left over from an incomplete call.
    """

    name: str
    call: str
    call_end: str
    response: str
    response_end: str
    has_inner_tags: bool

    @property
    def tags(self) -> tuple[str, str, str, str]:
        """The tags around calls and results."""
        return self.call, self.call_end, self.response, self.response_end

    def marks(self, specials: Mapping[str, int]) -> dict[int, str]:
        """The tags that are special tokens of a tokenizer, by token id.

        Args:
          specials: ids of the special tokens, by name.
        """
        return {specials[tag]: tag for tag in self.tags if tag in specials}


_ZYPHRA = (
    "<zyphra_tool_call>",
    "</zyphra_tool_call>",
    "<zyphra_tool_response>",
    "</zyphra_tool_response>",
)
_PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MARKUPS: Mapping[str, Markup] = {
    each.name: each
    for each in (
        # ZAYA1, Qwen 2.5, Qwen 3 and Hermes, and Qwen3-Coder.
        Markup("zaya_xml", *_ZYPHRA, has_inner_tags=True),
        Markup("hermes", *_PLAIN, has_inner_tags=False),
        Markup("qwen3_coder", *_PLAIN, has_inner_tags=True),
    )
}
"""All markups by name."""


class TagScanner:
    """Finds tags in text that arrives in pieces, and holds back what may be the beginning of a tag."""

    def __init__(self, tags: Iterable[str], *, with_inner_tags: bool = False, with_broken_tags: bool = False):
        """Creates a scanner.

        Args:
          tags: literal tags.
          with_inner_tags: whether the tags of functions and parameters are found too.
          with_broken_tags: whether such a tag may end without ">" before another tag or the end of its line.
        """
        self._literals = (*tags, *((FUNCTION_END, PARAMETER_END) if with_inner_tags else ()))
        self._named = (FUNCTION, PARAMETER) if with_inner_tags else ()
        end = r"(?:>|(?=[<\n]))" if with_broken_tags else ">"
        patterns = [*map(re.escape, self._literals), *(tag + _NAME + end for tag in self._named)]
        # A pattern that matches nothing, if there are no tags.
        # One pattern for all tags: the first tag in the text wins, whichever it is.
        self._pattern = re.compile("|".join(patterns) or r"(?!)")

    def find(self, text: str, start: int = 0) -> re.Match[str] | None:
        """Returns the first complete tag of a text."""
        return self._pattern.search(text, start)

    def partial(self, text: str) -> int:
        """Returns the number of characters at the end of a text that may begin a tag.

        One incomplete tag may follow another, as in `</fun</func`. If a complete tag follows, both are
        dropped, so that what remains of them does not join with later text to a tag.
        """
        end = len(text)
        while (first := text.rfind("<", 0, end)) >= 0 and len(text) - first < _MAX_TAG_CHARACTERS:
            if not self._is_incomplete(text[first:end]):
                break
            end = first
        return len(text) - end

    def _is_incomplete(self, text: str) -> bool:
        """Whether a text from "<" on is an incomplete tag."""
        if any(literal.startswith(text) for literal in (*self._literals, *self._named)):
            return True
        return text.startswith(self._named) and not {">", "\n"} & set(text)

    def without_partial(self, text: str, *, is_end: bool) -> str:
        """Removes incomplete tags from the end of a text that no more text completes.

        Args:
          text: the text.
          is_end: whether nothing follows. A lone "<" then stays, because it can be a sign of mathematics.
        """
        number = self.partial(text)
        return text if is_end and number == 1 else text[: len(text) - number]


def name_in(tag: str) -> str:
    """The name in the tag of a function or parameter."""
    return tag[:-1].partition("=")[2].strip()
