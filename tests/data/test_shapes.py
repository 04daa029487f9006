from typing import Any

import pytest

from medusa.data.shapes import conversation

ASKED, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}
SYSTEM = {"role": "system", "content": "be kind"}
PART = {"type": "text"}
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"messages": [SYSTEM, ASKED, SAID]}, [SYSTEM, ASKED, SAID]),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]},
            [ASKED],
        ),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "there"}]}, [ASKED, SAID]),
        ({"conversations": [{"from": "user", "value": "hi"}, {"from": "chatgpt", "value": "there"}]}, [ASKED, SAID]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "bot", "value": "there"}]}, [ASKED, SAID]),
        ({"conversations": [ASKED, SAID], "system": "be kind"}, [SYSTEM, ASKED, SAID]),
        ({"messages": [SYSTEM, ASKED], "system": "not twice"}, [SYSTEM, ASKED]),
        ({"prompt": "hi", "response": "there"}, [ASKED, SAID]),
        ({"prompt": "hi", "completion": "there"}, [ASKED, SAID]),
        ({"prompt": [SYSTEM, ASKED], "completion": [SAID]}, [SYSTEM, ASKED, SAID]),
        ({"instruction": "hi", "output": "there", "input": ""}, [ASKED, SAID]),
        ({"instruction": "add", "input": "1 2", "output": "there"}, [{"role": "user", "content": "add\n\n1 2"}, SAID]),
        ({"prompt": "id of a set that has both", "messages": [ASKED, SAID]}, [ASKED, SAID]),
        ({"messages": None, "conversations": None, "prompt": "hi", "response": "there", "text": None}, [ASKED, SAID]),
        ({"messages": [{**ASKED, "from": None, "value": None, "tool_calls": None}]}, [ASKED]),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            [{"role": "assistant", "content": "", "tool_calls": [CALL]}],
        ),
        ({"text": "a document", "messages": None}, None),
        ({"prompt": "no answer"}, None),
    ],
)
def test_every_shape_becomes_turns(record: dict[str, Any], turns: list[dict[str, Any]] | None) -> None:
    assert conversation(record) == turns


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": "hi"}, r"conversation \('hi'\) is not a list"),
        ({"messages": ["hi"]}, r"turn \('hi'\) is not an object"),
        ({"messages": [{"content": "hi"}]}, r"turn \(\{'content': 'hi'\}\) names no role"),
        ({"messages": [{"role": "user"}]}, r"content \(None\) is not text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"content .*image.* is not text"),
        ({"prompt": 3, "response": "x"}, r"content \(3\) is not text"),
        ({"prompt": "a\ud800", "response": "x"}, r"content \('a\\ud800'\) holds half a character"),
    ],
)
def test_broken_turns_are_shown(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        conversation(record)
