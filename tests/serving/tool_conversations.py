"""Generated conversations with four tools, and questions about them with the calls that answer them."""

import json
import random

CITIES = [
    "Paris",
    "Rome",
    "Oslo",
    "Lima",
    "Cairo",
    "Tokyo",
    "Delhi",
    "Quito",
    "Berlin",
    "Dublin",
    "Madrid",
    "Accra",
]
DAYS = ["today", "tomorrow", "Monday", "Friday", "Sunday"]
CURRENCIES = ["euros", "dollars", "yen", "pesos", "francs", "rupees"]
NAMES = ["Ada", "Ben", "Carla", "David", "Emma", "Farid", "Grace", "Hugo", "Ines", "Jonas"]
TOPICS = ["the budget", "lunch", "the report", "the launch", "the visit", "the exam"]
NUMBERS = [2, 3, 5, 7, 10, 20, 30, 40, 50, 60]


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
_FORMS = {
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
OTHER_TOOLS = [
    _tool("find_train", start="string", end="string"),
    _tool("book_table", guest="string", people="integer", when="string"),
    _tool("pay", sum="integer", money="string", who="string"),
    _tool("plan", topic="string", place="string"),
]
"""Tools that a base model has learned: from them it has the ability to copy words into calls."""
_OTHER_FORMS = {
    "find_train": (
        "A train from {start} to {end}?",
        "I go to {end} from {start}.",
        "When does the train to {end} leave {start}?",
    ),
    "book_table": (
        "A table for {people} on {when}, name {guest}.",
        "{guest} wants to eat {when} with {people} people.",
        "Reserve {people} places for {guest} {when}.",
    ),
    "pay": (
        "Pay {who} {sum} {money}.",
        "{sum} {money} go to {who}.",
        "I owe {who} {sum} {money}, please pay.",
    ),
    "plan": (
        "Plan {topic} in {place}.",
        "In {place} we discuss {topic}.",
        "Where is {topic}? Put it in {place}.",
    ),
}


def draw_question(draw):
    """Returns a question, the name of the tool that answers it, and its arguments."""
    name = draw.choice(list(_FORMS))
    source, target = draw.sample(CURRENCIES, 2)
    sound = draw.random() < 0.5
    values = {
        "get_weather": {"city": draw.choice(CITIES), "day": draw.choice(DAYS)},
        "convert_money": {"amount": draw.choice(NUMBERS), "source": source, "target": target},
        "set_timer": {"minutes": draw.choice(NUMBERS), "sound": sound},
        "send_message": {"to": draw.choice(NAMES), "about": draw.choice(TOPICS)},
    }[name]
    how = "with sound" if sound else "without sound"
    return draw.choice(_FORMS[name]).format(**values, how=how), name, values


def draw_other_question(draw):
    """The same for the other tools."""
    name = draw.choice(list(_OTHER_FORMS))
    start, end = draw.sample(CITIES, 2)
    values = {
        "find_train": {"start": start, "end": end},
        "book_table": {
            "guest": draw.choice(NAMES),
            "people": draw.choice(NUMBERS),
            "when": draw.choice(DAYS),
        },
        "pay": {"sum": draw.choice(NUMBERS), "money": draw.choice(CURRENCIES), "who": draw.choice(NAMES)},
        "plan": {"topic": draw.choice(TOPICS), "place": draw.choice(CITIES)},
    }[name]
    return draw.choice(_OTHER_FORMS[name]).format(**values), name, values


def conversations(number, seed, *, draw_question=draw_question, tools=TOOLS):
    """Returns different records of conversations: a question, a call, its result and an answer."""
    draw, found = random.Random(seed), {}
    while len(found) < number:
        question, name, values = draw_question(draw)
        result = str(draw.choice(NUMBERS))
        call = {
            "id": f"call_{len(found)}",
            "type": "function",
            "function": {"name": name, "arguments": values},
        }
        # Both forms of arguments.
        if len(found) % 2:
            call["function"]["arguments"] = json.dumps(values)
        found[question] = {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": result, "tool_call_id": call["id"]},
                {"role": "assistant", "content": f"The result is {result}."},
            ],
            "tools": tools,
        }
    return list(found.values())


def unseen_questions(records, number, seed):
    """Returns questions that no record has, with the name and arguments of their calls."""
    known = {record["messages"][0]["content"] for record in records}
    draw, found = random.Random(seed), {}
    while len(found) < number:
        question, name, values = draw_question(draw)
        if question not in known:
            found[question] = name, values
    return found
