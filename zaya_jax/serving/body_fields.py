"""The fields of a request's body, taken one by one with suspicion: each mistake has its sentence."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from zaya_jax.fields import did_you_mean
from zaya_jax.json_files import parse_object
from zaya_jax.serving.refusals import Refused

LONGEST_SHOWN = 60
"""Characters of a wrong value that a sentence repeats."""


class BodyFields:
    """An object of JSON whose fields are taken; what nobody took is refused in the end."""

    def __init__(self, values: dict[str, Any]):
        self._values = values
        self._known: set[str] = set()

    def take(self, name: str) -> Any:
        """A value as it stands; None for one that is missing or null, which mean the same."""
        self._known.add(name)
        return self._values.get(name)

    def whole(self, name: str, *, least: int, most: int, default: int | None = None) -> int | None:
        """A whole number within bounds."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise wrong(name, value, f"a whole number from {least} to {most}")
        return value

    def number(
        self, name: str, *, least: float | int, most: float | int, default: float | None = None
    ) -> float | None:
        """A number within its bounds."""
        value = self.take(name)
        if value is None:
            return default
        # Not math.isfinite, which cannot make a float of every whole number; NaN fails a comparison.
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            raise wrong(name, value, f"a number from {least:g} to {most:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        """Whether a switch is on."""
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(name, value, "true or false")
        return bool(value)

    def text(self, name: str) -> str | None:
        """Some text that has a form in UTF-8."""
        value = self.take(name)
        return None if value is None else as_text(value, name)

    def refuse_rest(self) -> None:
        """Refuses fields that nobody took: what they ask for would not be done.

        Raises:
          Refused: with the name of the first.
        """
        for name in self._values:
            if name not in self._known:
                shown = ascii(name)[1:-1][:LONGEST_SHOWN]
                hint = did_you_mean(name[:LONGEST_SHOWN], self._known) or "see the README for those there are"
                raise Refused(f'there is no field "{shown}"; {hint}', field=shown, code="unknown_parameter")


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is.

    Raises:
      Refused: if it is none.
    """
    try:
        return parse_object(body, "the body")
    except ValueError as error:
        # Ours, of what is a client's mistake. It may repeat keys, and they may be no text.
        raise Refused(str(error).encode("ascii", "backslashreplace").decode()[:500]) from None


def as_text(value: Any, name: str) -> str:
    """A value that must be text, and such as has a form in UTF-8.

    Raises:
      Refused: if it is not.
    """
    if not isinstance(value, str):
        raise wrong(name, value, "text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = f"{name} has half a surrogate pair at character {error.start}; it must be text"
        raise Refused(message, field=name) from None
    return value


def wrong(name: str, value: Any, right: str) -> Refused:
    """That a field has a value that cannot be, and what would be right."""
    return Refused(f"{name} is {shown(value)}; it must be {right}", field=name)


def shown(value: Any) -> str:
    """A value in a sentence: short, and of ASCII, as half a surrogate pair cannot be sent."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, float) and not math.isfinite(value):
        return "no finite number"
    names = {True: "true", False: "false", None: "null"}
    if value is None or isinstance(value, bool):
        return names[value]
    text = ascii(value[: LONGEST_SHOWN + 1] if isinstance(value, str) else value)
    return text if len(text) <= LONGEST_SHOWN else text[: LONGEST_SHOWN - 3] + "..."


def refuse_unless_default(fields: BodyFields, defaults: Mapping[str, Iterable[Any]]) -> None:
    """Takes fields of OpenAI's that we have not: at their defaults they ask for nothing.

    Args:
      fields: of the request.
      defaults: by name, the values that ask for nothing; null always is one.

    Raises:
      Refused: for another value.
    """
    for name, values in defaults.items():
        value = fields.take(name)
        # 0 == False in Python; a switch that is 0 is a mistake that costs nobody anything.
        if value is not None and not any(value == each for each in values):
            raise Refused(
                f"{name} is {shown(value)}, which this server cannot do; leave it out",
                field=name,
                code="unsupported_parameter",
            )
