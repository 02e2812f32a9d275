"""A parser of complete messages, written apart from the incremental one, by searches in one string."""

import json
import re

THINK, THINK_END = "\ue000", "\ue001"
"""Characters that denote the special tokens around a thought."""
SPELLED = ("<zyphra_tool_call>", "</zyphra_tool_call>", "<zyphra_tool_response>", "</zyphra_tool_response>")
SPECIAL = ("\ue002", "\ue003", "\ue004", "\ue005")
"""Characters that denote the same tags as special tokens."""
_MARKS = re.compile("[\ue000-\ue005]")
_NAMED = "<(?:function|parameter)=[^<>\n\ue000-\ue005]*"
_PARTS = ["</function>", "</parameter>", "<function=", "<parameter="]
_INNER = rf"</function>|</parameter>|{_NAMED}(?:>|(?=[<\n]))"


def parse(text, tags, *, is_cut=False, is_reasoning=False):
    """Returns content, reasoning and [name, JSON text of the arguments] of each call."""
    begin, end, response, response_end = map(re.escape, tags)
    spelled = [tag for tag in tags if len(tag) > 1]
    segments, reasoning, calls = [""], "", []
    while text:
        if is_reasoning:
            thought, mark, text = text.partition(THINK_END)
            is_reasoning = False
            first = thought.find(tags[0])
            if first < 0:
                reasoning += _clean(thought, [], spelled[:1], is_last=not mark)
            elif mark or is_cut:
                reasoning += _clean(thought[:first] + "\ue002", [], spelled[:1], is_last=False)
                reasoning += "".join(re.split(_MARKS, thought[first:]))
            else:
                reasoning += _clean(thought[:first] + "\ue002", [], spelled[:1], is_last=False)
                inner = parse(thought[first:], tags)
                reasoning, calls = reasoning + inner[0] + inner[1], calls + inner[2]
            continue
        match = re.search(f"{begin}|{THINK}", text)
        before = text[: match.start()] + "\ue002" if match else text
        segments[-1] += _clean(
            before, [_INNER, *map(re.escape, spelled)], [*spelled, *_PARTS], is_last=not match
        )
        if match is None:
            break
        text = text[match.end() :]
        if match[0] == THINK:
            is_reasoning = True
            continue
        segments.append("")
        stop = re.search("|".join([begin, end, response, response_end, THINK, THINK_END]), text)
        body, text = (text[: stop.start()], text[stop.start() :]) if stop else (text, "")
        if stop is None or len(stop[0]) == 1:
            body = _without_partial(body, spelled, is_end=stop is None)
        new, rest = _calls_of(body, is_cut=is_cut and stop is None)
        calls += new
        # Text after a call whose end is missing is read again, as content.
        if rest:
            text = rest.lstrip() + text
        elif text.startswith(tags[1]):
            text = text[len(tags[1]) :]
    return _join(segments), reasoning, calls


def _without_partial(text, literals, *, is_end):
    """Removes incomplete tags from the end of a text; a lone "<" stays where the message ends."""
    end = len(text)
    while (first := text.rfind("<", 0, end)) >= 0:
        tail = text[first:end]
        is_named = re.fullmatch(_NAMED, tail) and "</function>" in literals
        if not is_named and not any(each.startswith(tail) for each in literals):
            break
        end = first
    return text if is_end and len(text) - end == 1 else text[:end]


def _clean(text, patterns, literals, *, is_last):
    """Removes tags, special tokens, and incomplete tags before either."""
    pieces = re.split("|".join([_MARKS.pattern, *patterns]), text)
    *others, last = pieces
    kept = [_without_partial(each, literals, is_end=False) for each in others]
    return "".join([*kept, _without_partial(last, literals, is_end=True) if is_last else last])


def _join(segments):
    text, *others = segments
    for each in others:
        if not text.strip():
            text = ""
        # One white space separates texts: that before a call, or else that after it.
        is_separated = text == "" or text != text.rstrip()
        text += each.lstrip() if is_separated else each
    return text.rstrip() if others else text


def _calls_of(body, *, is_cut):
    if body.lstrip()[:1] in ("{", "["):
        return _json_calls(body.lstrip(), is_cut=is_cut)
    return _tag_calls(body, is_cut=is_cut)


def _json_calls(text, *, is_cut):
    calls = []
    while text.lstrip()[:1] in ("{", "["):
        open_brackets, is_string, n = [], False, 0
        while n < len(text):
            if text[n] == "\\":
                n += 1
            elif text[n] == '"':
                is_string = not is_string
            elif not is_string and text[n] in "{[":
                open_brackets.append("}" if text[n] == "{" else "]")
            elif not is_string and text[n] in "}]":
                open_brackets.pop()
            n += 1
            if not open_brackets:
                break
        if open_brackets and is_cut:
            return calls, ""
        value = text + '"' * is_string + "".join(reversed(open_brackets)) if open_brackets else text[:n]
        text = "" if open_brackets else text[n:]
        try:
            parsed = json.loads(value)
        except ValueError:
            continue
        for call in parsed if isinstance(parsed, list) else [parsed]:
            if isinstance(call, dict) and isinstance(call.get("name"), str) and call["name"].strip():
                arguments = call.get("arguments", call.get("parameters", {}))
                if isinstance(arguments, dict):
                    calls.append([call["name"].strip(), json.dumps(arguments, ensure_ascii=False)])
    return calls, text if text.strip() else ""


def _tag_calls(body, *, is_cut):
    calls = []
    tag = re.compile(r"<function=([^<>\n]*)>|<parameter=([^<>\n]*)>|</function>|</parameter>")
    ending = r"</parameter>|<parameter=[^<>\n]*>|</function>(?=\s*<function=)"
    ending = re.compile(ending if is_cut else ending + r"|</function>(?=\s*$)")
    if not is_cut:
        body = _without_partial(body, _PARTS, is_end=True)
    place, values = 0, None
    while match := tag.search(body, place):
        # After a function only another one is part of the call.
        is_after = values is None and bool(calls)
        if is_after and (body[place : match.start()].strip() or match[1] is None):
            break
        place = match.end()
        if match[1] is not None or match[0] == "</function>":
            if values is not None:
                calls[-1][1] = _object(values, is_open=False)
                values = None
            if match[1] and match[1].strip():
                calls.append([match[1].strip(), ""])
                values = {}
        elif match[2] is not None and values is not None:
            stop = ending.search(body, place)
            if stop is None and is_cut:
                calls[-1][1] = _object(values, is_open=True)
                return calls, ""
            value = body[place : stop.start() if stop else len(body)]
            if match[2].strip():
                values.setdefault(match[2].strip(), value.removeprefix("\n").removesuffix("\n"))
            if stop is None:
                place = len(body)
                break
            place = stop.end() if stop[0] == "</parameter>" else stop.start()
    if values is not None:
        calls[-1][1] = _object(values, is_open=is_cut)
        return calls, ""
    rest = _without_partial(body[place:], _PARTS, is_end=False)
    return calls, body[place:] if calls and rest.strip() else ""


def _object(values, *, is_open):
    inner = ", ".join(
        f"{json.dumps(name, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        for name, value in values.items()
    )
    if is_open:
        return "{" + inner if values else ""
    return "{" + inner + "}"
