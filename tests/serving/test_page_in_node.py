"""The functions of the server's page, run in node: streams, tokens beside texts, ways, turns, colours."""

import html.parser
import itertools
import json
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest

from zaya_jax.serving.page_files import FOLDER, HEADERS, page_files

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
    # Marks are tokens without a text, and white space is left out where a kind of text begins.
    {
        "tokens": ["<think>", "\n", "so", " it", "</think>", "\n\n", " Yes", ".", "<|im_end|>"],
        "texts": [["thoughts", "so it"], ["content", "Yes."]],
    },
    # A stop string took the end of a token away.
    {"tokens": ["one", " two\nEND"], "texts": [["content", "one two\n"]]},
    # Tokens that the text does not know, by far too many.
    {"tokens": ["z"] * 40 + ["a"], "texts": [["content", "ab"]]},
    # The template began the thoughts.
    {"tokens": ["so", "", " yes"], "texts": [["thoughts", "\n"], ["thoughts", "so"], ["content", " yes"]]},
    {"tokens": [], "texts": [["content", "no routing"]]},
]
ALIGNED = [
    [["content", "one", 0], ["content", " two", 1], ["content", " 🙂", 3], ["content", " three", 4]],
    [["thoughts", "so", 2], ["thoughts", " it", 3], ["content", "Yes", 6], ["content", ".", 7]],
    [["content", "one", 0], ["content", " two\n", 1]],
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
def said(tmp_path_factory):
    if shutil.which("node") is None:
        pytest.skip("runs the page's functions in node, which is not here")
    folder = tmp_path_factory.mktemp("page")
    for path in FOLDER.glob("*.js"):
        shutil.copy(path, folder)
    # Else node takes them for its own older kind of modules.
    (folder / "package.json").write_text('{"type": "module"}')
    given = {
        "stream": STREAM, "answers": ANSWERS, "routing": ROUTING, "failures": FAILURES, "turns": TURNS,
        "settings": SETTINGS,
    }  # fmt: skip
    command = ["node", PROGRAM, folder, json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_events_are_the_same_wherever_the_stream_is_cut(said):
    assert said["events"] == EVENTS


def test_what_went_wrong_is_one_sentence_with_what_to_do(said):
    key, busy, refused, unknown, failed, early = said["sentences"]
    assert key == "The server asks for its key: give the one it was started with."
    assert busy == "Too many requests wait at the server; try again in 3 s."
    assert refused == "The server says: top_p is 2; it must be at most 1."
    assert "another version" in unknown
    assert "terminal says more" in failed
    assert early == "The server says: the run is being read. Try again in a moment."


def test_each_part_of_a_text_finds_its_token(said):
    assert said["aligned"] == ALIGNED
    assert said["by_letters"] == ALIGNED


def test_ways_and_loads_are_those_that_came(said):
    assert said["ways"] == [[None, None], [0, 1], [2, 1], [0, 2], [None, None]]
    assert said["probability"] == 0.25
    assert said["loads"] == [[2, 0, 1], [0, 2, 1]]


def test_a_question_without_an_answer_is_not_sent_again(said):
    roles = [(each["role"], each["content"]) for each in said["messages"]]
    assert roles == [("system", "Be kind."), ("user", "first"), ("assistant", "yes"), ("user", "second")]
    assert said["without_system"] == 3
    assert said["prompt"] == "never answeredfirstyessecond"
    assert said["before"] == ["never answered", ""]


def test_empty_settings_are_left_to_the_server(said):
    assert said["sampling"] == {"temperature": 0, "top_k": 40, "stop": ["END", "\n\nQ:", "\\n"]}


def test_steps_of_colours(said):
    assert said["probability_steps"] == [0, 0, 1, 5, 9]
    # Of 100, 95, 50, 10 and 1 %, then of tokens that nobody would expect.
    assert said["logprob_steps"] == [0, 0, 2, 4, 6, 9, 9]


def test_more_experts_than_colours_differ_by_lines(said):
    assert said["classes"] == ["x-0 round-0", "x-15 round-0", "x-0 round-1", "x-7 round-1", "x-skip"]
    assert said["only"] == ".t:not(.x-1.round-1) { opacity: .3; }"


def linear(colours):
    """Linear RGB of colours as #rrggbb (IEC 61966-2-1)."""
    values = np.array([[int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)] for colour in colours])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def luminance(colours):
    return linear(colours) @ [0.2126, 0.7152, 0.0722]


@pytest.mark.parametrize(("theme", "text"), [("light", TEXT[0]), ("dark", TEXT[1])])
def test_a_text_can_be_read_on_every_colour(said, theme, text):
    colours = said["colours"][theme]
    every = [*colours["experts"], *itertools.chain(*colours["ramps"])]
    pair = np.sort(np.stack([luminance(every), np.broadcast_to(luminance([text]), len(every))]), axis=0)
    # WCAG 2.2, 1.4.3: at least 4.5.
    assert ((pair[1] + 0.05) / (pair[0] + 0.05)).min() >= 4.5


# What an eye without the cones of one kind sees, in linear RGB: the matrices of severity 1 of [CVD].
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
def test_experts_differ_to_every_eye(said, theme, cones):
    seen = np.clip(linear(said["colours"][theme]["experts"]) @ np.array(MISSING_CONES[cones]).T, 0, 1)
    lab = np.cbrt(seen @ np.array(TO_CONES).T) @ np.array(TO_OKLAB).T
    apart = np.linalg.norm(lab[:, None] - lab[None], axis=-1)[np.triu_indices(len(lab), 1)]
    # Twice what one can tell side by side, 0.02 in OKLab, and some; four times to an eye with all cones.
    assert apart.min() >= (0.08 if cones == "none" else 0.05)


class Attributes(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.ids = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found += [(tag, name, value) for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id"]


def test_the_page_asks_nobody_else_and_takes_no_html_from_a_model():
    files = page_files()
    page = Attributes(files["/"].content.decode())
    assert len(page.ids) == len(set(page.ids))
    for tag, name, value in page.found:
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
    asked = {
        name for file in FOLDER.glob("*.js") for name in re.findall(r'find\("([\w-]+)"\)', file.read_text())
    }
    assert asked <= set(page.ids)
    assert HEADERS["Content-Security-Policy"].startswith("default-src 'self'")
