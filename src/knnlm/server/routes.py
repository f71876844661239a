"""The routes: an OpenAI-style API, and what it takes to look inside. Knows nothing about models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from knnlm.corpus import Document
from knnlm.errors import KnnlmError, ParameterError
from knnlm.server.app import FIRST, load_page
from knnlm.server.auth import ApiKeys
from knnlm.server.documents import DocumentService, UnknownDocument
from knnlm.server.engine.history import rescore
from knnlm.server.engine.requests import Busy, FinishEvent, GenerationRequest, MemoryOverrides, ScoredToken, TokensEvent
from knnlm.server.engine.scheduler import LATE
from knnlm.server.metrics import TYPE
from knnlm.server.middleware import RequestGuard, error_body
from knnlm.server.responses import Choice, ResponseFormatter, provenance, totals
from knnlm.server.schemas import (
    NOT_HERE,
    AddedDocuments,
    AddRequest,
    ChatAnswer,
    ChatRequest,
    CompletionAnswer,
    CompletionRequest,
    DocumentList,
    ErrorBody,
    ModelFacts,
    ModelList,
    NeighboursAnswer,
    NeighboursRequest,
    Passage,
    RemovedDocument,
    RescoreRequest,
    Sampling,
    ScoreAnswer,
    ScoreRequest,
)
from knnlm.server.service import (
    PreparedRequest,
    RequestFailed,
    Service,
    UnknownModel,
    Unsupported,
    read_wish,
    status_of,
)

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": "An error in OpenAI's shape."}
    for status in (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)
}

_POLICY = "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"

_SSE = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # no proxy may keep pieces back

_CODES: dict[type, str] = {UnknownModel: "model_not_found"}

# Made once, where `json.dumps` would make one for every token.
_write = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode

T = TypeVar("T")

Number = Annotated[int, Path(ge=0, le=2**63 - 1)]


class Json(JSONResponse):
    """JSON that any text can be put in: what is not ASCII is escaped, so half a surrogate pair does no harm."""

    def render(self, content: Any) -> bytes:
        """Write it."""
        return _write(content).encode()


def make_app(service: Service, keys: ApiKeys | None = None) -> FastAPI:
    """Make the application that serves this."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.begin()
        try:
            yield
        finally:
            await run_in_threadpool(service.end)

    app = FastAPI(
        title="knnlm",
        version="1",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        default_response_class=Json,
    )
    _add_errors(app, service)
    _add_looking(app, service)
    _add_generation(app, service)
    _add_scoring(app, service)
    if service.library is not None:
        _add_documents(app, service, service.library)
    _add_page(app)
    app.openapi = lambda: _document(app)  # type: ignore[method-assign]
    app.add_middleware(
        RequestGuard, keys=keys or ApiKeys(), body_bytes=service.limits.body_bytes, seen=service.metrics.seen
    )
    return app


def _document(app: FastAPI) -> dict[str, Any]:
    """Describe the API; FastAPI's own shape of errors is not ours."""
    if app.openapi_schema is None:
        from fastapi.openapi.utils import get_openapi

        made = get_openapi(title=app.title, version=app.version, routes=app.routes)
        for path in made["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            made.get("components", {}).get("schemas", {}).pop(name, None)
        app.openapi_schema = made
    return app.openapi_schema


def _error(status: int, message: str, **more: Any) -> Json:
    headers = more.pop("headers", None)
    return Json(error_body(status, message, **more), status_code=status, headers=headers)


def _add_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Json:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return _error(400, f"The body is no valid JSON (at character {first['loc'][-1]}). Send one JSON object.")
        place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
        where = ".".join(place)
        said = _why(first["type"], place, str(first["msg"]))
        return _error(400, f"{where}: {said}" if where else said, param=where or None)

    @app.exception_handler(HTTPException)
    async def _http(_: Request, error: HTTPException) -> Json:
        return _error(error.status_code, str(error.detail), headers=error.headers)

    @app.exception_handler(KnnlmError)
    async def _own(_: Request, error: KnnlmError) -> Json:
        if isinstance(error, Busy):
            waits = {"Retry-After": str(service.retry_after())}
            return _error(429, f"{error} Try again later.", code="rate_limit_exceeded", headers=waits)
        param = error.param if isinstance(error, Unsupported) else None
        if isinstance(error, UnknownDocument):
            return _error(404, str(error), code="document_not_found")
        return _error(status_of(error), str(error), param=param, code=_CODES.get(type(error)))

    @app.exception_handler(Exception)
    async def _unknown(_: Request, __: Exception) -> Json:
        return _error(500, "Something went wrong in the server.")


def _why(kind: str, place: list[str], message: str) -> str:
    """Say in plain words why a field is refused."""
    names = [part for part in place if part in NOT_HERE]
    if names:
        return NOT_HERE[names[0]]
    return "this server does not know that field." if kind == "extra_forbidden" else message


def _add_looking(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", include_in_schema=False)
    async def health() -> Json:
        alive = service.engine.failed is None
        return Json({"status": "ok" if alive else "failed"}, status_code=200 if alive else 503)

    @app.get("/readyz", include_in_schema=False)
    async def ready() -> Json:
        return Json({"ready": service.ready}, status_code=200 if service.ready else 503)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=TYPE)

    @app.get("/v1/models", response_model=ModelList, responses=_ERRORS)
    async def models() -> Json:
        return Json({"object": "list", "data": [_model_facts(service)]})

    @app.get("/v1/models/{name}", response_model=ModelFacts, responses=_ERRORS)
    async def model(name: Annotated[str, Path(max_length=512)]) -> Json:
        service.check_model(name)
        return Json(_model_facts(service))


def _model_facts(service: Service) -> dict[str, Any]:
    mixture = service.mixture
    knn = mixture.knn
    return {
        "id": service.name,
        "object": "model",
        "created": service.started,
        "owned_by": "knnlm",
        "knnlm": {
            "language_model": mixture.lm.name,
            "memories": mixture.labels,
            "lambda": mixture.lmbda,
            "weights": mixture.weights.kind,
            "k": None if knn is None else knn.k,
            "knn_temperature": None if knn is None else knn.knn_temperature,
            "keys": None if knn is None else knn.store.key_count,
            "longest": mixture.max_length,
            "batched": service.engine.together,
            "max_prompt_tokens": service.limits.prompt_tokens,
            "max_output_tokens": service.limits.output_tokens,
            "max_body_bytes": service.limits.body_bytes,
        },
    }


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=CompletionAnswer, responses=_ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        asked = await run_in_threadpool(service.completion, body)
        return await _answer(service, request, asked, body, "cmpl")

    @app.post("/v1/chat/completions", response_model=ChatAnswer, responses=_ERRORS)
    async def chat(body: ChatRequest, request: Request) -> Response:
        asked = await run_in_threadpool(service.chat, body)
        return await _answer(service, request, asked, body, "chatcmpl")


async def _answer(service: Service, request: Request, asked: PreparedRequest, body: Sampling, kind: str) -> Response:
    """Carry out what is asked, as a stream or as a whole."""
    form = ResponseFormatter(kind, service.name, service.pieces, asked.alternatives)
    if not body.stream:
        return Json(await _unless_gone(request, _whole(service, asked, form)))
    chunks = _chunks(service, asked, form, usage=bool(body.stream_options and body.stream_options.include_usage))
    # The first one is waited for, so that an error that comes before it has its status.
    first = await _unless_gone(request, anext(chunks))
    return StreamingResponse(_stream(first, chunks), media_type="text/event-stream", headers=_SSE)


async def _whole(service: Service, asked: PreparedRequest, form: ResponseFormatter) -> dict[str, Any]:
    choices, made = _choices(service, asked), 0
    async for came in service.events(asked.orders):
        for number, ticket, event in came:
            choice = choices[number * asked.orders[0].copies + getattr(event, "copy", 0)]
            choice.trace = ticket.texts[getattr(event, "copy", 0)].id
            if isinstance(event, TokensEvent):
                choice.tokens += event.tokens
            elif isinstance(event, FinishEvent):
                choice.reason, made = event.reason, made + event.generated
    return form.whole(choices, _usage(asked, made))


async def _chunks(
    service: Service, asked: PreparedRequest, form: ResponseFormatter, *, usage: bool
) -> AsyncIterator[bytes]:
    """Give the chunks of a stream as server-sent events; those that are there at the same time are written at once."""
    choices, made = _choices(service, asked), 0
    async for came in service.events(asked.orders):
        written = []
        for number, ticket, event in came:
            copy = getattr(event, "copy", 0)
            choice = choices[number * asked.orders[0].copies + copy]
            choice.trace = ticket.texts[copy].id
            if isinstance(event, TokensEvent):
                written.append(_event(form.chunk(choice, event.tokens)))
            elif isinstance(event, FinishEvent):
                choice.reason, made = event.reason, made + event.generated
                written.append(_event(form.chunk(choice, [])))
        yield b"".join(written)
    if usage:
        yield _event(form.last(_usage(asked, made)))


async def _stream(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Write chunks; an error in the middle is one too."""
    try:
        yield first
        async for chunk in chunks:
            yield chunk
    except RequestFailed as error:
        yield _event(error_body(error.status, str(error)))
    finally:
        await chunks.aclose()  # type: ignore[attr-defined]
    yield b"data: [DONE]\n\n"


def _event(facts: dict[str, Any]) -> bytes:
    return b"data: " + _write(facts).encode() + b"\n\n"


def _choices(service: Service, asked: PreparedRequest) -> list[Choice]:
    k = service.neighbours_kept(asked.orders[0].wish)
    return [Choice(index, k=k) for index in range(sum(order.copies for order in asked.orders))]


def _usage(asked: PreparedRequest, made: int) -> dict[str, int]:
    read = asked.prompt_tokens
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Wait for an answer, and stop where nobody waits for it any more."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(499, "The client has gone.")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _tokens(service: Service, order: GenerationRequest) -> tuple[str, list[ScoredToken]]:
    """Carry out one order, and give the name of its trace and its tokens."""
    tokens: list[ScoredToken] = []
    trace = ""
    async for came in service.events([order]):
        for _, ticket, event in came:
            trace = ticket.texts[0].id
            if isinstance(event, TokensEvent):
                tokens += event.tokens
    return trace, tokens


def _add_scoring(app: FastAPI, service: Service) -> None:
    @app.post("/v1/score", response_model=ScoreAnswer, responses=_ERRORS)
    async def score(body: ScoreRequest, request: Request) -> Json:
        order = await run_in_threadpool(service.score, body)
        trace, said = await _unless_gone(request, _tokens(service, order))
        return Json({**totals(said), "knnlm": provenance(trace, service.neighbours_kept(order.wish), said)})

    @app.post("/v1/rescore", response_model=ScoreAnswer, responses=_ERRORS)
    async def again(body: RescoreRequest) -> Json:
        found = service.engine.recall.find(body.id)
        if found is None:
            return _error(404, "This text is forgotten, or never was. Make it again.", code="trace_not_found")
        wish, tokens = found
        most = service.neighbours_kept(wish)
        if body.k is not None and body.k > most:
            raise ParameterError(f"k can be {most:,} at most: no more neighbours were looked for.")
        changes = MemoryOverrides(lmbda=body.lmbda, k=body.k, knn_temperature=body.knn_temperature)
        said = await _aside(service, rescore, service.engine.wishes, wish, tokens, changes)
        return Json({**totals(said), "knnlm": provenance(body.id, most, said)})

    @app.post("/v1/neighbours", response_model=NeighboursAnswer, responses=_ERRORS)
    async def neighbours(body: NeighboursRequest, request: Request) -> Json:
        service.check_model(body.model)
        tokens, hidden = await run_in_threadpool(service.prompt, body.prompt)
        wish = read_wish(body.memory)
        service.room(len(tokens), 1, usual=1)
        order = GenerationRequest(
            tuple(tokens), 1, sources=body.k, wish=wish, deadline=service.deadline(), hidden=hidden, endless=True
        )
        _, said = await _unless_gone(request, _tokens(service, order))
        return Json({"neighbours": said[0].sources if said else []})


async def _aside(service: Service, work: Callable[..., T], *given: Any, change: bool = False, **named: Any) -> T:
    """Do what may take long in a thread; few at a time, so that they do not keep others' prompts waiting."""
    gate = service.changing if change else service.looking
    try:
        await asyncio.wait_for(gate.acquire(), service.limits.seconds)
    except asyncio.TimeoutError:
        raise HTTPException(504, LATE) from None
    try:
        return await run_in_threadpool(work, *given, **named)
    finally:
        gate.release()


def _add_documents(app: FastAPI, service: Service, library: DocumentService) -> None:
    @app.get("/v1/documents", response_model=DocumentList, responses=_ERRORS)
    async def documents(
        query: Annotated[str, Query(max_length=512)] = "",
        offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> Json:
        return Json(await _aside(service, library.list, query=query, offset=offset, limit=limit))

    @app.get("/v1/documents/{number}", response_model=Passage, responses=_ERRORS)
    async def document(
        number: Number,
        row: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
        offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=4000)] = 400,
    ) -> Json:
        return Json(await _aside(service, library.read, number, row=row, offset=offset, limit=limit))

    @app.post("/v1/documents", response_model=AddedDocuments, responses=_ERRORS)
    async def add(body: AddRequest) -> Json:
        new = [Document(each.id, each.source or each.id, each.text, each.fields or {}) for each in body.documents]
        return Json(await _aside(service, library.add, new, change=True))

    @app.delete("/v1/documents/{number}", response_model=RemovedDocument, responses=_ERRORS)
    async def remove(number: Number) -> Json:
        removed = await _aside(service, library.remove, number, change=True)
        service.engine.recall.clear()  # it may hold words of the document
        return Json(removed)


def _add_page(app: FastAPI) -> None:
    files = load_page()
    headers = {"Content-Security-Policy": _POLICY, "Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}

    def found(name: str) -> Response:
        if name not in files:
            raise HTTPException(404, "There is no such page.")
        content, kind = files[name]
        return Response(content, media_type=kind, headers=headers)

    @app.get("/", include_in_schema=False)
    async def first() -> Response:
        return found(FIRST)

    @app.get("/page/{name}", include_in_schema=False)
    async def other(name: str) -> Response:
        return found(name)
