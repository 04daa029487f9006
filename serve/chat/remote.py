"""A model behind a server, as the chat uses a model: ours, or another with vLLM's /tokenize."""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import httpx

from medusa.engine.output import Output, Piece
from serve.chat.conversation import Message

TIMEOUT = httpx.Timeout(600.0, connect=10.0)
DRAFTING = ("acceptance", "nodes", "drafter")
"""Settings that only our own server knows."""
ENDS = {"stop": "eos", "length": "length"}


class RemoteBase(NamedTuple):
    """What the chat asks of a base."""

    name: str
    context_length: int


class RemoteModel:
    """A model of an OpenAI-compatible server that also has /tokenize.

    Args:
        url: Of the API, up to its version: "http://localhost:8000/v1".
        model: As the server names it; empty = its first.
        key: Sent as a bearer token; empty = none.

    Raises:
        OSError: The server cannot be reached.
        ValueError: It refuses, or does not have such a model.
    """

    def __init__(self, url: str, model: str = "", key: str = "") -> None:
        self._url = url.rstrip("/")
        self._http = httpx.Client(headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=TIMEOUT)
        listed = self._json("GET", f"{self._url}/models")["data"]
        known = {entry["id"]: entry for entry in listed}
        name = model or (listed[0]["id"] if listed else "")
        if name not in known:
            raise ValueError(f"model ({name}) is not served at {url}; choose one of: {', '.join(known)}")
        self.ours = known[name].get("owned_by") == "medusa"
        self.base = RemoteBase(name, int(known[name].get("max_model_len") or 4096))

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, as the server's chat template renders it.

        Raises:
            OSError: The server does not answer.
            ValueError: It refuses.
        """
        body = {"model": self.base.name, "messages": list(messages)}
        tokens: list[int] = self._json("POST", f"{self._url.removesuffix('/v1')}/tokenize", body)["tokens"]
        return tokens

    def stream(self, prompt: list[int], **settings: Any) -> "RemoteStream":
        """A completion as it grows; see ``MedusaModel.stream``. What keeps prefixes is the server's affair."""
        if settings.pop("tree", None) is not None:
            raise ValueError("a static tree is not sent to a server; leave --tree out")
        settings.pop("prefix", None)
        drafting = {name: settings.pop(name, None) for name in DRAFTING}
        body = {
            "model": self.base.name,
            "prompt": prompt,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": min(settings.pop("max_new_tokens"), self.base.context_length - len(prompt)),
            **settings,
        }
        if self.ours:
            asked = {name: value for name, value in drafting.items() if value is not None}
            body["speculation"] = {"trace": True, "metrics": True, **asked}
        elif any(value is not None for value in drafting.values()):
            raise ValueError(
                "this server does not choose how a request is drafted; set acceptance, nodes, drafter to auto"
            )
        return RemoteStream(self._http, f"{self._url}/completions", body)

    def _json(self, method: str, url: str, body: Any = None) -> Any:
        try:
            response = self._http.request(method, url, json=body)
        except httpx.HTTPError as error:
            raise OSError(
                f"endpoint ({url}) does not answer: {error}; start the server, or correct the address"
            ) from error
        _check(response.status_code, response.text)
        return response.json()


class RemoteStream:
    """Iterate over its pieces; ``output`` holds what there is at any time. Stopping early ends the request."""

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
                    self._read(chunk)
                    for choice in chunk["choices"]:
                        yield from self._pieces(choice)
                    output.seconds = time.perf_counter() - began
        except httpx.HTTPError as error:
            raise OSError(f"endpoint ({self._url}) broke off: {error}; ask again") from error

    def _pieces(self, choice: dict[str, Any]) -> Iterator[Piece]:
        output = self.output
        reason = choice.get("finish_reason")
        if reason is not None:
            output.finish_reason = ENDS.get(reason, "stop")  # type: ignore[assignment]
        for text, drafted in choice.get("pieces") or ([[choice["text"], False]] if choice["text"] else []):
            output.text += text
            yield Piece(text, drafted)

    def _read(self, chunk: dict[str, Any]) -> None:
        """Numbers that come with the last chunk."""
        output, usage = self.output, chunk.get("usage")
        if usage:
            output.tokens = [0] * usage["completion_tokens"]
            output.steps = usage["completion_tokens"]
            output.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if chunk.get("metrics"):
            output.steps = chunk["metrics"]["speculative_decoding"]["num_spec_steps"]


def _check(status: int, text: str) -> None:
    """Refuse what is no answer, in the server's words."""
    if status == httpx.codes.OK:
        return
    try:
        error = json.loads(text)["error"]
        message = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, TypeError):
        message = text[:200]
    raise ValueError(f"{status}: {message}")
