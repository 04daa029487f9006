"""Readers of answers: a stream in any pieces says what the whole answer says."""

import random

from medusa.serve.api.call_forms import FORMS
from medusa.serve.api.reasoning import Writing
from medusa.serve.api.tools import Calls
from medusa.serve.reading import KNOWN
from medusa.serve.reading.events import joined
from tests.serve.test_reasoning import TOOLS

PARTS = [
    "<think>", "</think>", "<thi", "</", "\n", "\n\n", " ", "a", "é", "😀", "{", "}", "[", "]", '"', "\\", ";", "\t",
    "\x00",
    '{"name": "f", "arguments": {"a": 1}}', '{"name":"f","arguments":{"b":"</tool_call> <think>"}}', "<tool_call>",
    "</tool_call>", "<tool_", "<function=f>", "</function>", "<parameter=a>", "</parameter>", "1", "f",
    "\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>", "<|channel|>", "<|message|>", "analysis", "final", "commentary",
    " to=functions.f", " <|constrain|>json", "<|end|>", "<|start|>", "assistant", "<|return|>", "<|call|>", "<|",
    "<|channel>thought", "<channel|>", "<|tool_call>", "<tool_call|>", "call:f{a:1}", 'call:f{b:<|"|>x<|"|>}',
    "[THINK]", "[/THINK]",
    "[TOOL_CALLS]", "[ARGS]", '[{"name":"f","arguments":{}}]', "f[ARGS]{}", "[TOOL", "<|tool_call_start|>",
    "<|tool_call_end|>", "[f(a=1)]", "<|python_tag|>", '{"name":"f","parameters":{}}',
]  # fmt: skip
WRITINGS = [
    Writing(), Writing(xml=True), Writing(harmony=True), *map(Writing, KNOWN),
    *(Writing(tags, form=form) for form in FORMS for tags in (None, *KNOWN)),
]  # fmt: skip
RULES = [
    Calls(), Calls(TOOLS), Calls(TOOLS, single=True), Calls(TOOLS, required=True), Calls(TOOLS, True, "f"),
    Calls(TOOLS, formed=True),
]  # fmt: skip


def said(reader, pieces):
    """The events of an answer in these pieces, without the random ids of calls."""
    events = [event for piece in pieces for event in reader.read(piece)] + reader.read("", last=True)
    return [(type(event).__name__, event[-1]) for event in joined(events)]


def test_streams_say_what_whole_answers_say():
    chance = random.Random(0)
    for _ in range(1000):
        text = "".join(chance.choices(PARTS, k=chance.randint(1, 14)))
        writing, calls = chance.choice(WRITINGS), chance.choice(RULES)
        prompt = chance.choice(
            ["", writing.tags.begin, writing.tags.begin + writing.tags.end] if writing.tags else [""]
        )
        cuts = sorted(chance.sample(range(len(text) + 1), min(len(text), 4)))
        in_pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        whole, *streams = (said(writing.reader(calls, prompt), how) for how in ([text], list(text), in_pieces))
        assert streams == [whole, whole], (writing, calls, prompt, text)
