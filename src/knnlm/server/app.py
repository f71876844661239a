"""The application: routes, error handlers, and the web page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from knnlm.errors import ClusterError, DatastoreBusy, KnnlmError, ModelError, ParameterError
from knnlm.server.auth import ApiKeys, RequestGuard
from knnlm.server.documents import UnknownDocument
from knnlm.server.engine.requests import Busy, RequestFailed, Stopped
from knnlm.server.responses import JsonResponse, error_body
from knnlm.server.routes import add_routes
from knnlm.server.schemas import UNSUPPORTED_FIELDS
from knnlm.server.service import Service, UnknownModel, UnknownTrace

_STATUS_CODES: dict[type[KnnlmError], tuple[int, str | None]] = {
    UnknownModel: (404, "model_not_found"),
    UnknownDocument: (404, "document_not_found"),
    UnknownTrace: (404, "trace_not_found"),
    Busy: (429, "rate_limit_exceeded"),
    Stopped: (503, None),
    DatastoreBusy: (503, None),
    ClusterError: (503, None),
    ParameterError: (400, None),
    ModelError: (400, None),
    KnnlmError: (500, None),
}
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
APP_OPTIONS: dict[str, Any] = {
    "docs_url": None,
    "redoc_url": None,
    "redirect_slashes": False,
    "default_response_class": JsonResponse,
}
_PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
}


def make_app(service: Service, keys: ApiKeys | None = None) -> FastAPI:
    """Build the application that serves a service."""
    app = make_service_app(service)
    app.add_middleware(
        RequestGuard, keys=keys or ApiKeys(), body_bytes=service.limits.body_bytes, metrics=service.metrics
    )
    return app


def make_service_app(service: Service) -> FastAPI:
    """Build the application of a service without the checks of requests, which `RequestGuard` does."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.start()
        try:
            yield
        finally:
            await run_in_threadpool(service.stop)

    app = FastAPI(title="knnlm", version="1", lifespan=lifespan, **APP_OPTIONS)
    add_error_handlers(app, service.retry_after)
    add_routes(app, service)
    add_page(app)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI document, without FastAPI's own format of errors."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document.get("components", {}).get("schemas", {}).pop(name, None)
        app.openapi_schema = document
    return app.openapi_schema


def add_error_handlers(app: FastAPI, retry_after: Callable[[], int]) -> None:
    """Turn errors into responses in OpenAI's format; `retry_after` returns seconds for a client that is to wait."""

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> JsonResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            place = first["loc"][-1]
            return _error(400, f"The body is not valid JSON (at character {place}). Send one JSON object.")
        path = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
        message, param = _validation_message(first["type"], path, str(first["msg"])), ".".join(path)
        return _error(400, f"{param}: {message}" if param else message, param=param or None)

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> JsonResponse:
        return _error(error.status_code, str(error.detail), headers=error.headers)

    @app.exception_handler(KnnlmError)
    async def _library(_: Request, error: KnnlmError) -> JsonResponse:
        if isinstance(error, RequestFailed):
            return _error(error.status, str(error))
        status, code = next(_STATUS_CODES[kind] for kind in type(error).__mro__ if kind in _STATUS_CODES)
        headers = {"Retry-After": str(retry_after())} if status == 429 else None
        message = f"{error} Try again later." if status == 429 else str(error)
        return _error(status, message, param=getattr(error, "param", None), code=code, headers=headers)

    @app.exception_handler(Exception)
    async def _unexpected(_: Request, __: Exception) -> JsonResponse:
        return _error(500, "Internal server error. See the server's log.")


def _error(status: int, message: str, *, headers: Any = None, **details: Any) -> JsonResponse:
    return JsonResponse(error_body(status, message, **details), status_code=status, headers=headers)


def _validation_message(kind: str, path: list[str], message: str) -> str:
    """Return why a field is invalid."""
    for name in path:
        if name in UNSUPPORTED_FIELDS:
            return UNSUPPORTED_FIELDS[name]
    return "unknown field." if kind == "extra_forbidden" else message


def add_page(app: FastAPI) -> None:
    """Serve the static files, which are read once: no path of a request is opened."""
    static = _read_static()

    def respond(name: str) -> Response:
        if name not in static:
            raise HTTPException(404, "There is no such file.")
        content, media_type = static[name]
        return Response(content, media_type=media_type, headers=_PAGE_HEADERS)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return respond("index.html")

    @app.get("/static/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        return respond(name)


def _read_static() -> dict[str, tuple[bytes, str]]:
    """Return the content and media type of each static file."""
    contents = {}
    for file in files("knnlm.server").joinpath("static").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if file.is_file() and suffix in _MEDIA_TYPES:
            contents[file.name] = (file.read_bytes(), _MEDIA_TYPES[suffix])
    return contents
