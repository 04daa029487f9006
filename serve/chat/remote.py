"""A model behind a server, with the interface that the chat uses: our server, or another with vLLM's /tokenize."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import httpx

from medusa.engine.output import Output, Piece
from medusa.sampling import SPECULATION
from medusa.serve.chat.conversation import Message

TIMEOUT = httpx.Timeout(600.0, connect=10.0)
ENDS = {"stop": "eos", "length": "length"}


class RemoteBase(NamedTuple):
    """The attributes of a base that the chat uses."""

    name: str
    context_length: int


class RemoteModel:
    """A model of an OpenAI-compatible server that also has /tokenize.

    Args:
        url: Address of the API, including its version: "http://localhost:8000/v1".
        model: The server's name of the model; empty = its first model.
        key: API key, sent as a bearer token; empty = none.

    Raises:
        OSError: The server cannot be reached.
        ValueError: The server refuses, or does not have this model.
    """

    def __init__(self, url: str, model: str = "", key: str = "") -> None:
        self._url = url.rstrip("/")
        self._http = httpx.Client(headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=TIMEOUT)
        listed = self._json("GET", f"{self._url}/models", "data")
        known = {entry["id"]: entry for entry in listed}
        name = model or (listed[0]["id"] if listed else "")
        if name not in known:
            raise ValueError(f"model ({name}) is not served at {url}; choose one of: {', '.join(known)}")
        self.ours = known[name].get("owned_by") == "medusa"
        self.base = RemoteBase(name, int(known[name].get("max_model_len") or 4096))

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, rendered with the server's chat template.

        Raises:
            OSError: The server does not answer.
            ValueError: The server refuses.
        """
        body = {"model": self.base.name, "messages": list(messages)}
        tokens: list[int] = self._json("POST", f"{self._url.removesuffix('/v1')}/tokenize", "tokens", body)
        return tokens

    def stream(self, prompt: list[int], prefix: Any = None, tree: Any = None, **settings: Any) -> "RemoteStream":
        """A completion as it grows, like ``MedusaModel.stream``; ``prefix`` is ignored, because the server caches."""
        drafting = {name: settings.pop(name) for name in SPECULATION & settings.keys()}
        asked = {name: value for name, value in drafting.items() if value is not None}
        if asked and not self.ours:
            raise ValueError(
                "this server does not choose how a request is drafted; set acceptance, nodes, drafter to auto"
            )
        body = {
            "model": self.base.name,
            "prompt": prompt,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "max_tokens": min(settings.pop("max_new_tokens"), self.base.context_length - len(prompt)),
            **settings,
            **({"speculation": {"trace": True, "metrics": True, **asked}} if self.ours else {}),
        }
        return RemoteStream(self._http, f"{self._url}/completions", body)

    def _json(self, method: str, url: str, field: str, body: Any = None) -> Any:
        """A field of the server's answer."""
        try:
            response = self._http.request(method, url, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise OSError(
                f"endpoint ({url}) does not answer: {error}; start the server, or correct the address"
            ) from error
        if response.status_code != httpx.codes.NOT_FOUND:
            _check(response.status_code, response.text)
            with suppress(ValueError, KeyError, TypeError):
                return response.json()[field]
        raise ValueError(f"endpoint ({url}) has no {field}; give one of ours or of vLLM, as http://localhost:8000/v1")


class RemoteStream:
    """Iterates over pieces of text; ``output`` holds the completion so far. Stopping early ends the request."""

    def __init__(self, http: httpx.Client, url: str, body: dict[str, Any]) -> None:
        self._http, self._url, self._body = http, url, body
        self.output = Output(len(body["prompt"]))

    def __iter__(self) -> Iterator[Piece]:
        """Pieces of text."""
        output, began = self.output, 0.0
        try:
            with self._http.stream("POST", self._url, json=self._body) as response:
                if response.status_code != httpx.codes.OK:
                    _check(response.status_code, response.read().decode())
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise OSError(chunk["error"]["message"])
                    began = began or time.perf_counter()
                    for text, drafted in self._read(chunk):
                        output.text += text
                        yield Piece(text, drafted)
                    output.seconds = time.perf_counter() - began
        except httpx.HTTPError as error:
            raise OSError(f"endpoint ({self._url}) broke off; ask again once the server runs") from error

    def _read(self, chunk: dict[str, Any]) -> Iterator[tuple[str, bool]]:
        """Texts of a chunk, and whether they were drafted; each chunk counts tokens, and the last one steps too."""
        output = self.output
        for choice in chunk["choices"]:
            if reason := choice.get("finish_reason"):
                output.finish_reason = ENDS.get(reason, "stop")  # type: ignore[assignment]
            yield from choice.get("pieces") or ([(choice["text"], False)] if choice["text"] else [])
        if usage := chunk.get("usage"):
            grown, output.tokens = usage["completion_tokens"] - len(output.tokens), [0] * usage["completion_tokens"]
            output.steps += min(grown, 1) if "speculation" in self._body else grown
            output.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if metrics := chunk.get("metrics"):
            output.steps = metrics["speculative_decoding"]["num_spec_steps"]


def _check(status: int, text: str) -> None:
    """Raise an error with the server's message if the status is not a success."""
    if status == httpx.codes.OK:
        return
    try:
        error = json.loads(text)["error"]
        message = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        message = text[:200]
    raise ValueError(f"{status}: {message}")
