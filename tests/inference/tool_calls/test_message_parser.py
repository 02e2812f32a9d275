"""Messages with tool calls: mutated markup parses as a reference parser says, and none is in the content."""
# ruff: noqa: E501  (each message is a line)

import json
import random
import re

import pytest
import reference_parser
from reference_parser import SPECIAL, SPELLED, THINK, THINK_END

from zaya_jax.inference.engine.text_stream import Piece
from zaya_jax.inference.tool_calls.markup import MARKUPS
from zaya_jax.inference.tool_calls.message_parser import CallPart, MessageParser, ToolParsing

# All arguments are text, so that the reference needs no types.
STRINGS = {"type": "object", "properties": {name: {"type": "string"} for name in ("city", "days", "text")}}
TOOLS = [{"type": "function", "function": {"name": f"get_{i}", "parameters": STRINGS}} for i in range(3)]
IDS = {name: 101 + i for i, name in enumerate(SPELLED)}
NAMES = {THINK: "<think>", THINK_END: "</think>", **dict(zip(SPECIAL, SPELLED, strict=True))}
WORDS = [
    "Let me see.",
    " ",
    "\n",
    "a < b",
    "<b>",
    "</div>",
    "naïve 漢字",
    "{x}",
    "I",
    "</",
    "\n\n",
    "it is 22",
]


def pieces_of(text):
    """Splits a text with characters for special tokens into the pieces that a text writer returns."""
    for part in re.split("([\ue000-\ue005])", text):
        if part in NAMES:
            yield Piece(NAMES[part], is_mark=True)
        elif part:
            yield Piece(part)


def split(pieces, draw):
    """Splits texts anywhere, as tokens do."""
    for piece in pieces:
        if piece.is_mark:
            yield piece
            continue
        text = piece.text
        while text:
            number = draw.choice((1, 1, 2, 5, 40))
            yield Piece(text[:number])
            text = text[number:]


def parse(pieces, *, specials, markup="zaya_xml", tools=TOOLS, is_cut=False, is_reasoning=False, **options):
    """Returns content, reasoning, and [name, arguments] of each call."""
    parsing = ToolParsing(MARKUPS[markup], tools, specials, **options)
    parser = MessageParser(parsing, is_reasoning=is_reasoning)
    parts = [part for piece in pieces for part in parser.add(piece)]
    parts += parser.end(is_cut=is_cut)
    texts, calls = {True: "", False: ""}, []
    for part in parts:
        if not isinstance(part, CallPart):
            texts[part.is_reasoning] += part.text
            continue
        # The first part of a call has its name and id, and the parts come in order.
        assert (part.name is None) == (part.id is None) == (part.index == len(calls) - 1)
        calls += [[part.name, ""]] if part.name is not None else []
        calls[-1][1] += part.arguments
    assert parser.num_calls == len(calls)
    return texts[False], texts[True], calls


def random_call(draw, tags):
    name = f"get_{draw.randrange(3)}"
    values = {
        key: "".join(draw.choices(WORDS, k=2))
        for key in draw.sample(["city", "days", "text"], draw.randrange(3))
    }
    if draw.random() < 0.3:
        body = json.dumps({"name": name, "arguments": values}, ensure_ascii=draw.random() < 0.5)
        return f"{tags[0]}\n{body}\n{tags[1]}"
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"{tags[0]}\n<function={name}>\n{parameters}</function>\n{tags[1]}"


def random_message(draw, tags):
    text = "".join(draw.choices(WORDS, k=draw.randrange(4)))
    if draw.random() < 0.4:
        inner = random_call(draw, tags) if draw.random() < 0.3 else "hm"
        text = f"{THINK}\n{inner}\n{THINK_END}\n\n{text}"
    for _ in range(draw.randrange(1, 4)):
        text += random_call(draw, tags) + "".join(draw.choices(WORDS, k=draw.randrange(3)))
    return text


def mutate(text, draw, tags):
    """Cuts, removes, repeats, inserts or nests a part of the markup."""
    inner = ["</function>", "</parameter>", "<function=get_1>", "<parameter=city>"]
    found = list(re.finditer("|".join(map(re.escape, [*tags, *inner, THINK, THINK_END])), text))
    place, kind = (
        draw.randrange(len(text) + 1),
        draw.choice(("cut", "span", "tag", "twice", "orphan", "nested")),
    )
    chosen = draw.choice(found) if found else re.match("", text)
    match kind:
        case "cut":
            return text[:place]
        case "span":
            return text[:place] + text[place + draw.randrange(30) :]
        case "tag":
            return text[: chosen.start()] + text[chosen.end() :]
        case "twice":
            return text[: chosen.end()] + chosen[0] + text[chosen.end() :]
        case "orphan":
            return text[:place] + draw.choice([*tags, *inner, THINK, THINK_END]) + text[place:]
    return text[:place] + random_call(draw, tags) + text[place:]


@pytest.mark.parametrize("tags", [SPELLED, SPECIAL], ids=["text", "special tokens"])
def test_mutated_markup_parses_as_the_reference_and_does_not_leak(tags):
    specials = IDS if tags == SPECIAL else {}
    num_calls = num_cut = 0
    for seed in range(500):
        draw = random.Random(seed)
        text = random_message(draw, tags)
        for _ in range(draw.choice((0, 1, 1, 2, 4))):
            text = mutate(text, draw, tags)
        is_cut = draw.random() < 0.3
        found = parse(split(pieces_of(text), draw), specials=specials, is_cut=is_cut)
        expected = reference_parser.parse(text, tags, is_cut=is_cut)
        assert found == expected, (seed, text)
        # In one piece, too.
        assert found == parse(pieces_of(text), specials=specials, is_cut=is_cut), (seed, text)
        leaks = ["<function=get", "<parameter=", "</function>", "</parameter>", *tags]
        assert not [tag for tag in leaks if tag in found[0]], (seed, text)
        num_calls += len(found[2])
        for _, arguments in found[2]:
            num_cut += not arguments.endswith("}")
            assert is_cut or isinstance(json.loads(arguments), dict)
    # The mutations leave most calls intact, and some cut ones.
    assert num_calls > 600
    assert num_cut > 3


CALL = "\ue002\n<function=get_0>\n<parameter=city>\nParis\n</parameter>\n</function>\n\ue003"
PARIS = ["get_0", '{"city": "Paris"}']
MESSAGES = {
    "call only": (CALL, ("", "", [PARIS])),
    "text around": (f"Let me see.\n{CALL}\nDone.\n", ("Let me see.\nDone.", "", [PARIS])),
    "text after it": (f"See{CALL} done", ("See done", "", [PARIS])),
    "two": (f"{CALL}\n{CALL}", ("", "", [PARIS, PARIS])),
    "orphan": ("Volume set.\n</parameter>\n</function>\n\ue003", ("Volume set.\n\n\n", "", [])),
    "orphan in words": ("Done.</parameter></function>\ue003 All set.", ("Done. All set.", "", [])),
    "part of an orphan": ("answer </functi", ("answer ", "", [])),
    "broken orphan": ("Volume <parameter=ci\nset <function=f<b>", ("Volume \nset <b>", "", [])),
    "other tags": ("</div> <functional> a<b", ("</div> <functional> a<b", "", [])),
    "spelled tags": ("<zyphra_tool_call>x</zyphra_tool_call>", ("<zyphra_tool_call>x</zyphra_tool_call>", "", [])),
    "no end": (CALL[:-1], ("", "", [PARIS])),
    "no ends": (CALL[:40], ("", "", [["get_0", '{"city": "Pari"}']])),
    "no end, then text": (f"{CALL[:-1]}It is warm.", ("It is warm.", "", [PARIS])),
    "no end, then a call": (f"{CALL[:-1]}{CALL}", ("", "", [PARIS, PARIS])),
    "no end, then a result": (f"{CALL[:-1]}\ue00422\ue005", ("22", "", [PARIS])),
    "thought before": (f"\ue000hm\ue001\n\n{CALL}", ("", "hm", [PARIS])),
    "draft in a thought": (f"\ue000a{CALL}b\ue001no", ("no", f"a{CALL[1:-1]}b", [])),
    "thought without an end": (f"\ue000a\n{CALL}", ("", "a\n", [PARIS])),
    "nothing": ("\ue002\ue003", ("", "", [])),
    "junk": ("\ue002call get_0\ue003.", (".", "", [])),
    "no name": ("\ue002<function=>\n</function>\ue003", ("", "", [])),
    "end in a value": (CALL.replace("Paris", "</function> x"), ("", "", [["get_0", '{"city": "</function> x"}']])),
    "parameter twice": (
        CALL.replace("</function>", "<parameter=city>\nRome\n</parameter>\n</function>"), ("", "", [PARIS]),
    ),
    "json": ('\ue002{"name": "f", "arguments": {"a": [1, "}"]}}\ue003', ("", "", [["f", '{"a": [1, "}"]}']])),
    "json text": ('\ue002{"name": "f", "arguments": "{\\"a\\": 1}"}\ue003', ("", "", [["f", '{"a": 1}']])),
    "json list": ('\ue002[{"name": "f"}, {"name": "g", "parameters": {}}]\ue003', ("", "", [["f", "{}"], ["g", "{}"]])),
    "json without an end": ('\ue002{"name": "f", "arguments": {"a": "b', ("", "", [["f", '{"a": "b"}']])),
    "no json": ("\ue002{'name': 'f'}\ue003", ("", "", [])),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("size", [1, 1000])
def test_messages(name, size):
    text, expected = MESSAGES[name]
    pieces = [
        each
        for piece in pieces_of(text)
        for each in (
            [piece]
            if piece.is_mark
            else [Piece(piece.text[i : i + size]) for i in range(0, len(piece.text), size)]
        )
    ]
    assert parse(pieces, specials=IDS) == expected


def test_a_call_that_is_cut_does_not_look_complete():
    for length in range(2, len(CALL)):
        _, _, calls = parse(pieces_of(CALL[:length]), specials=IDS, is_cut=True)
        is_whole = "</function>" in CALL[:length]
        assert [arguments.endswith("}") for _, arguments in calls] == [is_whole] * len(calls)
    thought = f"\ue000a {CALL}"
    assert parse(pieces_of(thought), specials=IDS, is_cut=True) == ("", f"a {CALL[1:-1]}", [])


def test_arguments_are_streamed_by_parameter():
    text = "<tool_call><function=get_0><parameter=city>\nParis\n</parameter><parameter=days>\n3\n</parameter>"
    parser = MessageParser(ToolParsing(MARKUPS["qwen3_coder"], TOOLS, {}))
    parts = [part for character in text for part in parser.add(Piece(character))]
    assert [(part.name, part.arguments) for part in parts] == [
        ("get_0", ""), (None, '{"city": "Paris"'), (None, ', "days": "3"'),
    ]  # fmt: skip
    assert [part.arguments for part in parser.end(is_cut=False)] == ["}"]


def test_the_number_of_calls_is_limited():
    assert parse(pieces_of(CALL * 3), specials=IDS, max_calls=1) == ("", "", [PARIS])
    assert parse(pieces_of(f"a {CALL * 3}"), specials=IDS, max_calls=0) == ("a", "", [])


def test_json_in_tags_keeps_other_tags_as_text():
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    found = parse([Piece(f"<function=x> </parameter>{call}")], specials={}, markup="hermes")
    assert found == ("<function=x> </parameter>", "", [["f", '{"a": 1}']])


@pytest.mark.parametrize("body", ['{"name": "f", "arguments": {"a": "', "<function=f><parameter=a>\n"])
def test_long_arguments_with_signs_of_markup(body):
    text = "<b>x</b> {" * 5_000
    pieces = [Piece("<zyphra_tool_call>" + body), *(Piece(text[i : i + 33]) for i in range(0, len(text), 33))]
    _, _, ((_, arguments),) = parse(pieces, specials={})
    assert json.loads(arguments) == {"a": text}
