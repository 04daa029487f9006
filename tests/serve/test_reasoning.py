"""Reasoning before an answer, and calls in other formats than ``<tool_call>`` with JSON."""

import json
import time

import pytest

from medusa.serve.api import reasoning
from medusa.serve.api.call_forms import FORMS
from medusa.serve.api.messages import Message, Tool
from medusa.serve.api.output_items import OutputItems
from medusa.serve.api.reasoning import Writing
from medusa.serve.api.texts import _plain
from medusa.serve.api.tools import Calls
from medusa.serve.reading import KNOWN
from medusa.serve.reading.events import Argued, Called, Reasoned, Said
from tests.serve.live import serving

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "array"}}}
TOOLS = [Tool(type="function", function={"name": "f", "parameters": SCHEMA})]
THINKS, HARMONY = Writing(KNOWN[0]), Writing(harmony=True)
TO_F = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
MESSAGES = "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
SAY = "{% if tools %}T{% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"


def read(writing, text, prompt="", calls=None, size=None):
    """Reasoning, text and calls of an answer, in pieces of a size, or at once."""
    reader, events = writing.reader(calls or Calls(TOOLS), prompt), []
    for begin in range(0, len(text), size or len(text)):
        events += reader.read(text[begin : begin + (size or len(text))])
    events += reader.read("", last=True)
    thoughts, said, called = "", "", []
    for event in events:
        match event:
            case Reasoned(text):
                thoughts += text
            case Said(text):
                assert text, "nothing is told as nothing"
                said += text
            case Called():
                called.append([event.name, ""])
            case Argued(text):
                called[-1][1] += text
    assert reader.called == bool(called)
    return thoughts, said, [tuple(call) for call in called]


@pytest.mark.parametrize("size", [None, 1, 4])
@pytest.mark.parametrize(
    ("prompt", "text", "thoughts", "said", "called"),
    [
        ("", "Hello", "", "Hello", []),
        ("", "<think>\nHm, 1 < 2.\n\n</think>\n\nYes. ", "Hm, 1 < 2.", "Yes. ", []),
        ("", "\n<think></think>Yes", "", "Yes", []),
        ("", "<thin", "", "<thin", []),
        ("", "<think>cut </thi", "cut </thi", "", []),
        ("... <think>\n", "Hm\n</think>\n\nYes", "Hm", "Yes", []),
        ("... <think>", "\nHm", "Hm", "", []),
        ("<think>\n\n</think>\n\n", "Yes <think>", "", "Yes <think>", []),
        ("<think>\n", 'x</think>\n<tool_call>{"name": "f"}</tool_call>', "x", "", [("f", "{}")]),
    ],
)
def test_reasoning_stands_between_tags(prompt, text, thoughts, said, called, size):
    assert read(THINKS, text, prompt, size=size) == (thoughts, said, called)


@pytest.mark.parametrize("size", [None, 1, 4])
def test_other_models_have_other_tags(size):
    for tags in KNOWN:
        writing = Writing(tags)
        assert read(writing, f"{tags.begin}\nHm\n{tags.end}Yes", size=size) == ("Hm", "Yes", [])
        assert read(writing, f"Hm{tags.end}Yes", f"x{tags.begin}\n", size=size) == ("Hm", "Yes", [])


@pytest.mark.parametrize("size", [None, 1, 5])
@pytest.mark.parametrize(
    ("text", "thoughts", "said", "called"),
    [
        ("Hello", "", "Hello", []),
        ("<|channel|>final<|message|>Hello", "", "Hello", []),
        (
            "<|channel|>analysis<|message|>Hm <|x<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
            "Hm <|x",
            "Yes",
            [],
        ),
        (
            f'{MESSAGES}{TO_F}{{"a": 1}}<|call|>',
            "Hm",
            "I look.",
            [("f", '{"a": 1}')],
        ),
        ("<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}", "", "", [("f", "{}")]),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "", "", [("f", "{}")]),
        ("to be, or", "", "to be, or", []),
        (
            "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>Yes",
            "",
            "I look.\n\nYes",
            [],
        ),
        ("<|channel|>analysis<|message|>cut <|en", "cut <|en", "", []),
        ("<|channel|>anal", "", "", []),
    ],
)
def test_harmony_has_messages_on_channels(text, thoughts, said, called, size):
    if text.startswith("<|start|>"):  # the prompt has begun the message
        text = f"<|channel|>analysis<|message|><|end|>{text}"
    assert read(HARMONY, text, size=size) == (thoughts, said, called)


def test_one_call_of_harmony_counts_where_several_are_not_wanted():
    call = '<|channel|>commentary to=functions.f<|message|>{"a": 1}<|call|><|start|>assistant'
    assert len(read(HARMONY, call * 2)[2]) == 2
    assert len(read(HARMONY, call * 2, calls=Calls(TOOLS, single=True))[2]) == 1
    assert read(HARMONY, call, calls=Calls()) == ('{"a": 1}', "", []), "without tools it is no call"


CB = {"b": "2", "c": []}


@pytest.mark.parametrize("size", [None, 1, 5])
@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (
            "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>",
            {"a": 1, "b": "2"},
        ),
        ("<function=f>\n<parameter=c>\n[1, {}]\n</parameter>\n</function>", {"c": [1, {}]}),
        (
            "<function=f>\n<parameter=a>\nno number\n</parameter>\n<parameter=d>\n7\n</parameter>",
            {"a": "no number", "d": "7"},
        ),
        ("<function=f>\n<parameter=b>\ntwo\nlines\n</parameter>\n</function>\n", {"b": "two\nlines"}),
        ("<function=f>\n</function>", {}),
        (
            "f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>",
            {"a": 1, "b": "2"},
        ),
        ("f", {}),
    ],
)
def test_calls_may_have_a_tag_for_each_argument(text, arguments, size):
    thoughts, said, called = read(Writing(), f"So:\n<tool_call>\n{text}\n</tool_call>\n", size=size)
    assert (thoughts, said, [name for name, _ in called]) == ("", "So:", ["f"])
    assert json.loads(called[0][1]) == arguments


def test_values_are_of_the_types_that_a_schema_allows():
    either = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    odd = {"a": either, "b": {"enum": ["1", "2"]}, "c": {"type": ["integer", "null"]}, "d": {"$ref": "#/x"}, "e": None}
    values = {"a": "null", "b": "1", "c": "null", "d": "1", "e": "1"}
    as_text = "".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in values.items())
    for properties, wanted in ((odd, {"a": None, "b": "1", "c": None, "d": 1, "e": "1"}), (None, values)):
        tool = Tool(type="function", function={"name": "f", "parameters": {"properties": properties}})
        text = f"<tool_call><function=f>{as_text}</function></tool_call>"
        ((_, arguments),) = read(Writing(), text, calls=Calls([tool]))[2]
        assert json.loads(arguments) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\ncut he",
        "f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>",
        "f",
    ],
)
def test_a_call_that_was_cut_off_is_none(text):
    assert read(Writing(), f"<tool_call>{text}") == ("", f"<tool_call>{text}", [])


@pytest.mark.parametrize(
    "text",
    [
        "f" + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 3000 + "x",
        "f" + "<arg_key>a</arg_key><arg_value>" * 5000,
        "<function=f>" + "<parameter=a>" * 8000,
        "<function=f><parameter=c>" + "[" * 5000 + "</parameter></function>",
        "[" * 5000,
        '{"name": "f", "arguments": NaN}',
        " " * 100_000,
    ],
)
def test_hostile_texts_are_no_calls_and_take_no_time(text):
    begin = time.perf_counter()
    _, _, called = read(Writing(), f"<tool_call>{text}</tool_call>")
    for _, arguments in called:
        json.loads(arguments)
    for form in FORMS:
        read(Writing(form=form), f"{form.begin}{text}{form.end}")
    assert time.perf_counter() - begin < 5


def test_letters_that_utf_8_cannot_hold_are_escaped():
    for text in ('{"name": "f", "arguments": {"b": "\\ud800"}}', '{"name": "f", "arguments": "\\ud800"}'):
        ((_, arguments),) = read(Writing(), f"<tool_call>[{text}]</tool_call>".replace("[", "").replace("]", ""))[2]
        arguments.encode()


def test_log_probabilities_are_those_of_the_answer():
    items, likely = OutputItems(), [{"token": "hm"}, {"token": "Yes"}]
    list(items.grow([Reasoned("h")], likely[:1]))
    list(items.grow([Reasoned("m"), Said("Yes")], likely))
    assert items.items[1]["content"][0]["logprobs"] == likely
    cut = OutputItems()
    list(cut.grow([Reasoned("h")]))
    list(cut.end("incomplete"))
    assert [item["status"] for item in cut.items] == ["incomplete", "incomplete"]


def test_templates_show_how_a_model_writes():
    assert Writing.of("") == Writing.of(SAY) == Writing()
    assert Writing.of("{% if x %}<think>\n\n</think>{% endif %}") == THINKS
    assert Writing.of("<|start|>assistant<|channel|>final<|message|>") == HARMONY
    assert Writing.of("<tool_call>\n<function=x>") == Writing(xml=True)
    assert [Writing.of(tags.end).tags for tags in KNOWN] == list(KNOWN)
    assert [Writing.of(tags.end).tagged for tags in KNOWN] == [False, True, True]


def test_reasoning_of_earlier_answers_reaches_the_template():
    for name in ("reasoning", "reasoning_content"):
        said = _plain(Message.model_validate({"role": "assistant", name: "Hm"}))
        assert (said["reasoning_content"], said["thinking"]) == ("Hm", "Hm")
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    both = {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}
    assert _plain(Message(**both))["thinking"] == "Hm"
    assert "thinking" not in _plain(Message(**both, tool_calls=[call])), "GPT-OSS's template refuses it"


@pytest.fixture(scope="module")
def speaks(with_template):
    """Makes servers of the tiny base with another template, whose reasoning is "hm"."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reasoning, "ANY", {"type": "const_string", "value": "hm\n"})
        yield lambda template: serving(with_template(template))


def ask(live, **more):
    with live.client() as client:
        messages = [{"role": "user", "content": "hello"}]
        answer = client.chat.completions.create(model="small", messages=messages, max_tokens=200, **more)
        return list(answer) if more.get("stream") else answer


GRAMMAR = {"type": "grammar", "grammar": 'root ::= "hi"'}
OBJECT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 7}}}
ONE = {
    "type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
CALL = {"type": "function", "function": {"name": "f", "parameters": ONE}}


def test_a_format_follows_the_reasoning(speaks):
    with speaks(SAY + "<think>\n{# </think> #}") as live:
        for wanted, content in ((GRAMMAR, "hi"), (OBJECT, "7")):
            said = ask(live, extra_body={"response_format": wanted}).choices[0].message
            assert (said.reasoning_content, said.content) == ("hm", content)
        called = ask(live, tools=[CALL], tool_choice="required").choices[0].message
        assert (called.reasoning_content, called.content) == ("hm", None)
        assert json.loads(called.tool_calls[0].function.arguments) == {"a": 1}
        named = {"type": "function", "function": {"name": "f"}}
        assert ask(live, tools=[CALL], tool_choice=named).choices[0].message.tool_calls[0].function.name == "f"
        without = ask(live, extra_body={"response_format": GRAMMAR, "include_reasoning": False}).choices[0].message
        assert (getattr(without, "reasoning_content", None), without.content) == (None, "hi")
        pieces = [chunk.choices[0].delta for chunk in ask(live, stream=True, extra_body={"response_format": GRAMMAR})]
        assert "".join(getattr(piece, "reasoning_content", None) or "" for piece in pieces) == "hm"
        assert "".join(piece.content or "" for piece in pieces) == "hi"
    with speaks(SAY + "<think>\n\n</think>\n\n") as live:
        said = ask(live, extra_body={"response_format": GRAMMAR}).choices[0].message
        assert (getattr(said, "reasoning_content", None), said.content) == (None, "hi")


def test_json_stays_valid_behind_reasoning(speaks, tokenizer):
    """A string of limited length could hold a tab in XGrammar's own rules."""
    schema = {
        "type": "object",
        "properties": {"s": {"type": "string", "minLength": 3, "maxLength": 6}},
        "required": ["s"],
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
    with speaks(SAY + "<think>\n{# </think> #}") as live:
        more = {"response_format": form, "logit_bias": {str(tokenizer("\t").input_ids[0]): 50}}
        assert json.loads(ask(live, extra_body=more).choices[0].message.content)["s"]


def test_traces_are_those_of_the_answer(speaks):
    with speaks(SAY + "<think>\n{# </think> #}") as live:
        more = {"response_format": GRAMMAR, "speculation": {"trace": True}}
        choices = [chunk.choices[0] for chunk in ask(live, stream=True, extra_body=more) if chunk.choices]
        assert "".join(text for choice in choices for text, _ in getattr(choice, "pieces", ())) == "hi"
        assert all(hasattr(choice, "pieces") for choice in choices if choice.delta.content)


def test_a_model_may_reason_or_not_before_a_format(speaks, tokenizer):
    with speaks(SAY + "{# </think> #}") as live:
        for first, thoughts in (("<", "hm"), ("h", None)):
            more = {"response_format": GRAMMAR, "logit_bias": {str(tokenizer(first).input_ids[0]): 100}}
            said = ask(live, extra_body=more).choices[0].message
            assert (getattr(said, "reasoning_content", None), said.content) == (thoughts, "hi")


def test_formats_and_calls_of_harmony(speaks, tokenizer):
    letters = {letter: str(tokenizer(letter).input_ids[0]) for letter in "acf"}
    with speaks(SAY + "{# <|channel|><|message|> #}") as live:
        for first, thoughts in (("a", "hm\n"), ("f", None)):
            more = {"response_format": GRAMMAR, "logit_bias": {letters[first]: 100}}
            said = ask(live, extra_body=more).choices[0].message
            assert (getattr(said, "reasoning_content", None), said.content) == (thoughts, "hi")
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            said = ask(live, tools=[CALL], tool_choice=choice, logit_bias={letters["c"]: 100}).choices[0].message
            assert (said.content, said.tool_calls[0].function.name) == (None, "f")
            assert json.loads(said.tool_calls[0].function.arguments) == {"a": 1}


def test_required_calls_have_the_form_of_the_template(speaks):
    with speaks(SAY + "{# <tool_call><function=x> #}") as live:
        answer = ask(live, tools=[CALL], tool_choice="required", extra_body={"return_token_ids": True})
        assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments) == {"a": 1}
        body = {"model": "small", "tokens": answer.choices[0].token_ids}
        with live.client() as client:
            text = client.post(f"{live.url}/detokenize", cast_to=object, body=body)["prompt"]
        assert text.startswith("<tool_call>\n<function=f>\n")
        assert "<parameter=a>" in text


def test_responses_have_an_item_of_reasoning(speaks):
    form = {"name": "x", "type": "json_schema", "schema": {"const": 7}}
    more = {"extra_body": {"reasoning": {"effort": "low"}}, "text": {"format": form}}
    with speaks(SAY + "<think>\n{# </think> #}") as live, live.client() as client:
        answer = client.responses.create(model="small", input="hello", **more)
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        assert (answer.output[0].content[0].text, answer.output_text, answer.reasoning.effort) == ("hm", "7", "low")
        events = list(client.responses.create(model="small", input="hello", stream=True, **more))
        assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "hm"
        kinds = [event.type for event in events]
        assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
        said = [item.model_dump() for item in answer.output]
        again = client.responses.create(model="small", input=[{"role": "user", "content": "a"}, *said], **more)
        assert again.output_text == "7"


def test_effort_reaches_the_template(speaks):
    template = "{{ reasoning_effort }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}" + SAY
    with speaks(template) as live, live.client() as client:
        body = {"model": "small", "messages": [{"role": "user", "content": "x"}]}
        found = [
            client.post(f"{live.url}/tokenize", cast_to=object, body=body | {"reasoning_effort": effort})["count"]
            for effort in ("low", "none")
        ]
        assert found == [len("lowTruex"), len("noneFalsex")]
