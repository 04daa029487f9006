"""The output items of a response, which grow by text and tool calls, and the events of a stream."""

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4

from medusa.serve.reading.events import Argued, Called, Event, Reasoned, Said

Told = dict[str, Any]
"""An event of a stream, without its number."""


class OutputItems:
    """The items of a response.

    Attributes:
        items: Messages and calls in order, in the format for clients; the last one may be open.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False
        self._logprobs: list[dict[str, Any]] = []

    def grow(self, events: Sequence[Event], logprobs: Sequence[dict[str, Any]] | None = None) -> Iterator[Told]:
        """Stream events for new text and calls; read each before the next, because items change.

        Args:
            events: New text and calls.
            logprobs: Log-probabilities of their tokens, which are sent with the text.
        """
        kinds = {type(event) for event in events}
        if Reasoned not in kinds or Said in kinds:  # else they are those of the reasoning
            self._logprobs += logprobs or ()
        for event in events:
            match event:
                case Said(text):
                    yield from self._say(text)
                case Reasoned(text):
                    yield from self._reason(text)
                case Called():
                    yield from self.close("completed")
                    yield self._add(_call(event))
                case Argued(text):
                    self.items[-1]["arguments"] += text
                    yield self._told("response.function_call_arguments.delta", delta=text)

    def close(self, status: str) -> Iterator[Told]:
        """Close the open item, which is complete or cut off."""
        if not self._open:
            return
        item, self._open = self.items[-1], False
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            yield self._told("response.output_text.done", 0, text=part["text"], logprobs=part["logprobs"])
            yield self._told("response.content_part.done", 0, part=part)
        elif item["type"] == "reasoning":
            yield self._told("response.reasoning_text.done", 0, text=item["content"][0]["text"])
        else:
            told = {"name": item["name"], "arguments": item["arguments"]}
            yield self._told("response.function_call_arguments.done", **told)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def end(self, status: str) -> Iterator[Told]:
        """End the answer, complete or cut off; it has at least one message, perhaps an empty one."""
        if all(item["type"] == "reasoning" for item in self.items):
            yield from self.close(status)
            yield from self._say("")
        yield from self.close(status)

    def _say(self, text: str) -> Iterator[Told]:
        if self._open and self.items[-1]["type"] != "message":
            yield from self.close("completed")
        if not self._open:
            content: list[dict[str, Any]] = []
            message = {"type": "message", "id": _id("msg"), "status": "in_progress", "role": "assistant"}
            yield self._add({**message, "content": content})
            content.append({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
            yield self._told("response.content_part.added", 0, part=content[0])
        part, logprobs = self.items[-1]["content"][0], self._logprobs
        self._logprobs = []
        part["text"] += text
        part["logprobs"] += logprobs
        if text:
            yield self._told("response.output_text.delta", 0, delta=text, logprobs=logprobs)

    def _reason(self, text: str) -> Iterator[Told]:
        if not self._open or self.items[-1]["type"] != "reasoning":
            yield from self.close("completed")
            item = {"type": "reasoning", "id": _id("rs"), "status": "in_progress", "summary": []}
            yield self._add({**item, "content": [{"type": "reasoning_text", "text": ""}]})
        self.items[-1]["content"][0]["text"] += text
        yield self._told("response.reasoning_text.delta", 0, delta=text)

    def _add(self, item: dict[str, Any]) -> Told:
        self.items.append(item)
        self._open = True
        return {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": item}

    def _told(self, kind: str, content: int | None = None, **more: Any) -> Told:
        """An event about the last item, or its content."""
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": kind, **place, **({} if content is None else {"content_index": content}), **more}


def _call(called: Called) -> dict[str, Any]:
    head = {"type": "function_call", "id": _id("fc"), "status": "in_progress", "call_id": called.id}
    return {**head, "name": called.name, "arguments": ""}


def _id(kind: str) -> str:
    return f"{kind}_{uuid4().hex}"
