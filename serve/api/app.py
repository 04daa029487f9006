"""The application and its routes."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse

from medusa.serve.api import answers
from medusa.serve.api.access import Limits, check_admin, check_key, check_text
from medusa.serve.api.body import HEADER, ignored, named
from medusa.serve.api.chat import chat
from medusa.serve.api.completions import complete
from medusa.serve.api.errors import ApiError, handle_errors, refused
from medusa.serve.api.items import ResponsesRequest
from medusa.serve.api.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    HeadsRequest,
    Shared,
    TokenizeRequest,
)
from medusa.serve.api.reply import Reply
from medusa.serve.api.responses import ResponseReply, respond
from medusa.serve.api.service import Service, while_connected
from medusa.serve.models import UnknownModelError

PAGE = Path(__file__).parents[1] / "page"
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "model": answers.Failure}
    for status, text in (
        ("4XX", "It cannot be served"), (400, "It cannot be served as it is"),
        (401, "API key is missing or wrong"), (403, "It is not allowed"),
        (404, "There is no such model"), (408, "The request took too long"), (413, "Body is too large"),
        (429, "Queue is full; see Retry-After"), (500, "A step has failed"), (503, "The server is shutting down"),
    )
}  # fmt: skip


def _told(model: Any, stream: bool = False) -> dict[int | str, dict[str, Any]]:
    """The answers of an endpoint, for the documentation."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    content = {"content": {"text/event-stream": {"schema": event}}} if stream else {}
    return {200: {"description": "As asked", "model": model, **content}, **ERRORS}


def create_app(service: Service, drain: float = 30.0) -> FastAPI:
    """The API over an engine, which runs as long as the application does.

    Args:
        service: The common service of the endpoints.
        drain: Seconds for which running requests may continue at shutdown.
    """
    settings, engine = service.settings, service.engine

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        engine.start()
        try:
            yield
        finally:
            await engine.stop(drain)

    app = FastAPI(
        title="Medusa", lifespan=lifespan, docs_url="/docs", redoc_url=None, dependencies=[Depends(check_text)]
    )
    app.add_middleware(Limits, max_body=settings.max_body)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_credentials=settings.allow_credentials,
            expose_headers=["X-Request-Id", HEADER],
        )
    handle_errors(app)

    async def stop() -> None:
        await engine.stop(drain)

    app.state.stop = stop  # a server calls it before it closes connections

    async def client(request: Request) -> str:
        return check_key(request, settings)

    async def admin(request: Request) -> None:
        check_admin(request, settings)

    Client = Annotated[str, Depends(client)]

    async def reply(request: Request, body: Shared, starting: Awaitable[Reply | ResponseReply]) -> Response:
        answer = await while_connected(request, starting)
        headers = named(ignored(body))
        if body.stream:
            return answer.stream(headers)
        return JSONResponse(await while_connected(request, answer.answer()), headers=headers)

    @app.post("/v1/chat/completions", responses=_told(answers.ChatCompletion, stream=True))
    async def chat_completions(request: Request, body: ChatRequest, key: Client) -> Response:
        """Answer a conversation."""
        return await reply(request, body, chat(service, body, _who(key, body)))

    @app.post("/v1/responses", responses=_told(answers.ResponseObject, stream=True))
    async def responses(request: Request, body: ResponsesRequest, key: Client) -> Response:
        """Answer a conversation in the format of OpenAI's newer API."""
        return await reply(request, body, respond(service, body, _who(key, body)))

    @app.post("/v1/completions", responses=_told(answers.TextCompletion, stream=True))
    async def completions(request: Request, body: CompletionRequest, key: Client) -> Response:
        """Continue text."""
        return await reply(request, body, complete(service, body, _who(key, body)))

    @app.get("/v1/models", responses=_told(answers.ModelList))
    async def models(_: Client) -> dict[str, Any]:
        """The base and the heads on it."""
        return {"object": "list", "data": service.models.listing()}

    @app.get("/v1/models/{name:path}", responses=_told(answers.ServedModel))
    async def model(name: str, _: Client) -> dict[str, Any]:
        """One model."""
        for entry in service.models.listing():
            if entry["id"] == name:
                return entry
        raise UnknownModelError(f"model ({name}) does not exist; GET /v1/models lists those that do")

    @app.post("/tokenize", responses=_told(answers.Tokens))
    async def tokenize(body: TokenizeRequest, _: Client) -> dict[str, Any]:
        """Token ids of a text or of a conversation."""
        service.models.heads_of(body.model)
        return await service.aside(service.texts.tokenize, body)

    @app.post("/detokenize", responses=_told(answers.Detokenized))
    async def detokenize(body: DetokenizeRequest, _: Client) -> dict[str, Any]:
        """The text of token ids."""
        service.models.heads_of(body.model)
        try:
            engine.model.base.check_tokens("tokens", body.tokens)
        except ValueError as error:
            raise refused(str(error), "tokens") from error
        return {"prompt": await service.aside(service.texts.decode, body.tokens)}

    @app.post("/v1/heads", dependencies=[Depends(admin)], responses=_told(answers.ModelList))
    async def load_heads(body: HeadsRequest) -> dict[str, Any]:
        """Load heads while the server runs."""
        try:
            await service.models.load(body.name, body.path, body.revision)
        except ValueError as error:
            raise refused(str(error), "path") from error
        return {"object": "list", "data": service.models.listing()}

    @app.delete("/v1/heads/{name:path}", dependencies=[Depends(admin)], responses=_told(answers.ModelList))
    async def remove_heads(name: str) -> dict[str, Any]:
        """Remove heads; requests that run with them continue."""
        await service.models.remove(name)
        return {"object": "list", "data": service.models.listing()}

    def check_health() -> None:
        if not engine.healthy():
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the engine does not work; restart the server")

    app.state.check_health = check_health  # Ray uses it too

    @app.get("/health", response_class=PlainTextResponse, responses=ERRORS)
    async def health() -> Response:
        """200 while the engine works."""
        check_health()
        return PlainTextResponse()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Figures for Prometheus."""
        engine.metrics.tasks(len(asyncio.all_tasks()))
        return Response(engine.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    _serve_page(app)
    return app


def _who(key: str, body: Shared) -> str:
    """The client for the fair scheduling of requests."""
    return f"{key}/{body.user or ''}"


def _serve_page(app: FastAPI) -> None:
    """The web page: plain files."""

    async def send(name: str) -> FileResponse:
        return FileResponse(PAGE / name, headers={"Cache-Control": "no-cache"})

    for file in filter(Path.is_file, PAGE.rglob("*")):
        name = file.relative_to(PAGE).as_posix()
        path = "/" if name == "index.html" else f"/{name}"
        app.add_api_route(path, partial(send, name), methods=["GET", "HEAD"], include_in_schema=False)
