"""Requests that are refused for their key, host, origin, path, method or size."""

import asyncio
import json

from serving_client import client, serving

from zaya_jax.serving.http.limits import ServingLimits

COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}


def requests(*calls, **options):
    """Returns the responses of one application to several requests."""

    async def run():
        async with serving(**options) as (_, application), client(application) as http:
            return [await http.request(*call[:2], **call[2]) for call in calls]

    return asyncio.run(run())


def test_the_key():
    body = {"json": {"prompt": "a", "max_tokens": 2}}

    def with_key(key):
        return body | {"headers": {"authorization": key}}

    calls = [("POST", COMPLETIONS, with_key(key)) for key in ("", "Bearer", "Bearer wrong", "Basic secret")]
    answers = requests(
        *calls, ("GET", "/v1/models", {}), ("GET", "/metrics", {}), ("GET", "/no", {}), key="secret"
    )
    assert {answer.status_code for answer in answers} == {401}
    assert answers[0].json()["error"]["code"] == "invalid_api_key"
    assert not any("secret" in answer.text for answer in answers)
    calls = [("POST", COMPLETIONS, with_key("Bearer secret")), ("GET", "/health", {}), ("GET", "/", {})]
    assert {answer.status_code for answer in requests(*calls, key="secret")} == {200}


def test_requests_of_hostile_pages_are_refused():
    body = json.dumps({"prompt": "a"}).encode()
    plain, rebound, page = requests(
        ("POST", COMPLETIONS, {"content": body, "headers": {"content-type": "text/plain"}}),
        ("POST", COMPLETIONS, {"content": body, "headers": JSON | {"host": "evil.example"}}),
        ("GET", "/", {}),
    )  # fmt: skip
    assert (plain.status_code, rebound.status_code, page.status_code) == (415, 403, 200)
    for answer in (plain, rebound, page):
        assert answer.headers["content-security-policy"].startswith("default-src 'self'")
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert "access-control-allow-origin" not in answer.headers
    statuses = {"[::1]:80": 200, "127.0.0.1:8000": 200, "localhost": 200, "LOCALHOST": 200}
    statuses |= dict.fromkeys(["[::1]evil", "[::1]evil:80", "[::1", "localhost:80:80", "localhost@evil"], 403)
    answers = requests(*(("GET", "/health", {"headers": {"host": name}}) for name in statuses))
    assert [answer.status_code for answer in answers] == list(statuses.values())


def test_allowed_origins():
    asks = {"origin": "http://page.example", "access-control-request-method": "POST"}
    for origin, allowed in (("http://page.example", True), ("http://other.example", False)):
        call = ("OPTIONS", COMPLETIONS, {"headers": asks | {"origin": origin}})
        (answer,) = requests(call, origins=["http://page.example"], key="secret")
        assert ("access-control-allow-origin" in answer.headers) == allowed


def test_unknown_paths_and_methods():
    answers = requests(
        ("GET", "/v2/\u2028x", {}), ("GET", COMPLETIONS, {}), ("GET", "/../application.py", {})
    )
    assert [answer.status_code for answer in answers] == [404, 405, 404]
    assert "unknown path /v2/" in answers[0].json()["error"]["message"]
    assert "/v1/completions does not support the method GET" in answers[1].json()["error"]["message"]


def test_bodies_that_are_too_long_or_too_slow():
    limits = ServingLimits(body_bytes=1000, body_seconds=0.1)

    async def parts(*, seconds):
        for _ in range(30):
            yield b" " * 100
            await asyncio.sleep(seconds)

    headers = {"content-type": "application/json"}
    answers = requests(
        ("POST", COMPLETIONS, {"content": b" " * 1001, "headers": headers}),
        ("POST", COMPLETIONS, {"content": parts(seconds=0), "headers": headers}),
        ("POST", COMPLETIONS, {"content": parts(seconds=0.05), "headers": headers}),
        ("POST", COMPLETIONS, {"content": b"{}", "headers": headers | {"content-length": "9" * 5000}}),
        limits=limits,
    )
    assert [answer.status_code for answer in answers] == [413, 413, 408, 413]
    assert all(answer.headers["connection"] == "close" for answer in answers)
