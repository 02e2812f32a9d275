"""Functions of the chat page, run in node: event streams, alignment of tokens, routing, turns, colors."""

import html.parser
import itertools
import json
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest

from zaya_jax.serving.http.page_files import FOLDER, HEADERS, page_files

PROGRAM = pathlib.Path(__file__).with_name("page_in_node.mjs")
TEXT = "#1c2230", "#ffffff"
"""Of a token, on a light and on a dark page."""
STREAM = (
    ': a comment\ndata: {"a": "naïve 日本 🙂"}\n\n'
    "event: x\r\ndata: one\r\ndata: two\r\n\r\n"
    "data:no space\r\rid: 7\n\n\n"
    "data\n\ndata: [DONE]\n\ndata: never ended\n"
)
EVENTS = ['{"a": "naïve 日本 🙂"}', "one\ntwo", "no space", "", "[DONE]"]
ANSWERS = [
    {"tokens": ["one", " two", "", " 🙂", " three"], "texts": [["content", "one two 🙂 three"]]},
    # Marks are tokens without text, and white space is dropped where reasoning or content begins.
    {
        "tokens": ["<think>", "\n", "so", " it", "</think>", "\n\n", " Yes", ".", "<|im_end|>"],
        "texts": [["thoughts", "so it"], ["content", "Yes."]],
    },
    # A stop string cut the end of a token.
    {"tokens": ["one", " two\nEND"], "texts": [["content", "one two\n"]]},
    # A tool call of any number of tokens, whose text is not part of the answer's.
    {"tokens": ["see", *[""] * 40, " b"], "texts": [["content", "see b"]]},
    # Many tokens that do not occur in the text.
    {"tokens": ["z"] * 40 + ["a"], "texts": [["content", "ab"]]},
    # The template began the reasoning.
    {"tokens": ["so", "", " yes"], "texts": [["thoughts", "\n"], ["thoughts", "so"], ["content", " yes"]]},
    {"tokens": [], "texts": [["content", "no routing"]]},
]
ALIGNED = [
    [["content", "one", 0], ["content", " two", 1], ["content", " 🙂", 3], ["content", " three", 4]],
    [["thoughts", "so", 2], ["thoughts", " it", 3], ["content", "Yes", 6], ["content", ".", 7]],
    [["content", "one", 0], ["content", " two\n", 1]],
    [["content", "see", 0], ["content", " b", 41]],
    [["content", "ab", -1]],
    [["thoughts", "\n", -1], ["thoughts", "so", 0], ["content", " yes", 2]],
    [["content", "no routing", -1]],
]
ROUTING = [
    {"tokens": ["a"], "logprobs": [-1.0], "experts": [None], "probabilities": [None]},
    {"tokens": ["b", "c"], "logprobs": [-1, -2], "experts": [[0, 1], [2, 1]], "probabilities": [[1, 0]] * 2},
    {"tokens": ["d", "e"], "logprobs": [0, 0], "experts": [[0, 2], None], "probabilities": [[1, 0.25], None]},
]  # fmt: skip
FAILURES = [
    [401, "no", None], [429, "", "3"], [400, "top_p is 2; it must be at most 1", None], [404, "", None],
    [500, "", None], [503, "the run is being read", None],
]  # fmt: skip
TURNS = [
    ["user", "never answered"], ["assistant", ""], ["user", "first"], ["assistant", "yes"],
    ["user", "second"],
]  # fmt: skip
SETTINGS = {"temperature": "0", "top_p": " ", "top_k": "40", "seed": None, "stop": "END\n\n\\n\\nQ:\n\\\\n"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    if shutil.which("node") is None:
        pytest.skip("runs the page's functions in node, which is not here")
    folder = tmp_path_factory.mktemp("page")
    for path in FOLDER.glob("*.js"):
        shutil.copy(path, folder)
    # Without this file node would load them as CommonJS modules.
    (folder / "package.json").write_text('{"type": "module"}')
    inputs = {
        "stream": STREAM, "answers": ANSWERS, "routing": ROUTING, "failures": FAILURES, "turns": TURNS,
        "settings": SETTINGS,
    }  # fmt: skip
    command = ["node", PROGRAM, folder, json.dumps(inputs)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_events_do_not_depend_on_where_the_stream_is_split(results):
    assert results["events"] == EVENTS


def test_errors_say_what_to_do(results):
    key, busy, refused, unknown, failed, early = results["sentences"]
    assert key == "The server requires its key: use the one that it was started with."
    assert busy == "The server's queue is full; try again in 3 s."
    assert refused == "Server error: top_p is 2; it must be at most 1."
    assert "another version" in unknown
    assert "See its log" in failed
    assert early == "Server error: the run is being read. Try again in a moment."


def test_alignment_of_text_and_tokens(results):
    assert results["aligned"] == ALIGNED
    assert results["by_letters"] == ALIGNED


def test_experts_and_loads(results):
    assert results["ways"] == [[None, None], [0, 1], [2, 1], [0, 2], [None, None]]
    assert results["probability"] == 0.25
    assert results["loads"] == [[2, 0, 1], [0, 2, 1]]


def test_a_question_without_an_answer_is_omitted(results):
    roles = [(each["role"], each["content"]) for each in results["messages"]]
    assert roles == [("system", "Be kind."), ("user", "first"), ("assistant", "yes"), ("user", "second")]
    assert results["without_system"] == 3
    assert results["prompt"] == "never answeredfirstyessecond"
    assert results["before"] == ["never answered", ""]


def test_tool_calls_are_shown_and_sent_back(results):
    question, answer = results["calls"]
    function = {"name": "f", "arguments": '{"city": "Paris", "n": [1]}'}
    assert answer == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c", "type": "function", "function": function},
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        ],
    }
    assert question["role"] == "user"
    assert results["call_texts"] == ['f(city: "Paris", n: [1])', 'f({"a": ', "f("]
    assert results["tools"] == [None, None, [{"name": "f"}]]


def test_empty_settings_are_omitted(results):
    assert results["sampling"] == {"temperature": 0, "top_k": 40, "stop": ["END", "\n\nQ:", "\\n"]}


def test_steps_of_colors(results):
    assert results["probability_steps"] == [0, 0, 1, 5, 9]
    # Probabilities of 100, 95, 50, 10 and 1%, then of very unlikely tokens.
    assert results["logprob_steps"] == [0, 0, 2, 4, 6, 9, 9]


def test_more_experts_than_colors_differ_by_lines(results):
    assert results["classes"] == ["x-0 round-0", "x-15 round-0", "x-0 round-1", "x-7 round-1", "x-skip"]
    assert results["only"] == ".t:not(.x-1.round-1) { opacity: .3; }"


def linear(colours):
    """Returns the linear RGB of colors in the form #rrggbb (IEC 61966-2-1)."""
    values = np.array([[int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)] for colour in colours])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def luminance(colours):
    return linear(colours) @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize(("theme", "text"), [("light", TEXT[0]), ("dark", TEXT[1])])
def test_text_is_legible_on_every_color(results, theme, text):
    colours = results["colours"][theme]
    every = [*colours["experts"], *itertools.chain(*colours["ramps"])]
    pair = np.sort(np.stack([luminance(every), np.broadcast_to(luminance([text]), len(every))]), axis=0)
    # WCAG 2.2, 1.4.3: at least 4.5.
    assert ((pair[1] + 0.05) / (pair[0] + 0.05)).min() >= 4.5


# Simulation of color blindness in linear RGB: the matrices of severity 1 of [CVD].
MISSING_CONES = {
    "none": np.eye(3),
    "long": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
             [-0.003882, -0.048116, 1.051998]],
    "middle": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
               [-0.01182, 0.04294, 0.968881]],
    "short": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
              [0.004733, 0.691367, 0.303900]],
}  # fmt: skip
TO_CONES = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
TO_OKLAB = [[0.2104542553, 0.793617785, -0.0040720468], [1.9779984951, -2.428592205, 0.4505937099],
            [0.0259040371, 0.7827717662, -0.808675766]]  # fmt: skip


@pytest.mark.parametrize("cones", MISSING_CONES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colors_of_experts_differ_also_for_color_blind_vision(results, theme, cones):
    visible = np.clip(linear(results["colours"][theme]["experts"]) @ np.array(MISSING_CONES[cones]).T, 0, 1)
    lab = np.cbrt(visible @ np.array(TO_CONES).T) @ np.array(TO_OKLAB).T
    apart = np.linalg.norm(lab[:, None] - lab[None], axis=-1)[np.triu_indices(len(lab), 1)]
    # More than twice the distance of 0.02 in OKLab that is visible side by side; four times for normal
    # vision.
    assert apart.min() >= (0.08 if cones == "none" else 0.05)


class Attributes(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.attributes, self.ids = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]


def test_the_page_loads_nothing_from_elsewhere_and_inserts_no_html():
    files = page_files()
    page = Attributes(files["/"].content.decode())
    assert len(page.ids) == len(set(page.ids))
    for tag, name, value in page.attributes:
        assert name != "style"
        assert not name.startswith("on")
        if name in ("src", "href"):
            assert f"/{value}" in files, (tag, value)
    for path, file in files.items():
        text = file.content.decode()
        assert not re.search(r"(?<!www\.w3\.org/2000/svg)https?://(?!www\.w3\.org/2000/svg)", text), path
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|url\(|@import", text
        ), path
    imported = {
        name for file in FOLDER.glob("*.js") for name in re.findall(r'from "\./(.*?)"', file.read_text())
    }
    assert {f"/{name}" for name in imported} <= set(files)
    required = {
        name for file in FOLDER.glob("*.js") for name in re.findall(r'find\("([\w-]+)"\)', file.read_text())
    }
    assert required <= set(page.ids)
    assert HEADERS["Content-Security-Policy"].startswith("default-src 'self'")
