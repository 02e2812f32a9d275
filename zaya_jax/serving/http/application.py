"""The ASGI application: routes and middleware."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from zaya_jax.serving.api.endpoint import TextEndpoint
from zaya_jax.serving.api.form import ApiForm, ReadRequest
from zaya_jax.serving.api.request import read_chat, read_completion
from zaya_jax.serving.api.response import make_builder, to_bytes
from zaya_jax.serving.http.auth import AuthMiddleware
from zaya_jax.serving.http.errors import MESSAGES_PATH, ApiError
from zaya_jax.serving.http.page_files import HEADERS, PageFile, page_files
from zaya_jax.serving.messages.response import MESSAGES_FORM
from zaya_jax.serving.responses.response import RESPONSES_FORM
from zaya_jax.serving.service import Service


def _chunks(read_request: ReadRequest) -> ApiForm:
    """The form of OpenAI's completions and chats, whose streams are chunks of the response."""
    return ApiForm(
        read_request,
        make_builder,
        error_event=lambda error, _: error.content,
        names_events=False,
        end_mark="[DONE]",
    )


FORMS = {
    "/v1/completions": _chunks(read_completion),
    "/v1/chat/completions": _chunks(read_chat),
    MESSAGES_PATH: MESSAGES_FORM,
    "/v1/responses": RESPONSES_FORM,
}
"""The APIs of the server, by the path of their endpoint."""


def make_application(
    service: Service, *, key: str | None = None, host: str = "127.0.0.1", origins: Sequence[str] = ()
) -> Starlette:
    """Returns the ASGI application of a server.

    Args:
      service: state of the server.
      key: key that clients must send; None for none.
      host: host that the server listens on.
      origins: origins of other web pages that may send requests from a browser (CORS).
    """
    pages = page_files()
    routes = [
        *(Route(path, TextEndpoint(service, form), methods=["POST"]) for path, form in FORMS.items()),
        Route("/v1/models", _models(service)),
        # A model name can contain slashes, as runs/sft does.
        Route("/v1/models/{name:path}", _model(service)),
        Route("/health", _health(service)),
        Route("/metrics", _metrics(service)),
        *(Route(path, _page(file)) for path, file in pages.items()),
    ]
    # The page prompts its user for the key, and load balancers check the health without one.
    auth = Middleware(
        AuthMiddleware,
        key=key,
        host=host,
        keyless={*pages, "/health"},
        endpoints={route.path for route in routes},
        metrics=service.metrics,
    )
    # CORS comes before authentication: a browser's preflight request has no key.
    cors = Middleware(
        CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"]
    )
    return Starlette(
        routes=routes,
        middleware=[cors, auth] if origins else [auth],
        exception_handlers={ApiError: _api_error, HTTPException: _http_error},  # pyright: ignore
    )


def _models(service: Service):
    async def models(request: HttpRequest) -> Response:
        del request
        return _json({"object": "list", "data": [service.ready_state.model.to_json()]})

    return models


def _model(service: Service):
    async def model(request: HttpRequest) -> Response:
        loaded = service.ready_state.model
        if request.path_params["name"] != loaded.name:
            message = f"unknown model; this server has {loaded.name!a}"
            raise ApiError(message, status=404, param="model", code="model_not_found")
        return _json(loaded.to_json())

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
            # The browser has this version of the file.
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return page


def _json(content: object, *, status: int = 200) -> Response:
    return Response(to_bytes(content), status, media_type="application/json")


async def _api_error(request: HttpRequest, error: ApiError) -> Response:
    content = error.content_of(request.url.path)
    return Response(to_bytes(content), error.status, error.headers, "application/json")


async def _http_error(request: HttpRequest, error: HTTPException) -> Response:
    """Converts Starlette's errors 404 and 405 to the form of the API."""
    # The path is the client's text: it is escaped and shortened in a message.
    path = ascii(request.url.path)[1:-1][:100]
    if error.status_code == 405:
        message = f"{path} does not support the method {ascii(request.method)[1:-1][:20]}"
    else:
        message = (
            f"unknown path {path}; the server has {', '.join(FORMS)}, /v1/models, /health, /metrics, and / "
            "for the page"
        )
    content = ApiError(message, status=error.status_code, code="not_found").content_of(request.url.path)
    return Response(to_bytes(content), error.status_code, error.headers, "application/json")
