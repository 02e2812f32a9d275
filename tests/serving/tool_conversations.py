"""Generated conversations with four tools, questions about them, and the chats that a base model learns.

Names of cities, people, currencies and subjects are made of syllables, so that questions have arguments that
no training text has, and a model must copy them.
"""

import json
import random
import re

SYLLABLES = [
    a + b + c
    for a, b, c in zip(
        "bdfgklmnprsvzjwhbdfgklmnprsvzjwh",
        "aeiouaeioueaiouaoueiaouieuaoeiuo",
        "nrlkmtsvnrlkmtsvrlnmkstvlnrkmsvt",
        strict=True,
    )
]
DAYS = ["today", "tomorrow", "Monday", "Friday", "Sunday"]
FORMS = {
    "get_weather": (
        "What is the weather in {city} {day}?",
        "Will it rain in {city} {day}?",
        "I am in {city} {day}: is it warm?",
    ),
    "convert_money": (
        "How much are {amount} {source} in {target}?",
        "Convert {amount} {source} to {target}.",
        "I have {amount} {source}, what is that in {target}?",
    ),
    "set_timer": (
        "Set a timer for {minutes} minutes {how}.",
        "Wake me in {minutes} minutes {how}.",
        "Start a timer of {minutes} minutes {how}, please.",
    ),
    "send_message": (
        "Tell {to} about {about}.",
        "Send {to} a message about {about}.",
        "Write to {to} about {about}, please.",
    ),
}
"""Forms of the questions that the four tools answer."""
_ACTIONS, _NOUNS, _PARAMETERS, _OTHERS = (
    line.split()
    for line in """\
book find open close paint clean order cancel count rent move sell print read plan call
table train door house room lamp page song garden train ticket picture box field school boat
guest start end color size price place shop owner title street key level weight number name
get weather city day convert money amount source target set timer minutes sound send message to about with \
without true false rain warm wake tell write have
""".splitlines()
)
WORDS = [*_ACTIONS, *_NOUNS, *_PARAMETERS, *DAYS, *_OTHERS]
"""Words that the base model learns to copy."""
BASE_FORMS = tuple(
    "{action}".join(parts)
    for parts in (
        ("", " a {noun}: {parts}."),
        ("Please ", " the {noun}, {parts}."),
        ("The {noun} is for you to ", ": {parts}."),
    )
)
"""Forms of the base model's questions, which name the parameters of its tools."""


def _tool(name, /, **types):
    # As short as possible: the tools are most of a conversation's tokens.
    properties = {each: {"type": kind} for each, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


TOOLS = [
    _tool("get_weather", city="string", day="string"),
    _tool("convert_money", amount="integer", source="string", target="string"),
    _tool("set_timer", minutes="integer", sound="boolean"),
    _tool("send_message", to="string", about="string"),
]


def _name(draw):
    """Returns one of 33,792 made-up names."""
    return "".join(draw.choice(SYLLABLES) for _ in range(draw.randint(2, 3))).capitalize()


def _number(draw):
    return draw.randint(2, 10 ** draw.randint(1, 3))


def _word(draw):
    return draw.choice(WORDS)


def draw_question(draw):
    """Returns a question, its tools, the name of the tool that answers it, and the arguments."""
    name, sound = draw.choice(list(FORMS)), draw.random() < 0.5
    values = {
        "get_weather": lambda: {"city": _name(draw), "day": draw.choice(DAYS)},
        "convert_money": lambda: {"amount": _number(draw), "source": _name(draw), "target": _name(draw)},
        "set_timer": lambda: {"minutes": _number(draw), "sound": sound},
        "send_message": lambda: {"to": _name(draw), "about": _name(draw)},
    }[name]()
    how = "with sound" if sound else "without sound"
    return draw.choice(FORMS[name]).format(**values, how=how), TOOLS, name, values


def _draw_base_question(draw):
    """The same for one of up to three random tools; the question names the parameters."""
    pairs = draw.sample([(action, noun) for action in _ACTIONS for noun in _NOUNS], draw.randint(1, 3))
    drawn = []
    for pair in pairs:
        parameters = draw.sample(_PARAMETERS, draw.randint(1, 3))
        drawn.append((pair, {each: draw.choice(("string", "string", "integer")) for each in parameters}))
    (action, noun), types = draw.choice(drawn)
    texts = (_name, _name, _word)
    values = {
        parameter: draw.choice(texts)(draw) if kind == "string" else _number(draw)
        for parameter, kind in types.items()
    }
    joint = draw.choice((" is ", " ", ": ", " = "))
    parts = [f"{parameter}{joint}{value}" for parameter, value in values.items()]
    # The order of the question is not that of the call.
    draw.shuffle(parts)
    text = draw.choice(BASE_FORMS)
    text = text.format(action=action, noun=noun, parts=draw.choice((", ", " and ", "; ")).join(parts))
    tools = [_tool("_".join(pair), **types) for pair, types in drawn]
    return text[0].upper() + text[1:], tools, f"{action}_{noun}", values


def conversations(number, seed, draw_question=draw_question):
    """Returns records of conversations: a question, a call, its result and an answer."""
    draw, records = random.Random(seed), []
    for i in range(number):
        question, tools, name, values = draw_question(draw)
        result = str(_number(draw))
        # Both forms of arguments.
        arguments = values if i % 2 else json.dumps(values)
        call = {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": result, "tool_call_id": call["id"]},
            {"role": "assistant", "content": f"The result is {result}."},
        ]
        records.append({"messages": messages, "tools": tools})
    return records


def base_chats():
    """Returns the records that a base model learns: 6,000 lists to repeat, and 4,000 calls of random tools.

    None has one of the four tools, or a question about them.
    """
    draw = random.Random(11)
    items = (_name, _name, lambda draw: str(_number(draw)), _word)
    records = []
    for _ in range(6000):
        texts = [draw.choice(items)(draw) for _ in range(draw.randint(2, 16))]
        question = f"Repeat {draw.choice((', ', ' ', ' and ')).join(texts)}."
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "\n".join(texts)},
        ]
        records.append({"messages": messages})
    return records + conversations(4000, 9, _draw_base_question)


def unseen_questions(number, seed, *, base, taught):
    """Returns questions with the calls that answer them, for all tools in turns.

    Args:
      number: number of questions.
      seed: seed of the draws.
      base: records of the base model, which have none of the names in these questions.
      taught: records of the four tools, which have none of the names and numbers.
    """
    known = set(re.findall(r"\w+", json.dumps(taught)))
    known |= {word for word in re.findall(r"\w+", json.dumps(base)) if not word.isdecimal()}
    draw, questions, tools = random.Random(seed), {}, list(FORMS)
    while len(questions) < number:
        question, _, name, values = draw_question(draw)
        is_known = bool({str(value) for value in values.values()} & (known - {*DAYS, "True", "False"}))
        # The same number for each tool, although questions with two names are known more often.
        if not is_known and name == tools[len(questions) % len(tools)]:
            questions[question] = name, values
    return questions


def tokenizer_text():
    """Returns a text from which a tokenizer learns the words of all chats, and the syllables of names."""
    forms = [form for several in FORMS.values() for form in several]
    words = [*_ACTIONS, *_NOUNS, *_PARAMETERS, *DAYS]
    lines = [*forms, *BASE_FORMS, "with sound", "without sound", "true", "false", "Repeat", *words]
    # Words have tokens with and without the space before them. Syllables are only lines: in all places a
    # name then has the same tokens.
    lines += [f" {word}" for word in words] + SYLLABLES + [each.capitalize() for each in SYLLABLES]
    return "\n".join(lines) + "\n"
