"""The chat page in a real browser with a real `zaya serve`: it shows what another client receives."""

import json
import os
import sys
import urllib.request

import browser
import pytest
from serving_process import started
from small_runs import make_chat_run

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(browser.CHROMIUM is None, reason="Chromium is not here: apt-get install chromium"),
]
KEY = "a-key-of-this-test"
SHOWN = """[...document.querySelectorAll(".answer:last-child .t")].map((span) => {
  const { trace } = span.view.answer;
  return [span.textContent, span.token < 0 ? null : trace.texts[span.token], span.className];
})"""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "chats"
    make_chat_run(folder)
    options = ("--port", "0", "--slots", "2", "--max-length", "512")
    command = [sys.executable, "-m", "zaya_jax.cli", "serve", str(folder), *options]
    with started(command, environment=os.environ | {"ZAYA_API_KEY": KEY}) as server:
        yield server.address


def ask_server(address, path, **body):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    content = json.dumps(body).encode() if body else None
    request = urllib.request.Request(f"{address}{path}", content, headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def write(page, text):
    page.click("#question")
    page.write(text)
    page.press("Enter")


def class_of(expert, num_experts):
    return "t x-skip" if expert == num_experts else f"t x-{expert} round-0"


def test_the_page_shows_what_another_client_receives(address, tmp_path):
    with browser.page(tmp_path) as page:
        page.look()
        page.open(f"{address}/")
        page.wait("document.getElementById('key-dialog').open")
        page.click("#key")
        page.write(KEY)
        page.press("Enter")
        page.wait("document.body.dataset.mode === 'chat'")
        page.run("document.getElementById('temperature').value = '0'")
        page.run("document.getElementById('max_tokens').value = '60'")
        write(page, "one?")
        page.wait("document.querySelectorAll('.answer[aria-busy=false]').length === 1")
        messages = [{"role": "user", "content": "one?"}]
        (model,) = ask_server(address, "/v1/models")["data"]
        answer = ask_server(
            address, "/v1/chat/completions", messages=messages, temperature=0, max_tokens=60, routing=True
        )
        (choice,) = answer["choices"]
        shown, routing = page.run(SHOWN), choice["routing"]
        content = (choice["message"].get("reasoning_content") or "") + (choice["message"]["content"] or "")
        assert "".join(text for text, *_ in shown) == content
        # Each token with text has its color; tokens that are part of a character have no text.
        expected = [
            (text, class_of(experts[0], model["zaya"]["num_experts"]) if experts else "t")
            for text, experts in zip(routing["tokens"], routing["experts"], strict=True)
            if text
        ]
        assert len(expected) > 10
        assert [(text, name) for text, token, name in shown if token is not None] == expected
        # Long enough to be still in progress when the button is clicked.
        page.run("document.getElementById('max_tokens').value = '280'")
        write(page, "two?")
        page.wait("document.querySelectorAll('.answer:last-child .t').length > 5")
        page.click("#stop")
        page.wait("document.querySelectorAll('.answer[aria-busy=false]').length === 2")
        assert page.run("document.querySelector('.answer:last-child .note').hidden") is True
        errors = [each for each in page.complaints if "401" not in each.get("text", "")]
        assert errors == []
