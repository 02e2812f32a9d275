"""Text with origins: every operation returns the same text as that of `str`, and no origin is invented."""

import random
import string

import pytest

from zaya_jax.data.chats.templates.traced_text import (
    TEMPLATE,
    USER,
    TracedText,
    concat,
    of_template,
    origins_of,
)

OPERATIONS = {
    "lower": lambda t, o: t.lower(),
    "upper": lambda t, o: t.upper(),
    "title": lambda t, o: t.title(),
    "casefold": lambda t, o: t.casefold(),
    "swapcase": lambda t, o: t.swapcase(),
    "capitalize": lambda t, o: t.capitalize(),
    "strip": lambda t, o: t.strip(),
    "strip characters": lambda t, o: t.strip("<aß "),
    "lstrip": lambda t, o: t.lstrip(),
    "rstrip": lambda t, o: t.rstrip("\n "),
    "split": lambda t, o: t.split(),
    "split once": lambda t, o: t.split(None, 1),
    "split at": lambda t, o: t.split("<"),
    "rsplit": lambda t, o: t.rsplit(None, 1),
    "rsplit at": lambda t, o: t.rsplit("a", 1),
    "splitlines": lambda t, o: t.splitlines(),
    "splitlines with ends": lambda t, o: t.splitlines(True),
    "partition": lambda t, o: t.partition("a"),
    "rpartition": lambda t, o: t.rpartition(">"),
    "replace": lambda t, o: t.replace("a", o),
    "replace once": lambda t, o: t.replace("<", o, 1),
    "replace nothing": lambda t, o: t.replace("", o),
    "replace nothing twice": lambda t, o: t.replace("", o, 2),
    "join": lambda t, o: t.join([o, t, o]),
    "join characters": lambda t, o: o.join(t),
    "slice": lambda t, o: t[1:-2],
    "reverse": lambda t, o: t[::-1],
    "last": lambda t, o: t[-1:],
    "times": lambda t, o: 2 * t * 2,
    "plus": lambda t, o: o + t + o,
    "percent": lambda t, o: "%s|%5s|%%|%d".__mod__((t, o, 3)),
    "remove": lambda t, o: t.removeprefix("<").removesuffix(">"),
    "center": lambda t, o: t.center(30, "*"),
    "zfill": lambda t, o: t.zfill(20),
    "iterate": lambda t, o: list(t),
}


def plain(value):
    return [str.__str__(each) for each in value] if isinstance(value, list | tuple) else str.__str__(value)


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_equal_those_of_str_and_keep_origins(name):
    """Uppercase letters are the template's: they keep their origin, and no other character receives it."""
    numbers = random.Random(name)
    operation = OPERATIONS[name]
    for _ in range(60):
        letters = numbers.choices("aB<> \nßİΣς|é", k=numbers.randrange(1, 12))
        parts = [(letter, numbers.random() < 0.5) for letter in letters]
        text = concat(of_template(x) if mine else TracedText(x, bytes(len(x))) for x, mine in parts)
        other = TracedText("<u>")
        result = operation(text, other)
        assert plain(result) == plain(operation(str.__str__(text), "<u>"))
        mine = operation(of_template(str.__str__(text)), of_template("<u>"))
        for each in mine if isinstance(mine, list | tuple) else [mine]:
            if isinstance(each, TracedText):
                assert USER not in origins_of(each) or name == "percent"
        theirs = operation(TracedText(str.__str__(text)), TracedText("<u>"))
        for each in theirs if isinstance(theirs, list | tuple) else [theirs]:
            if name != "percent":  # the format string is plain text of this file, and a number is not text
                assert set(origins_of(each)) <= {USER}


def test_origins_follow_each_character():
    text = of_template("<b>") + TracedText(" Hi ") + of_template("</b>")
    assert [*zip(text.strip().lower(), origins_of(text.lower()), strict=True)][3:7] == [
        (" ", USER), ("h", USER), ("i", USER), (" ", USER),
    ]  # fmt: skip
    left, right = text.split("Hi")
    assert origins_of(left) == bytes([TEMPLATE] * 3 + [USER])
    assert origins_of(right) == bytes([USER] + [TEMPLATE] * 4)
    assert origins_of(text.replace("Hi", of_template("<x>"))) == bytes(
        [1] * 3 + [0] + [1] * 3 + [0] + [1] * 4
    )


def test_a_plain_text_is_the_users():
    assert set(origins_of(string.ascii_letters)) == {USER}
    assert origins_of("a" + of_template("b")) == bytes([USER, TEMPLATE])
