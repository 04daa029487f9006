"""Tools: what the chat template tells the model of them, and what the model makes of it.

A call is a JSON object between ``<tool_call>`` tags (Hermes, Qwen and many others). Where a call is required, a grammar
makes the whole answer one.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import uuid4

from serve.api.errors import refused
from serve.api.protocol import ChatRequest, Tool

BEGIN, END = "<tool_call>", "</tool_call>"


class Calls(NamedTuple):
    """How calls are found in an answer.

    Attributes:
        tools: As the template gets them; None = it gets none.
        schema: What the whole answer must be; None = the model may also just talk.
        name: The one function whose arguments the answer is; empty = the answer names it.
        single: Only the first call of an answer counts.
    """

    tools: list[dict[str, Any]] | None = None
    schema: dict[str, Any] | None = None
    name: str = ""
    single: bool = False

    @property
    def wanted(self) -> bool:
        """Whether answers may hold calls."""
        return self.tools is not None

    def read(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """What is said and what is called in an answer; a call that is no JSON object stays text."""
        if not self.wanted:
            return text, []
        if self.name:
            return "", [_call(self.name, text)]
        if self.schema is not None:
            found = _parsed(text)
            return ("", [found]) if found else (text, [])
        said, _, rest = text.partition(BEGIN)
        calls = []
        while rest:
            inside, _, rest = rest.partition(END)
            found = _parsed(inside)
            if found is None:
                return text, []
            calls.append(found)
            _, _, rest = rest.partition(BEGIN)
            if self.single:
                break
        return (said.strip() if calls else text), calls


def calls_of(body: ChatRequest) -> Calls:
    """What a request wants to be called.

    Raises:
        ApiError: Its fields contradict each other.
    """
    choice, tools = body.tool_choice, body.tools
    if not tools:
        if choice not in (None, "none", "auto"):
            raise refused(f"tool_choice ({choice}) needs tools; give them, or leave it out", "tool_choice")
        return Calls()
    if choice == "none":
        return Calls()
    described = [tool.model_dump(exclude_none=True) for tool in tools]
    if choice not in (None, "auto") and body.response_format is not None:
        raise refused("response_format does not go with a tool that must be called; leave one out", "response_format")
    if isinstance(choice, Tool):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            raise refused(f"tool_choice ({choice.function.name}) is none of the tools; name one of them", "tool_choice")
        return Calls(described, _parameters(named[0]), named[0].function.name)
    if choice == "required":
        return Calls(described, {"anyOf": [_call_schema(tool) for tool in tools]})
    return Calls(described, single=body.parallel_tool_calls is False)


def held(text: str) -> int:
    """Characters at the end of a text that may be the beginning of a call."""
    return max((size for size in range(1, len(BEGIN)) if text.endswith(BEGIN[:size])), default=0)


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}


def _call_schema(tool: Tool) -> dict[str, Any]:
    properties = {"name": {"const": tool.function.name}, "arguments": _parameters(tool)}
    return {"type": "object", "properties": properties, "required": ["name", "arguments"]}


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
        name, arguments = found["name"], found.get("arguments", found.get("parameters", {}))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return _call(str(name), arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _call(name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": {"name": name, "arguments": arguments}}


def numbered(calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calls as streams tell them."""
    return [{"index": index, **call} for index, call in enumerate(calls)]
