"""A server with the API of `zaya serve` but without a model: it sends seeded words and routing.

The page is tested with it, because it does what a real server seldom does: long responses, split characters,
errors.
"""

import contextlib
import http.server
import json
import random
import threading
import time

from zaya_jax.serving.http.page_files import HEADERS, page_files

HOSTILE = "<img src=x onerror=alert(1)>"
WORDS = (" router", " the", " sends", " each", " token", " to", " one", " expert", ",", " and", " then",
         ".", ".\n", " naïve", " “quoted”", "\n\n", " 日本", " x = 1", HOSTILE, " layer")  # fmt: skip
THOUGHTS = 12
"""Tokens that a thinking model spends on them."""


class Behavior:
    """Behavior of the server: number of tokens, speed, shape of the network, and errors."""

    def __init__(self, **options):
        self.num_layers, self.num_experts, self.max_length = 12, 16, 8192
        self.is_chat, self.thinks, self.key = True, True, None
        self.num_tokens, self.pause, self.is_ready = 60, 0.0, True
        self.trouble, self.cut_after = None, None
        self.requests, self.sent, self.left = [], [], 0
        self.__dict__.update(options)

    def tokens(self, body):
        """Returns the texts of the tokens, reasoning first, and the random generator of their routing."""
        draw = random.Random(len(self.requests))
        num_tokens = min(body.get("max_tokens") or self.num_tokens, self.num_tokens)
        texts = [draw.choice(WORDS) for _ in range(num_tokens)]
        texts[num_tokens // 2 : num_tokens // 2 + 2] = ["", " 🙂"]  # two tokens that are one character
        return texts, draw

    def way(self, draw):
        """Returns the experts of a token, distributed differently in each layer, and their probabilities."""
        experts = [
            self.num_experts
            if draw.random() < 0.06
            else int(draw.triangular(0, self.num_experts, layer % self.num_experts))
            for layer in range(self.num_layers)
        ]
        return experts, [round(draw.uniform(0.1, 1), 4) for _ in experts]


def routing_of(behavior, draw, texts, is_last=False):
    """Returns the field `routing` for the tokens of a chunk; the last token of a text has no experts."""
    ways = [behavior.way(draw) for _ in texts]
    if is_last:
        ways[-1] = (None, None)
    return {
        "tokens": list(texts),
        "logprobs": [round(-draw.expovariate(1.0), 4) for _ in texts],
        "experts": [experts for experts, _ in ways],
        "probabilities": [probabilities for _, probabilities in ways],
    }


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as `zaya serve` does."""

    protocol_version = "HTTP/1.1"
    files = page_files()

    def log_message(self, *_):
        pass

    @property
    def behavior(self):
        return self.server.behavior

    def give(self, status, content, media_type="application/json", headers=()):
        self.send_response(status)
        # A kept connection would still be served after the server has stopped.
        self.close_connection = True
        for name, value in {
            "Content-Type": media_type,
            "Content-Length": len(content),
            "Connection": "close",
            **dict(headers),
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)

    def refuse(self, status, message, headers=()):
        self.give(
            status, json.dumps({"error": {"message": message, "code": status}}).encode(), headers=headers
        )

    def is_let_in(self):
        key = self.behavior.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self.refuse(401, "wrong key")
        return False

    def do_GET(self):
        file = self.files.get(self.path)
        if file is not None:
            self.give(200, file.content, file.media_type, HEADERS)
        elif self.path != "/v1/models":
            self.refuse(404, f"no such address: {self.path}")
        elif not self.behavior.is_ready:
            self.refuse(503, "the run is being read")
        elif self.is_let_in():
            about = {
                name: getattr(self.behavior, name) for name in ("num_layers", "num_experts", "max_length")
            }
            about |= {"chat": self.behavior.is_chat, "thinking": self.behavior.thinks}
            self.give(
                200,
                json.dumps({"data": [{"id": "runs/behavior", "object": "model", "zaya": about}]}).encode(),
            )

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.is_let_in():
            return
        self.behavior.requests.append((self.path, body))
        if self.behavior.trouble is not None:
            status, message = self.behavior.trouble
            self.refuse(status, message, {"Retry-After": 3} if status == 429 else {})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            self.stream(body)
        except (BrokenPipeError, ConnectionResetError):
            self.behavior.left += 1

    def say(self, event):
        """Sends an event in two writes, split within a multi-byte character if there is one."""
        text = event if isinstance(event, str) else json.dumps(event, ensure_ascii=False)
        content = f"data: {text}\r\n\r\n".encode()
        cut = next((n for n, byte in enumerate(content) if byte >= 0xC0), len(content) - 3) + 1
        for part in (content[:cut], content[cut:]):
            self.wfile.write(part)
            self.wfile.flush()

    def stream(self, body):
        behavior, is_chat = self.behavior, self.path == "/v1/chat/completions"
        texts, draw = behavior.tokens(body)
        sent = {"texts": [], "tokens": [], "logprobs": [], "experts": [], "probabilities": []}
        behavior.sent.append(sent)
        for choice in choices_of(behavior, texts, draw, is_chat):
            self.say({"choices": [choice]})
            for name, values in choice["routing"].items():
                sent[name] += values
            sent["texts"].append(texts[choice["index_of_token"]])
            time.sleep(behavior.pause)
            if behavior.cut_after is not None and choice["index_of_token"] >= behavior.cut_after:
                return
        if body.get("stream_options", {}).get("include_usage"):
            self.say({"choices": [], "usage": {"prompt_tokens": 21, "completion_tokens": len(texts)}})
        self.say("[DONE]")


def choices_of(behavior, texts, draw, is_chat):
    """Yields the choices of a response's chunks, one token each: reasoning, then content."""
    thinks = is_chat and behavior.thinks
    marks = {0: "<think>", THOUGHTS: "</think>"} if thinks else {}
    for n, text in enumerate(texts):
        is_last = n == len(texts) - 1
        options = [marks[n], text] if n in marks else [text]
        routing = routing_of(behavior, draw, options, is_last)
        kind = "reasoning_content" if thinks and n < THOUGHTS else "content"
        part = {"delta": {kind: text}} if is_chat else {"text": text}
        yield {
            "index": 0,
            **part,
            "routing": routing,
            "finish_reason": "stop" if is_last else None,
            "index_of_token": n,
        }


@contextlib.contextmanager
def serve(**options):
    """Runs a fake server on loopback, and yields its URL and its behavior."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(options.pop("port", 0))), Handler)
    server.daemon_threads, server.behavior = True, Behavior(**options)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", server.behavior
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
