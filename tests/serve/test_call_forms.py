"""Calls as Llama 3, Mistral, LFM2 and Gemma 4 write them."""

import json

import pytest

from medusa.serve.api.call_forms import FORMS
from medusa.serve.api.messages import Message
from medusa.serve.api.reasoning import Writing
from medusa.serve.api.texts import _plain
from medusa.serve.api.tools import Calls
from tests.serve.test_reasoning import TOOLS, read

F = '{"name": "f", "arguments": {}}'
FORM = {form.shown: Writing(form=form) for form in FORMS}
LFM = {"from": "USD", "a": {"x": True, "y": None}}
LLAMA, MISTRAL, LFM2, GEMMA = FORM.values()


@pytest.mark.parametrize("size", [None, 1, 5])
@pytest.mark.parametrize(
    ("writing", "text", "said", "called"),
    [
        (LLAMA, '{"name": "f", "parameters": {"a": 1}}', "", [{"a": 1}]),
        (LLAMA, f'<|python_tag|>{F}; {{"name": "f", "parameters": {{"b": "x"}}}}', "", [{}, {"b": "x"}]),
        (LLAMA, '{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
        (LLAMA, '{"a": 1} and text', '{"a": 1} and text', []),
        (LLAMA, 'Text, then {"name": "f", "parameters": {}}', 'Text, then {"name": "f", "parameters": {}}', []),
        (LLAMA, "<|python", "<|python", []),
        (MISTRAL, f'I look. [TOOL_CALLS][{{"name": "f", "arguments": {{"a": 1}}}}, {F}]', "I look.", [{"a": 1}, {}]),
        (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]x1[ARGS]{"a": 2}', "", [{"a": 1}, {"a": 2}]),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]{cut", "[TOOL_CALLS]f[ARGS]{cut", []),
        (
            LFM2,
            "<|tool_call_start|>[f(a=1), f(c=[1, None])]<|tool_call_end|>Done",
            "Done",
            [{"a": 1}, {"c": [1, None]}],
        ),
        (LFM2, '<|tool_call_start|>[{"name": "f", "arguments": {"a": 1}}]<|tool_call_end|>', "", [{"a": 1}]),
        (LFM2, "<|tool_call_start|>[f(1 +]<|tool_call_end|>", "<|tool_call_start|>[f(1 +]<|tool_call_end|>", []),
        (LFM2, "a <|tool", "a <|tool", []),
        (LFM2, "<|tool_call_start|>[f(from='USD', a={'x': true, 'y': null})]<|tool_call_end|>\n", "", [LFM]),
        (LFM2, "<|tool_call_start|>[f(1)]<|tool_call_end|>", "<|tool_call_start|>[f(1)]<|tool_call_end|>", []),
        (GEMMA, "<|tool_call>call:f{a:None}<tool_call|>", "", [{"a": None}]),
        (LLAMA, "<html> text", "<html> text", []),
        (GEMMA, '<|tool_call>call:f{a:1,b:<|"|>x, y:{z}<|"|>}<tool_call|>', "", [{"a": 1, "b": "x, y:{z}"}]),
        (GEMMA, "<|tool_call>call:f{c:[true,{k:null}]}<tool_call|>", "", [{"c": [True, {"k": None}]}]),
        (GEMMA, "<|tool_call>call:f{a:}<tool_call|>", "<|tool_call>call:f{a:}<tool_call|>", []),
    ],
)
def test_calls_of_other_families(writing, text, said, called, size):
    thoughts, told, calls = read(writing, text, size=size)
    assert (thoughts, told) == ("", said)
    assert [json.loads(arguments) for _, arguments in calls] == called
    if len(called) > 1:
        assert len(read(writing, text, calls=Calls(TOOLS, single=True), size=size)[2]) == 1
    assert read(writing, text, calls=Calls(), size=size) == ("", text, []), "without tools all is text"


def test_forms_are_found_in_templates_and_need_their_tags():
    for form in FORMS:
        writing = Writing.of(f"... {form.shown} ...")
        assert (writing.form, writing.tagged) == (form, False)
        assert (writing.needs_special_tokens(Calls(TOOLS)), writing.needs_special_tokens(Calls())) == (True, False)
    assert Writing.of("<tool_call>").form is None


def test_an_answer_of_llama_that_is_no_call_streams():
    reader = LLAMA.reader(Calls(TOOLS), "")
    assert [event.text for piece in ("<", "html>", " text") for event in reader.read(piece)] == ["<html>", " text"]


def test_ids_are_as_short_as_mistral_s_templates_want_them():
    call = {"id": "call_0123456789abcdef", "function": {"name": "f", "arguments": "{}"}}
    message = Message(role="assistant", tool_calls=[call])
    answer = Message(role="tool", content="4", tool_call_id=call["id"])
    assert (MISTRAL.short_ids, LLAMA.short_ids) == (True, False)
    assert _plain(message, True)["tool_calls"][0]["id"] == _plain(answer, True)["tool_call_id"] == "789abcdef"
    assert _plain(message)["tool_calls"][0]["id"] == _plain(answer)["tool_call_id"] == call["id"]
