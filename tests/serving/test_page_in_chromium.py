"""The chat page in a real browser, with a fake server whose responses are known.

    pytest -m campaign -n 0 tests/serving/test_page_in_chromium.py

`ZAYA_PICTURES=FOLDER` saves screenshots.
"""

import collections
import json
import os
import pathlib
import re

import browser
import pytest
from fake_server import HOSTILE, THOUGHTS, serve

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="Chromium is not here: apt-get install chromium"),
]
DONE = "document.querySelectorAll('.answer[aria-busy=false]').length === {}"
TOKEN = ".answer > .tokens .t"
COLOURS = """[...document.querySelectorAll('.t')].map((span) => {
  const style = getComputedStyle(span), back = style.backgroundColor;
  return [style.color, back === 'rgba(0, 0, 0, 0)' ? getComputedStyle(document.body).backgroundColor : back];
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser.page(tmp_path_factory.mktemp("chromium")) as page:
        yield page


@pytest.fixture(autouse=True)
def _without_complaints(page):
    """Checks after each test that there was no script error, and no violation of the security policy."""
    page.complaints.clear()
    page.look()
    yield
    page.run("0")
    refused = [each for each in page.complaints if "Failed to load resource" not in each.get("text", "")]
    assert refused == []


def keep(page, name):
    if "ZAYA_PICTURES" in os.environ:
        page.picture(pathlib.Path(os.environ["ZAYA_PICTURES"]) / f"{name}.png")


def open_page(page, address):
    page.open(f"{address}/")
    page.wait("document.body.dataset.mode")


def ask(page, text, number):
    page.click("#question")
    page.write(text)
    page.press("Enter")
    page.wait(DONE.format(number))


def texts(page, selector):
    return page.run(f"[...document.querySelectorAll({json.dumps(selector)})].map((each) => each.textContent)")


def content_of(sent):
    """Returns the content of a response, after its reasoning."""
    return "".join(sent["texts"][THOUGHTS:])


def test_a_chat_of_three_turns(page):
    with serve() as (address, server):
        open_page(page, address)
        for n, question in enumerate(["one?", "two?", "three?"]):
            ask(page, question, n + 1)
            keep(page, f"turn_{n}")
        assert texts(page, ".answer > .tokens") == [content_of(sent) for sent in server.sent]
        assert texts(page, ".thoughts .tokens") == ["".join(sent["texts"][:THOUGHTS]) for sent in server.sent]
        assert page.run("document.querySelector('.thoughts').open") is False
        path, body = server.requests[-1]
        assert path == "/v1/chat/completions"
        assert body["messages"] == [
            {"role": "user", "content": "one?"},
            {"role": "assistant", "content": content_of(server.sent[0])},
            {"role": "user", "content": "two?"},
            {"role": "assistant", "content": content_of(server.sent[1])},
            {"role": "user", "content": "three?"},
        ]
        assert body["stream"] is body["routing"] is True
        assert HOSTILE in "".join(content_of(sent) for sent in server.sent)
        assert page.run("document.querySelectorAll('#turns img').length") == 0


def test_settings_are_part_of_requests(page):
    with serve() as (address, server):
        open_page(page, address)
        page.click("#settings-open")
        for name, value in {
            "system": "Be brief.",
            "temperature": "",
            "top_k": "40",
            "max_tokens": "20",
        }.items():
            page.click(f"#{name}")
            page.run(f"document.getElementById('{name}').value = ''")
            page.write(value)
        keep(page, "settings")
        page.click("#settings button[type=submit]")
        ask(page, "one?", 1)
        _, body = server.requests[0]
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert (body["top_k"], body["max_tokens"]) == (40, 20)
        assert "temperature" not in body


def test_stopping_an_answer(page):
    with serve(num_tokens=4000, pause=0.02) as (address, server):
        open_page(page, address)
        page.click("#question")
        page.write("one?")
        page.press("Enter")
        page.wait("document.querySelectorAll('.answer > .tokens .t').length > 20")
        keep(page, "on_its_way")
        page.click("#stop")
        page.wait(DONE.format(1))
        (kept,) = texts(page, ".answer > .tokens")
        assert content_of(server.sent[0]).startswith(kept)
        assert "stopped" in texts(page, ".actions .hint")[-1]
        assert page.run("document.getElementById('stop').hidden") is True
        server.num_tokens = 20
        ask(page, "two?", 2)
        assert server.requests[1][1]["messages"][1] == {"role": "assistant", "content": kept}
        assert server.left == 1


def test_experts_by_layer(page):
    with serve() as (address, server):
        open_page(page, address)
        ask(page, "one?", 1)
        (sent,) = server.sent
        first = sent["tokens"].index("</think>") + 1

        def classes():
            return page.run(
                f"[...document.querySelectorAll({json.dumps(TOKEN)})].map((each) => each.className)"
            )

        for layer in (0, 1, 2):
            expected = [
                f"t {'x-skip' if ways[layer] == 16 else f'x-{ways[layer]} round-0'}" if ways else "t"
                for text, ways in zip(sent["tokens"][first:], sent["experts"][first:], strict=True)
                if text
            ]
            assert [re.sub(" here", "", each) for each in classes()] == expected
            loads = collections.Counter(ways[layer] for ways in sent["experts"] if ways)
            counts = [int(text.replace("\u2013", "0")) for text in texts(page, "#loads .count")]
            assert counts == [loads[expert] for expert in range(17)]
            page.run("document.getElementById('layer').focus()")
            page.press("ArrowRight")
            page.wait(f"document.getElementById('load-layer').textContent === '{layer + 1}'")
        check_hover(page, sent, first)
        check_keys(page, sent, first)


def check_hover(page, sent, first):
    skipping = next(n for n, ways in enumerate(sent["experts"][first:], first) if ways and 16 in ways)
    number = sum(1 for text in sent["tokens"][first:skipping] if text)
    page.run(f"document.querySelectorAll('{TOKEN}')[{number}].id = 'pointed'")
    page.point("#pointed")
    page.wait("document.getElementById('tip').style.display === 'block'")
    keep(page, "hover")
    names = ["skip" if expert == 16 else str(expert) for expert in sent["experts"][skipping]]
    page.wait(f"document.querySelectorAll('#way li').length === {len(names)}")
    assert texts(page, "#way .swatch") == names
    shares = [float(text.rstrip("%\u202f")) for text in texts(page, "#way .count")]
    assert shares == pytest.approx([100 * p for p in sent["probabilities"][skipping]], abs=0.5)
    tip = page.run("document.getElementById('tip').textContent")
    assert tip.startswith(json.dumps(sent["tokens"][skipping], ensure_ascii=False))
    assert f"{sent['logprobs'][skipping]:.2f}".replace("-", "\u2212") in tip


def check_keys(page, sent, first):
    page.run("document.querySelector('.answer > .tokens').focus()")
    page.press("End")
    page.press("ArrowLeft")
    last = [n for n, text in enumerate(sent["tokens"]) if text][-2]
    page.wait(
        f"document.getElementById('token-text').textContent.includes('{last + 1} of {len(sent['tokens'])}')"
    )
    assert page.run("document.querySelectorAll('.here').length") == 1
    page.press("ArrowUp")
    page.wait("document.getElementById('load-layer').textContent === '2'")
    assert "layer 2" in page.run("document.getElementById('status').textContent")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", ["expert", "probability", "logprob", "plain"])
def test_views_and_themes_are_legible(page, theme, view):
    with serve() as (address, _):
        page.look(theme=theme)
        open_page(page, address)
        ask(page, "one?", 1)
        page.click(f"#views label:has([value={view}])")
        page.wait(f"document.body.dataset.view === '{view}'")
        page.click(".thoughts summary")
        page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        keep(page, f"{view}_{theme}")
        pairs = {tuple(pair) for pair in page.run(COLOURS)}
        assert len(pairs) > (1 if view == "plain" else 5) or view == "plain"
        for pair in pairs:
            dark, light = sorted(luminance(colour) for colour in pair)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, pair


def luminance(colour):
    values = [int(each) / 255 for each in re.findall(r"\d+", colour)[:3]]
    parts = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def test_a_key_is_requested_and_stored(page):
    with serve(key="open sesame") as (address, server):
        page.open(f"{address}/")
        for key in ("wrong", "open sesame"):
            page.wait("document.getElementById('key-dialog').open")
            keep(page, f"key_{key.split()[0]}")
            page.run("document.getElementById('key').value = ''")
            page.click("#key")
            page.write(key)
            page.press("Enter")
            # The dialog for the key opens again before its closing could be observed.
            refused = "document.getElementById('key-hint').textContent.includes('not accept')"
            page.wait(f"document.body.dataset.mode || {refused}")
        page.wait("document.body.dataset.mode && !document.getElementById('key-dialog').open")
        ask(page, "one?", 1)
        open_page(page, address)
        ask(page, "and after a reload?", 1)
        assert len(server.requests) == 2
        assert page.run("sessionStorage.getItem('zaya.key')") == "open sesame"
        assert page.run("localStorage.length") == 0


def test_regenerating_and_editing_turns(page):
    with serve(num_tokens=20) as (address, server):
        open_page(page, address)
        ask(page, "one?", 1)
        ask(page, "two?", 2)
        page.click(".answer:last-child .again")
        page.wait(f"{DONE.format(2)} && document.getElementById('stop').hidden")
        assert len(server.requests) == 3
        assert server.requests[2][1]["messages"] == server.requests[1][1]["messages"]
        assert server.requests[2][1]["seed"] != server.requests[1][1]["seed"]
        page.click(".user .edit")
        page.run("document.querySelector('.editor textarea').value = ''")
        page.click(".editor textarea")
        page.write("another?")
        page.click(".editor button[type=submit]")
        page.wait(f"{DONE.format(1)} && document.getElementById('stop').hidden")
        assert server.requests[3][1]["messages"] == [{"role": "user", "content": "another?"}]
        origin = page.run("location.origin")
        page.ask("Browser.grantPermissions", permissions=["clipboardReadWrite"], origin=origin)
        page.click(".answer .copy")
        page.wait("document.querySelector('.answer .copy').textContent === 'copied'")
        assert page.run("navigator.clipboard.readText()") == content_of(server.sent[3])
        page.click("#new-chat")
        page.wait("document.querySelectorAll('.turn').length === 0")
        page.wait("!document.getElementById('none').hidden")


def test_the_page_waits_for_a_loading_server(page):
    with serve(is_ready=False) as (address, server):
        page.open(f"{address}/")
        page.wait("document.getElementById('trouble').textContent.includes('the run is being read')")
        server.is_ready = True
        page.wait("document.body.dataset.mode && document.getElementById('trouble').hidden")
        ask(page, "one?", 1)


def test_errors_are_one_sentence(page):
    with serve(num_tokens=30) as (address, server):
        open_page(page, address)
        server.trouble = (429, "busy")
        ask(page, "one?", 1)
        server.trouble = (400, "max_tokens is 0; it must be at least 1")
        page.click(".answer:last-child .again")
        page.wait("document.querySelector('.answer .note').textContent.includes('max_tokens is 0')")
        server.trouble, server.cut_after = None, 20
        page.click(".answer:last-child .again")
        page.wait("document.querySelector('.answer .note').textContent.includes('connection ended')")
        assert texts(page, ".answer > .tokens") == ["".join(server.sent[0]["texts"][THOUGHTS:21])]
        keep(page, "trouble")
        # An empty answer is not sent back with the conversation; a partial one is.
        server.cut_after = None
        ask(page, "two?", 2)
        assert [each["role"] for each in server.requests[-1][1]["messages"]] == ["user", "assistant", "user"]
    page.click(".answer:last-child .again")
    page.wait("document.querySelectorAll('.answer .note')[1].textContent.includes('does not answer')")


def test_a_model_without_a_chat_template_continues_a_text(page):
    with serve(is_chat=False, num_tokens=30) as (address, server):
        open_page(page, address)
        page.click("#question")
        page.write("Once upon a")
        page.press("Enter", modifiers=2)
        page.wait(DONE.format(1))
        keep(page, "text")
        page.click("#question")
        page.press("Enter", modifiers=2)
        page.wait(DONE.format(2))
        (first, one), (second, two) = server.requests
        assert first == second == "/v1/completions"
        assert one["prompt"] == "Once upon a"
        assert two["prompt"] == "Once upon a" + "".join(server.sent[0]["texts"])


def test_a_narrow_page(page):
    with serve() as (address, _):
        page.look(width=400, height=760, touch=True)
        open_page(page, address)
        assert page.run("document.body.hasAttribute('data-panel')") is False
        ask(page, "one?", 1)
        keep(page, "narrow")
        page.tap(TOKEN)
        page.wait("document.body.hasAttribute('data-panel')")
        page.wait("!document.getElementById('token-text').hidden")
        keep(page, "narrow_experts")
        assert page.run("document.documentElement.scrollWidth") <= 400
        panel = "document.getElementById('panel')"
        assert page.run(f"{panel}.scrollWidth <= {panel}.clientWidth")


def test_a_long_answer_of_many_layers(page):
    with serve(num_tokens=4000, num_layers=40) as (address, server):
        open_page(page, address)
        ask(page, "one?", 1)
        assert texts(page, ".answer > .tokens") == [content_of(server.sent[0])]
        assert page.run("document.querySelector('#map canvas').width") >= 4000
        page.run("document.getElementById('layer').focus()")
        page.press("ArrowRight")
        page.wait("document.getElementById('load-layer').textContent === '1'")
        keep(page, "long")
