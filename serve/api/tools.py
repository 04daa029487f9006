"""Tools: their description in the chat template, and the format of answers that call them.

A call is a JSON object between ``<tool_call>`` tags (Hermes, Qwen and many others). If calls are required, or must
follow the schemas of their tools, a grammar enforces it.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from medusa.serve.api.errors import refused
from medusa.serve.api.messages import AllowedChoice, Tool
from medusa.serve.api.protocol import ChatRequest
from medusa.serve.grammar import MOST_SPACES

BEGIN, END = "<tool_call>", "</tool_call>"
SURROGATE = re.compile("[\ud800-\udfff]")
"""What JSON can escape and UTF-8 cannot hold."""
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, SyntaxError, RecursionError, MemoryError)
"""What reading a text raises that is no call."""


class Calls(NamedTuple):
    """The rules for tool calls of a request.

    Attributes:
        tools: The tools in the chat template.
        required: Whether the answer must be a call.
        name: The function whose arguments are the whole answer; empty = calls name their function.
        single: Whether the first call ends the answer.
        formed: Whether an answer that is no call has a format.
    """

    tools: Sequence[Tool] = ()
    required: bool = False
    name: str = ""
    single: bool = False
    formed: bool = False

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of the arguments of each tool."""
        return [parameters(tool) for tool in self.tools]

    @property
    def strict(self) -> bool:
        """Whether arguments of a tool must follow its schema."""
        return any(tool.function.strict for tool in self.tools)

    def structure(self, free: bool, xml: bool = False) -> dict[str, Any]:
        """Calls in XGrammar's language of structural tags, in the format of templates.

        Args:
            free: Whether other text is allowed, also without any call.
            xml: Whether a call has a tag for each argument.
        """
        called = {"tags": [_tag(tool, xml) for tool in self.tools], "stop_after_first": self.single}
        if free:
            return {"type": "triggered_tags", "triggers": [BEGIN], **called}
        return {"type": "tags_with_separator", "separator": "\n", "at_least_one": True, **called}


def calls_of(body: ChatRequest) -> Calls:
    """The rules for tool calls of a request body.

    Raises:
        ApiError: Its fields contradict each other.
    """
    choice, tools = body.tool_choice, body.tools
    if not tools:
        if choice is not None and choice != "none":
            named = choice if isinstance(choice, str) else choice.type
            raise refused(f"tool_choice ({named}) needs tools; give them, or leave it out", "tool_choice")
        return Calls()
    if choice == "none":
        return Calls()
    single = body.parallel_tool_calls is False
    if isinstance(choice, Tool):
        _check_known([choice], tools)
        return Calls(tools, True, choice.function.name)
    if isinstance(choice, AllowedChoice):
        _check_known(choice.allowed_tools.tools, tools)
        names = {tool.function.name for tool in choice.allowed_tools.tools}
        # The template describes these only: a model that answers freely cannot call what it does not know.
        tools, choice = [tool for tool in tools if tool.function.name in names], choice.allowed_tools.mode
    formed = body.structured_outputs is not None or (
        body.response_format is not None and body.response_format.type != "text"
    )
    return Calls(tools, choice == "required", single=single, formed=formed)


def parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    return tool.function.parameters or {"type": "object", "properties": {}}


def _check_known(chosen: Sequence[Tool], tools: Sequence[Tool]) -> None:
    known = [tool.function.name for tool in tools]
    for tool in chosen:
        if (name := tool.function.name) not in known:
            raise refused(f"tool_choice ({name}) is none of the tools; name one of them", "tool_choice")


def as_json(arguments: Any) -> str:
    """Arguments of a call as JSON.

    Raises:
        ValueError: They are no JSON, as NaN.
    """
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not SURROGATE.search(text) else json.dumps(arguments)


def named_call(found: Any) -> tuple[str, str]:
    """Name and JSON arguments of a call in JSON; some models call arguments parameters.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: It is no call.
    """
    arguments = found.get("arguments", found.get("parameters", {}))
    return str(found["name"]), SURROGATE.sub("?", arguments) if isinstance(arguments, str) else as_json(arguments)


def json_form(schema: dict[str, Any]) -> dict[str, Any]:
    """JSON that follows a schema, in XGrammar's language of structural tags."""
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MOST_SPACES}


def _tag(tool: Tool, xml: bool) -> dict[str, Any]:
    arguments = json_form(parameters(tool))
    if xml:
        begin = f"{BEGIN}\n<function={tool.function.name}>\n"
        content = arguments | {"style": "qwen_xml"}
        return {"type": "tag", "begin": begin, "content": content, "end": f"\n</function>\n{END}"}
    begin = f'{BEGIN}\n{{"name": "{tool.function.name}", "arguments": '
    return {"type": "tag", "begin": begin, "content": arguments, "end": f"}}\n{END}"}
