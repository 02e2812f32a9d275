"""Clients of the application in the same process, by httpx or by raw ASGI calls that control the timing."""

import asyncio
import contextlib
import json

import httpx
from fake_engine import FakeEngine, fake_model

from zaya_jax.serving.http.application import make_application
from zaya_jax.serving.http.limits import ServingLimits
from zaya_jax.serving.service import Service


@contextlib.asynccontextmanager
async def serving(engine=None, *, limits=None, key=None, origins=(), model=None, loaded=True):
    """Yields a service with a loaded model, and its application."""
    engine = engine or FakeEngine()
    service = Service(limits or ServingLimits())
    application = make_application(service, key=key, origins=origins)
    with engine.stepping():
        if loaded:
            service.set_ready(model or fake_model(engine))
        try:
            yield service, application
        finally:
            service.close()


def client(application, **options):
    transport = httpx.ASGITransport(application, raise_app_exceptions=True)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=30, **options)


def ask(path, body, **options):
    """Returns the response of a new service to one request."""

    async def run():
        async with serving(**options) as (_, application), client(application) as http:
            if isinstance(body, bytes):
                return await http.post(path, content=body, headers={"content-type": "application/json"})
            return await http.post(path, json=body)

    return asyncio.run(run())


def chunks_of(text):
    """Returns the events of a stream, which must end with OpenAI's end mark."""
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


class Client:
    """An ASGI client that controls when it reads, and can disconnect."""

    def __init__(self, application, path, body, *, reads=True):
        self.parts, self.status, self.reads = [], None, asyncio.Event()
        if reads:
            self.reads.set()
        self.left, self.aborted = asyncio.Event(), False
        self._messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers,
            "query_string": b"", "root_path": "", "scheme": "http", "http_version": "1.1",
            "server": ("localhost", 80), "client": ("127.0.0.1", 1), "state": {"abort": self._abort},
        }  # fmt: skip
        self.task = asyncio.create_task(application(scope, self._receive, self._send))

    def leave(self):
        self.left.set()
        self.reads.set()

    def _abort(self):
        self.aborted = True
        self.leave()

    async def _receive(self):
        if self._messages:
            return self._messages.pop()
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        await self.reads.wait()
        self.parts.append(message.get("body", b""))
