"""The routes of the API: OpenAI's completions, scores, neighbours and documents."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI, Path, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from knnlm.server.metrics import CONTENT_TYPE
from knnlm.server.responses import EventStream, JsonResponse, ResponseWriter, score_body, translation_body
from knnlm.server.schemas import (
    AddedDocuments,
    AddRequest,
    ChatRequest,
    ChatResponse,
    CompletionRequest,
    CompletionResponse,
    DocumentList,
    ErrorBody,
    ModelList,
    ModelMetadata,
    NeighboursRequest,
    NeighboursResponse,
    Passage,
    RemovedDocument,
    RescoreRequest,
    SamplingRequest,
    ScoreRequest,
    ScoreResponse,
    TranslateRequest,
    TranslateResponse,
)
from knnlm.server.service import PreparedRequest, Service

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": "An error in OpenAI's format."}
    for status in (400, 401, 403, 404, 408, 413, 415, 429, 500, 503, 504)
}

T = TypeVar("T")
DocumentNumber = Annotated[int, Path(ge=0, le=2**63 - 1)]


def add_routes(app: FastAPI, service: Service) -> None:
    """Add all routes that the service supports."""
    _add_status(app, service)
    _add_completions(app, service)
    _add_scores(app, service)
    if service.documents is not None:
        _add_documents(app, service)


def _add_status(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", include_in_schema=False)
    async def health() -> JsonResponse:
        return JsonResponse(
            {"status": "failed" if service.failed else "ok"}, status_code=503 if service.failed else 200
        )

    @app.get("/readyz", include_in_schema=False)
    async def ready() -> JsonResponse:
        return JsonResponse({"ready": service.ready}, status_code=200 if service.ready else 503)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/v1/models", response_model=ModelList, responses=_ERRORS)
    async def models() -> JsonResponse:
        return JsonResponse({"object": "list", "data": [service.model_metadata()]})

    @app.get("/v1/models/{name}", response_model=ModelMetadata, responses=_ERRORS)
    async def model(name: Annotated[str, Path(max_length=512)]) -> JsonResponse:
        return JsonResponse(service.model_metadata(name))


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=CompletionResponse, responses=_ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        prepared = await run_in_threadpool(service.prepare_completion, body)
        return await _complete(service, request, prepared, body, chat=False)

    @app.post("/v1/chat/completions", response_model=ChatResponse, responses=_ERRORS)
    async def chat(body: ChatRequest, request: Request) -> Response:
        prepared = await run_in_threadpool(service.prepare_chat, body)
        return await _complete(service, request, prepared, body, chat=True)

    @app.post("/v1/translate", response_model=TranslateResponse, responses=_ERRORS)
    async def translate(body: TranslateRequest, request: Request) -> JsonResponse:
        prepared = await run_in_threadpool(service.prepare_translation, body)
        work = _writer(service, prepared, chat=False).body(service.generate(prepared.requests))
        completion = await _while_connected(request, work)
        return JsonResponse(translation_body(completion, tokens=bool(body.sources or body.tokens)))


def _writer(service: Service, prepared: PreparedRequest, *, chat: bool) -> ResponseWriter:
    return ResponseWriter(
        service.name,
        service.token_texts,
        chat=chat,
        choices=prepared.choices,
        prompt_tokens=prepared.prompt_tokens,
        alternatives=prepared.alternatives,
        max_k=prepared.max_k,
    )


async def _complete(
    service: Service, request: Request, prepared: PreparedRequest, body: SamplingRequest, *, chat: bool
) -> Response:
    writer = _writer(service, prepared, chat=chat)
    events = service.generate(prepared.requests)
    if not body.stream:
        return JsonResponse(await _while_connected(request, writer.body(events)))
    # Wait for the first events, so that an error before them has its own status.
    first = await _while_connected(request, anext(events))
    usage = bool(body.stream_options and body.stream_options.include_usage)
    return EventStream(writer.stream(first, events, usage=usage), events)


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of some work; cancel it if the client disconnects."""
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(499, "The client has disconnected.")
        return task.result()
    finally:
        for future in (task, disconnected):
            future.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await future


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_scores(app: FastAPI, service: Service) -> None:
    @app.post("/v1/score", response_model=ScoreResponse, responses=_ERRORS)
    async def score(body: ScoreRequest, request: Request) -> JsonResponse:
        scored = await _while_connected(request, service.score(body))
        return JsonResponse(score_body(scored.trace_id, scored.max_k, scored.tokens, scored.missing_shards))

    @app.post("/v1/rescore", response_model=ScoreResponse, responses=_ERRORS)
    async def rescore(body: RescoreRequest) -> JsonResponse:
        scored = await service.rescore(body)
        return JsonResponse(score_body(scored.trace_id, scored.max_k, scored.tokens, scored.missing_shards))

    @app.post("/v1/neighbours", response_model=NeighboursResponse, responses=_ERRORS)
    async def neighbours(body: NeighboursRequest, request: Request) -> JsonResponse:
        return JsonResponse(await _while_connected(request, service.neighbours(body)))


def _add_documents(app: FastAPI, service: Service) -> None:
    @app.get("/v1/documents", response_model=DocumentList, responses=_ERRORS)
    async def documents(
        query: Annotated[str, Query(max_length=512)] = "",
        offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=200)] = 50,
    ) -> JsonResponse:
        return JsonResponse(await service.list_documents(query=query, offset=offset, limit=limit))

    @app.get("/v1/documents/{number}", response_model=Passage, responses=_ERRORS)
    async def document(
        number: DocumentNumber,
        entry: Annotated[int | None, Query(ge=0, le=2**63 - 1)] = None,
        offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=4000)] = 400,
    ) -> JsonResponse:
        return JsonResponse(await service.read_document(number, entry=entry, offset=offset, limit=limit))

    @app.post("/v1/documents", response_model=AddedDocuments, responses=_ERRORS)
    async def add(body: AddRequest) -> JsonResponse:
        return JsonResponse(await service.add_documents(body))

    @app.delete("/v1/documents/{number}", response_model=RemovedDocument, responses=_ERRORS)
    async def remove(number: DocumentNumber) -> JsonResponse:
        return JsonResponse(await service.remove_document(number))
