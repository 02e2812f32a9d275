"""The application: its routes, and what stands before them."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from zaya_jax.serving.answer_json import to_bytes
from zaya_jax.serving.asked import read_chat, read_completion
from zaya_jax.serving.endpoint import TextEndpoint
from zaya_jax.serving.gate import Gate
from zaya_jax.serving.page_files import HEADERS, PageFile, page_files
from zaya_jax.serving.refusals import Refused
from zaya_jax.serving.service import Service


def make_application(
    service: Service, *, key: str | None = None, host: str = "127.0.0.1", origins: Sequence[str] = ()
) -> Starlette:
    """The ASGI application of a server.

    Args:
      service: what it serves.
      key: that clients must send; None for none.
      host: that it listens at.
      origins: of pages that may ask from a browser, beside its own.
    """
    pages = page_files()
    routes = [
        Route("/v1/completions", TextEndpoint(service, read_completion), methods=["POST"]),
        Route("/v1/chat/completions", TextEndpoint(service, read_chat), methods=["POST"]),
        Route("/v1/models", _models(service)),
        Route("/v1/models/{name:path}", _model(service)),
        Route("/health", _health(service)),
        Route("/metrics", _metrics(service)),
        *(Route(path, _page(file)) for path, file in pages.items()),
    ]
    # The page asks its user for the key; a load balancer has none.
    keyless = {*pages, "/health"}
    endpoints = {route.path for route in routes}
    metrics = service.metrics
    gate = Middleware(Gate, key=key, host=host, keyless=keyless, endpoints=endpoints, metrics=metrics)
    # Outside the gate: before it sends the key, a browser asks whether it may, and has none for that.
    cors = Middleware(
        CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"]
    )
    return Starlette(
        routes=routes,
        middleware=[cors, gate] if origins else [gate],
        exception_handlers={Refused: _refusal, HTTPException: _no_route},  # pyright: ignore[reportArgumentType]
    )


def _models(service: Service):
    async def models(request: HttpRequest) -> Response:
        del request
        return _json({"object": "list", "data": [service.opened.served.to_json()]})

    return models


def _model(service: Service):
    async def model(request: HttpRequest) -> Response:
        served = service.opened.served
        if request.path_params["name"] != served.name:
            message = f"there is no such model; this server has {served.name!a}"
            raise Refused(message, status=404, field="model", code="model_not_found")
        return _json(served.to_json())

    return model


def _health(service: Service):
    async def health(request: HttpRequest) -> Response:
        del request
        return _json({"status": service.status}, status=200 if service.status == "ready" else 503)

    return health


def _metrics(service: Service):
    async def metrics(request: HttpRequest) -> Response:
        del request
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return metrics


def _page(file: PageFile):
    headers = {**HEADERS, "ETag": file.tag}

    async def page(request: HttpRequest) -> Response:
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return page


def _json(content: object, *, status: int = 200) -> Response:
    return Response(to_bytes(content), status, media_type="application/json")


async def _refusal(request: HttpRequest, error: Refused) -> Response:
    del request
    return Response(to_bytes(error.content), error.status, error.headers, "application/json")


async def _no_route(request: HttpRequest, error: HTTPException) -> Response:
    known = "/v1/chat/completions, /v1/completions, /v1/models, /health, /metrics and / for the page"
    message = f"there is nothing at {ascii(request.url.path)[1:-1][:100]}; there is {known}"
    if error.status_code == 405:
        message = f"{ascii(request.url.path)[1:-1][:100]} does not take {ascii(request.method)[1:-1][:20]}"
    refused = Refused(message, status=error.status_code, code="not_found")
    return Response(to_bytes(refused.content), error.status_code, error.headers, "application/json")
