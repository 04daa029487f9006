"""Tools: what the chat template tells the model of them, and what its answer may be.

A call is a JSON object between ``<tool_call>`` tags (Hermes, Qwen and many others). Where calls are required, or follow
the schemas of their tools, a grammar sees to it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from medusa.serve.api.errors import refused
from medusa.serve.api.messages import Tool
from medusa.serve.api.protocol import ChatRequest
from medusa.serve.grammar import MOST_SPACES

BEGIN, END = "<tool_call>", "</tool_call>"


class Calls(NamedTuple):
    """How a request may call.

    Attributes:
        tools: That the model knows.
        required: It has to.
        name: The one function whose arguments the answer is; empty = calls name it.
        single: The first call of an answer ends it.
    """

    tools: Sequence[Tool] = ()
    required: bool = False
    name: str = ""
    single: bool = False

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Of the arguments of each tool."""
        return [parameters(tool) for tool in self.tools]

    @property
    def strict(self) -> bool:
        """Whether arguments of a tool have to follow its schema."""
        return any(tool.function.strict for tool in self.tools)

    def structure(self, free: bool) -> dict[str, Any]:
        """Calls in XGrammar's language of structural tags, as templates teach them.

        Args:
            free: Any text may stand around them, and there may be none.
        """
        called = {"tags": [_tag(tool) for tool in self.tools], "stop_after_first": self.single}
        if free:
            return {"type": "triggered_tags", "triggers": [BEGIN], **called}
        return {"type": "tags_with_separator", "separator": "\n", "at_least_one": True, **called}


def calls_of(body: ChatRequest) -> Calls:
    """What a request wants to be called.

    Raises:
        ApiError: Its fields contradict each other.
    """
    choice, tools = body.tool_choice, body.tools
    if not tools:
        if choice not in (None, "none"):
            named = choice.function.name if isinstance(choice, Tool) else choice
            raise refused(f"tool_choice ({named}) needs tools; give them, or leave it out", "tool_choice")
        return Calls()
    if choice == "none":
        return Calls()
    single = body.parallel_tool_calls is False
    if isinstance(choice, Tool):
        if choice.function.name not in [tool.function.name for tool in tools]:
            raise refused(f"tool_choice ({choice.function.name}) is none of the tools; name one of them", "tool_choice")
        return Calls(tools, True, choice.function.name)
    return Calls(tools, choice == "required", single=single)


def parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a tool's arguments."""
    return tool.function.parameters or {"type": "object", "properties": {}}


def _tag(tool: Tool) -> dict[str, Any]:
    arguments = {"type": "json_schema", "json_schema": parameters(tool), "max_whitespace_cnt": MOST_SPACES}
    begin = f'{BEGIN}\n{{"name": "{tool.function.name}", "arguments": '
    return {"type": "tag", "begin": begin, "content": arguments, "end": f"}}\n{END}"}
