"""Finds the conversation in a record, for all common names of keys.

- OpenAI: `messages` of {"role", "content"}; content is text or a list of {"type": "text", "text"} parts
- ShareGPT: `conversations` of {"from", "value"}; human, gpt and their like are renamed
- question and answer: `prompt` with `response` or `completion`; `instruction` (and `input`) with `output`

In a table every record has the keys of all records; a key with the value None counts as missing.
"""

import re
from collections.abc import Mapping
from typing import Any

CONVERSATIONS = ("messages", "conversations", "conversation")
PAIRS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"))
"""Keys of a question and its answer."""
ROLES = {
    "human": "user",
    "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "function": "tool", "observation": "tool",
}  # fmt: skip
"""Roles by ShareGPT's names; other names are not changed, and the chat template accepts or refuses them."""
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that control a terminal: all control characters except line ends and tabs."""
KNOWN = "{input_ids, loss_mask}, {messages}, {conversations}, {prompt, response}, {instruction, output} or {text}"


def present(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without keys whose value is None."""
    return {key: value for key, value in record.items() if value is not None}


def conversation(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The turns of a record as {"role", "content"}; other keys of a turn (tool calls, reasoning) are kept.

    Args:
        record: a JSON object or the row of a table; its `system` key, if it has one, becomes the first turn.

    Returns:
        The turns; None if the record has none of the known keys.

    Raises:
        ValueError: turns do not have this form.
    """
    record = present(record)
    turns = next((record[key] for key in CONVERSATIONS if key in record), None)
    if turns is None:
        turns = next((_pair(record, *keys) for keys in PAIRS if all(key in record for key in keys)), None)
    if turns is None:
        return None
    if not isinstance(turns, list):
        raise ValueError(f"conversation ({turns!r:.60}) is not a list; write one {{role, content}} per turn")
    found = [_turn(turn) for turn in turns]
    if record.get("system") and not any(turn["role"] == "system" for turn in found):
        found.insert(0, {"role": "system", "content": plain_text(record["system"])})
    return found


def questions(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The turns of a conversation whose answers may be missing; the question of a pair alone is valid too.

    Returns:
        The turns; None if the record has none of the known keys.

    Raises:
        ValueError: See ``conversation``.
    """
    return conversation(record) or conversation({"response": "", "output": "", **present(record)})


def _pair(record: Mapping[str, Any], question: str, answer: str) -> list[Any]:
    asked, said = record[question], record[answer]
    if question == "instruction" and record.get("input"):
        asked = f"{asked}\n\n{record['input']}"
    first = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    return first + (said if isinstance(said, list) else [{"role": "assistant", "content": said}])


def _turn(turn: Any) -> dict[str, Any]:
    if not isinstance(turn, Mapping):
        raise ValueError(f"turn ({turn!r:.60}) is not an object; write {{role, content}} or {{from, value}}")
    rest = present(turn)
    role = rest.pop("role", None) or rest.pop("from", None)
    if not isinstance(role, str):
        raise ValueError(f"turn ({turn!r:.60}) names no role; write {{role, content}} or {{from, value}}")
    content = rest.pop("content", None)
    content = rest.pop("value", "" if "tool_calls" in rest else None) if content is None else content
    return {"role": ROLES.get(role, role), "content": plain_text(content)} | rest


def visible(text: str) -> str:
    """A text that is safe to print: control characters are escaped as in a Python literal."""
    return UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)


def plain_text(content: Any) -> str:
    """The text of a message's content, which may have several parts.

    Raises:
        ValueError: there is no text, or no tokenizer can read it.
    """
    if isinstance(content, str):
        if not content.isascii() and re.search("[\ud800-\udfff]", content):
            raise ValueError(
                f"content ({content!r:.60}) holds half a character (\\ud800 to \\udfff); write both halves"
            )
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "".join(plain_text(part.get("text")) for part in content)
    raise ValueError(f"content ({content!r:.60}) is not text; give text, or a list of {{type: text, text}} parts")
