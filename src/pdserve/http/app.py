"""The Master's HTTP service: routes, and how a request goes through them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import trio
from starlette.responses import Response
from starlette.routing import Route, Router

from pdserve.errors import NoWorkersError, UnknownModelError
from pdserve.http.exchange import Boundary, Exchange, to_json
from pdserve.http.fields import Fields
from pdserve.http.native import Native
from pdserve.http.openai import OpenAI
from pdserve.http.prompt import Prompts
from pdserve.http.reply import Meter
from pdserve.http.sse import respond_document, respond_stream
from pdserve.master.service import GenerationRequest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from pdserve.http.reply import Job
    from pdserve.master.service import MasterService
    from pdserve.telemetry.metrics import MasterMetrics
    from pdserve.text.template import ChatTemplate
    from pdserve.text.tokenizer import Tokenizer

_OPEN_PATHS = ("/livez", "/readyz", "/health", "/metrics")
"""Need no API key: probes and scrapers have none."""


def build_app(
    service: MasterService,
    *,
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    model_name: str,
    metrics: MasterMetrics,
    api_keys: Sequence[str] = (),
    max_body_bytes: int = 8 * 1024 * 1024,
    is_draining: Callable[[], bool],
    body_timeout: float = 30.0,
    slow_reader_timeout: float = 30.0,
) -> ASGIApp:
    """The ASGI app of a Master; without a lifespan, it owns nothing that needs closing.

    Timeouts in seconds. While `is_draining`, new generations get 503. `slow_reader_timeout`: a client that takes longer
    for one write gives up its generation.
    """
    prompts = Prompts(tokenizer, template)
    openai = OpenAI(service, prompts, model_name)
    native = Native(service, prompts)
    limits = _Limits(max_body_bytes, body_timeout, slow_reader_timeout)

    def generating(path: str, parse: Callable[[Fields], Awaitable[Job]]) -> Route:
        endpoint = _GenerateEndpoint(path, service, parse, metrics, limits, is_draining)
        return Route(path, endpoint, methods=["POST"])

    def answering(path: str, answer: Callable[[Fields], Awaitable[dict[str, Any]]]) -> Route:
        return Route(path, _AnswerEndpoint(answer, limits), methods=["POST"])

    posts = [
        generating("/v1/completions", openai.completions),
        generating("/v1/chat/completions", openai.chat),
        generating("/generate", native.generate),
        generating("/generate_stream", native.generate_stream),
        answering("/tokenize", native.tokenize),
        answering("/detokenize", native.detokenize),
    ]
    pages = _Pages(service, model_name, metrics, is_draining)
    gets = [
        Route("/", pages.index),
        Route("/v1/models", pages.models),
        Route("/v1/models/{model:path}", pages.model),
        Route("/livez", pages.livez),
        Route("/readyz", pages.readyz),
        Route("/health", pages.readyz),
        Route("/metrics", pages.metrics),
        Route("/debug/tree", pages.tree),
    ]
    return Boundary(
        Router([*posts, *gets], redirect_slashes=False),
        metrics=metrics,
        api_keys=api_keys,
        open_paths=_OPEN_PATHS,
        counted_paths=[route.path for route in posts],
    )


class _Limits:
    def __init__(self, body_bytes: int, body_timeout: float, write_timeout: float) -> None:
        self.body_bytes = body_bytes
        self.body_timeout = body_timeout
        self.write_timeout = write_timeout

    async def read(self, exchange: Exchange) -> Fields:
        body = await exchange.read_body(max_bytes=self.body_bytes, timeout=self.body_timeout)
        return Fields.parse(body)


class _GenerateEndpoint:
    """An ASGI endpoint that parses a request, generates, and answers as a stream or a document."""

    def __init__(
        self,
        path: str,
        service: MasterService,
        parse: Callable[[Fields], Awaitable[Job]],
        metrics: MasterMetrics,
        limits: _Limits,
        is_draining: Callable[[], bool],
    ) -> None:
        self._path = path
        self._service = service
        self._parse = parse
        self._metrics = metrics
        self._limits = limits
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        fields = await self._limits.read(exchange)
        if self._is_draining():
            raise NoWorkersError("this server is draining and takes no new requests")
        job = await self._parse(fields)
        generated = job.choices.best_of
        request = GenerationRequest(job.prompt_ids, job.params, exchange.label, exchange.accepted_at, n=generated)
        meter = Meter(self._metrics, self._path, exchange.accepted_at, choices=generated)
        if job.stream:
            timeout = self._limits.write_timeout
            await respond_stream(self._service, request, job.reply, exchange, meter, write_timeout=timeout)
        else:
            await respond_document(self._service, request, job.reply, exchange, meter)


class _AnswerEndpoint:
    """An ASGI endpoint from a JSON object to a JSON object."""

    def __init__(self, answer: Callable[[Fields], Awaitable[dict[str, Any]]], limits: _Limits) -> None:
        self._answer = answer
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange.of(scope)
        await exchange.respond(200, await self._answer(await self._limits.read(exchange)))


class _Pages:
    """Everything that is read with GET."""

    def __init__(
        self, service: MasterService, model_name: str, metrics: MasterMetrics, is_draining: Callable[[], bool]
    ) -> None:
        self._service = service
        self._model_name = model_name
        self._metrics = metrics
        self._is_draining = is_draining
        self._created = int(time.time())

    async def index(self, request: Request) -> Response:
        paths = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/readyz", "/metrics", "/debug/tree"]
        return _json({"name": "pdserve", "model": self._model_name, "endpoints": paths})

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        asked = request.path_params["model"]
        if asked != self._model_name:
            raise UnknownModelError(f"model {asked!r} is not served here; {self._model_name!r} is", param="model")
        return _json(self._model())

    async def livez(self, request: Request) -> Response:
        return _json({"alive": True})

    async def readyz(self, request: Request) -> Response:
        readiness = self._service.readiness()
        draining = self._is_draining()
        ready = readiness.ready and not draining
        reasons = [*(["draining"] if draining else []), *readiness.reasons]
        document = {"ready": ready, "reasons": reasons, "nodes": readiness.nodes, "model": self._model_name}
        return _json(document, 200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), headers={"content-type": self._metrics.content_type})

    async def tree(self, request: Request) -> Response:
        return _json({"uptime_clock": trio.current_time(), **self._service.tree()})

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "pdserve",
            "max_model_len": self._service.card.max_len,
        }


def _json(document: dict[str, Any], status: int = 200) -> Response:
    return Response(to_json(document), status, media_type="application/json")
