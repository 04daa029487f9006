"""Calls inside what a model says, whole and piece by piece."""

import json

import pytest

from medusa.serve.api.calls import CallReader
from medusa.serve.api.messages import Tool
from medusa.serve.api.reasoning import Writing
from medusa.serve.api.tools import Calls
from medusa.serve.reading.events import Argued, Called, Said
from tests.serve import test_reasoning as answer

TOOLS = [Tool(type="function", function={"name": "f"})]
TALKING = Calls(TOOLS)
ONE = '<tool_call>\n{"name": "f", "arguments": {"a": "}\\"<", "b": [{}]}}\n</tool_call>'


def read(text, calls=TALKING, size=None):
    """What is said, and names with arguments of calls."""
    return answer.read(Writing(), text, calls=calls, size=size)[1:]


@pytest.mark.parametrize("size", [None, 1, 3, 7])
@pytest.mark.parametrize(
    ("text", "said", "called"),
    [
        ("Hello", "Hello", []),
        ("Hello \n", "Hello \n", []),
        ("1 <tool 2 <", "1 <tool 2 <", []),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
        (
            'I look.\n<tool_call>{"name": "f", "arguments": "{}"}</tool_call>\n<tool_call>{"name": "g"}</tool_call>\n',
            "I look.",
            [("f", "{}"), ("g", "{}")],
        ),
        (f"{ONE}\n{ONE} done", " done", [("f", '{"a": "}\\"<", "b": [{}]}')] * 2),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ("<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
        ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
        ('<tool_call>{"name": "f", "arguments": {"a": </tool_call>!', "!", [("f", '{"a": ')]),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
    ],
)
def test_calls_are_found(text, said, called, size):
    assert read(text, size=size) == (said, called)


def test_arguments_are_told_as_they_come():
    reader = CallReader(TALKING)
    begun = reader.read('So:\n<tool_call>{"name": "f", "arguments": {"a"')
    assert [type(event) for event in begun] == [Said, Called, Argued] and begun[0].text == "So:"
    assert reader.read(": 1") == [Argued(": 1")] and reader.read("}") == [Argued("}")] and reader.read("}") == []


def test_one_call_counts_where_several_are_not_wanted():
    assert read(f"So: {ONE}{ONE} more", Calls(TOOLS, single=True))[0] == "So:"
    assert len(read(f"So: {ONE}{ONE} more", Calls(TOOLS, single=True))[1]) == 1


def test_without_tools_nothing_is_a_call_and_for_a_named_one_all_is():
    assert read(ONE, Calls()) == (ONE, [])
    assert read('<tool_call>{"na', Calls(TOOLS, True)) == ("", []), "it was cut off, and is no text"
    assert read('<tool_call>{"na', Calls(TOOLS, formed=True)) == ("", []), "neither a call nor of the format"
    assert read("<tool_c", Calls(TOOLS, True)) == ("", [])
    assert read("a <tool_c", Calls(TOOLS)) == ("a <tool_c", []), "without a call it may be text"
    assert read('{"a": 1}', Calls(TOOLS, True, "f"), size=2) == ("", [("f", '{"a": 1}')])


def test_calls_of_a_structure_are_those_that_are_read():
    tag = TALKING.structure(free=False)["tags"][0]
    assert read(tag["begin"] + json.dumps({"a": 1}) + tag["end"]) == ("", [("f", '{"a": 1}')])
