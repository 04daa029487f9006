"""Calls inside what a model says."""

import pytest

from serve.api.protocol import ChatRequest
from serve.api.tools import Calls, calls_of, held

TALKING = Calls(tools=[{}])


@pytest.mark.parametrize(
    ("text", "said", "called"),
    [
        ("Hello", "Hello", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
        (
            'I look.\n<tool_call>{"name": "f", "arguments": "{}"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
            "I look.",
            [("f", "{}"), ("g", "{}")],
        ),
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
        ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    ],
)
def test_calls_are_found(text, said, called):
    content, calls = TALKING.read(text)
    assert content == said
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == called


def test_one_call_counts_where_several_are_not_wanted():
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = ChatRequest(messages=[{"role": "user", "content": "hi"}], tools=tools, parallel_tool_calls=False)
    content, calls = calls_of(asked).read(
        'So: <tool_call>{"name": "f"}</tool_call><tool_call>{"name": "g"}</tool_call>'
    )
    assert (content, [call["function"]["name"] for call in calls]) == ("So:", ["f"])


def test_what_may_become_a_call_is_held_back():
    assert held("Hello <tool") == 5
    assert held("a < b") == 0
    assert held("x<") == 1


def test_without_tools_nothing_is_a_call():
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert Calls().read(text) == (text, [])
