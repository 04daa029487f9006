"""Calls of tools, the Responses API and the helpers of OpenAI's own client, on a base that knows tools."""

import json
from typing import Literal

import openai
import pytest
from pydantic import BaseModel as Model

from tests.serve.live import serving
from tests.serve.test_api import ask, choices

TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message['content'] }}<end>{% endfor %}"
)
DAYS = {"days": {"type": "integer", "minimum": 1, "maximum": 9}}
PARAMETERS = {"type": "object", "properties": DAYS, "required": ["days"], "additionalProperties": False}
FUNCTION = {"name": "weather", "description": "Tells the weather.", "parameters": PARAMETERS}
WEATHER = {"type": "function", "function": FUNCTION}
TOOL = {"type": "function", "name": "weather", "parameters": PARAMETERS}


class Colour(Model):
    """What a format may be."""

    colour: Literal["red", "green"]
    bright: bool


class Weather(Model):
    """What a function may be asked."""

    days: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def client(with_template):
    with serving(with_template(TOOL_TEMPLATE)) as live, live.client() as client:
        yield client


def respond(client, **options):
    options = {"input": "say hello", "temperature": 0, "max_output_tokens": 20} | options
    return client.responses.create(model="small", **options)


def chat(client, **options):
    return client.chat.completions.create(**ask(**options))


def user(text):
    return {"role": "user", "content": text}


def test_a_response_is_the_text_of_a_chat(client):
    answer, same = respond(client), chat(client)
    assert answer.output_text == same.choices[0].message.content
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    usage = answer.usage
    assert (usage.input_tokens, usage.output_tokens) == (same.usage.prompt_tokens, same.usage.completion_tokens)
    told = respond(client, instructions="Be brief.", metadata={"a": "b"}, user="me")
    assert (
        told.output_text
        == chat(client, messages=[{"role": "system", "content": "Be brief."}, user("say hello")])
        .choices[0]
        .message.content
    )
    assert (told.instructions, told.metadata, told.user, told.store) == ("Be brief.", {"a": "b"}, "me", False)
    assert told.error is None and told.tools == [] and told.tool_choice == "auto"
    drafted = respond(client, extra_body={"speculation": {"metrics": True, "enabled": False}}).model_extra["metrics"]
    assert drafted["speculative_decoding"]["num_draft_tokens"] == 0 and "metrics" not in told.model_extra


def test_a_conversation_goes_on_with_what_was_answered(client):
    call = {"type": "function_call", "id": "fc_1", "call_id": "1", "name": "weather", "arguments": '{"days": 1}'}
    first = respond(client)
    items = [user("say hello"), *first.output, {"type": "reasoning", "id": "r", "summary": []}, call]
    items += [{"type": "function_call_output", "call_id": "1", "output": "sunny"}]
    items += [{"role": "user", "content": [{"type": "input_text", "text": "more"}]}]
    messages = [user("say hello"), {"role": "assistant", "content": first.output_text, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"days": 1}'}}
    ]}, {"role": "tool", "tool_call_id": "1", "content": "sunny"}, user("more")]  # fmt: skip
    assert respond(client, input=items).output_text == chat(client, messages=messages).choices[0].message.content


def test_events_of_a_text(client):
    whole = respond(client)
    events = list(respond(client, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1].response
    assert said == events[-4].text == last.output_text == whole.output_text
    assert last.usage == whole.usage and last.id == events[0].response.id
    assert events[0].response.output == [] and events[0].response.usage is None


def test_log_probabilities_are_told_where_they_are_asked_for(client):
    plain = {"extra_body": {"speculation": {"nodes": 1}}}  # trees of other sizes round in another way
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2} | plain
    whole = respond(client, **asked).output[0].content[0]
    expected = chat(client, logprobs=True, top_logprobs=2, **plain).choices[0].logprobs.content
    assert [each.logprob for each in whole.logprobs] == [each.logprob for each in expected]
    assert all(len(each.top_logprobs) == 2 for each in whole.logprobs)
    events = list(respond(client, stream=True, **asked))
    told = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert [each.logprob for each in told] == [each.logprob for each in whole.logprobs]
    assert respond(client).output[0].content[0].logprobs == []


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_events_of_a_call(client, choice):
    asked = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False, "max_output_tokens": 150}
    (call,) = respond(client, **asked).output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert 1 <= json.loads(call.arguments)["days"] <= 9
    with client.responses.stream(model="small", input="say hello", temperature=0, **asked) as stream:
        events, whole = list(stream), stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "in_progress", "output_item.added"]
    assert set(kinds[3:-3]) == {"function_call_arguments.delta"} and len(kinds) > 8
    assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
    assert whole.output[0].arguments == call.arguments == events[-3].arguments
    assert whole.tools[0].name == "weather"


def test_a_format_is_parsed(client):
    asked = {"model": "small", "input": "say hello", "temperature": 0}
    answer = client.responses.parse(text_format=Colour, **asked)
    assert isinstance(answer.output_parsed, Colour) and answer.status == "completed"
    with client.responses.stream(text_format=Colour, **asked) as stream:
        done = [event for event in stream if event.type == "response.output_text.done"]
        assert stream.get_final_response().output_parsed == done[0].parsed == answer.output_parsed
    tool = openai.pydantic_function_tool(Weather, name="weather")
    chat = {"model": "small", "messages": [user("say hello")], "temperature": 0}
    assert isinstance(client.chat.completions.parse(response_format=Colour, **chat).choices[0].message.parsed, Colour)
    called = client.chat.completions.parse(tools=[tool], tool_choice="required", parallel_tool_calls=False, **chat)
    assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)


def test_a_stream_of_a_chat_tells_when_arguments_are_done(client):
    asked = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    with client.chat.completions.stream(model="small", messages=[user("a")], temperature=0, **asked) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds.count("tool_calls.function.arguments.done") == 1 and "content.delta" not in kinds
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in pieces) == done.arguments and json.loads(done.arguments)
    with client.chat.completions.stream(model="small", messages=[user("a")], temperature=0, max_tokens=9) as stream:
        assert [event.type for event in stream].count("content.done") == 1


@pytest.mark.parametrize(
    ("wrong", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "answers are not kept"),
        ({"background": True}, "background", "wait for the answer"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "of no supported type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "reads text only"),
        ({"tools": [{"name": "f"}]}, "tools", "type: is missing"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "is missing"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"input": "x" * 300}, "input", "maximum context length"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text", "incomplete"),
    ],
)
def test_what_cannot_be_had_is_refused(client, wrong, param, message):
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        respond(client, **wrong)
    assert refused.value.param.startswith(param)


def test_tools_that_the_server_does_not_have_are_left_out_and_named(client):
    function = {"type": "function", "name": "weather", "parameters": WEATHER["function"]["parameters"]}
    others = [{"type": "web_search"}, {"type": "namespace", "tools": []}]
    for tools in (others, [function, *others]):
        answer = client.responses.with_raw_response.create(model="small", input="a", tools=tools, tool_choice="auto")
        named = ", ".join(f"tools.{len(tools) - 2 + place}" for place in (0, 1))
        assert answer.headers["x-ignored-fields"] == named
        assert [tool.type for tool in answer.parse().tools] == ["function"] * (len(tools) - 2)


def test_a_response_that_is_late_says_so_in_its_stream(client):
    events = list(respond(client, stream=True, max_output_tokens=200, extra_body={"timeout": 1e-3, "ignore_eos": True}))
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2].code == "timeout" and events[-1].response.status == "failed"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_made(client, choice):
    options = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    answer = chat(client, **options, max_tokens=150).choices[0]
    (call,) = answer.message.tool_calls
    assert call.function.name == "weather" and 1 <= json.loads(call.function.arguments)["days"] <= 9
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
    opening, begun, *growing, closing = choices(client, **options, max_tokens=150)
    assert not any(choice.delta.content for choice in (opening, *growing))
    (head,) = begun.delta.tool_calls
    pieces = [piece for choice in growing for piece in choice.delta.tool_calls]
    assert (head.function.name, head.function.arguments, head.type) == ("weather", "", "function")
    assert len(pieces) > 1 and "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert {piece.index for piece in pieces} == {0}
    assert (closing.delta.tool_calls, closing.finish_reason) == (None, answer.finish_reason)


def test_only_allowed_tools_are_shown_and_called(client):
    sky = {"type": "function", "function": {"name": "sky", "parameters": {"type": "object", "properties": {}}}}
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    alone = chat(client, tools=[WEATHER], tool_choice="required", max_tokens=150)
    answer = chat(client, tools=[sky, WEATHER], tool_choice=choice, max_tokens=150)
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens
    assert answer.choices[0].message.tool_calls[0].function == alone.choices[0].message.tool_calls[0].function
    free = {"type": "allowed_tools", "allowed_tools": allowed | {"mode": "auto"}}
    talk = chat(client, tools=[sky, WEATHER], tool_choice=free, max_tokens=8).choices[0]
    assert talk.message.content == chat(client, tools=[WEATHER], max_tokens=8).choices[0].message.content
    named = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    told = respond(client, tools=[TOOL, TOOL | {"name": "sky"}], tool_choice=named, max_output_tokens=150)
    assert {call.name for call in told.output} == {"weather"} and told.tool_choice.model_dump() == named
    allowed["tools"][0]["function"]["name"] = "sea"
    with pytest.raises(openai.BadRequestError, match=r"tool_choice \(sea\) is none of the tools"):
        chat(client, tools=[WEATHER], tool_choice=choice)


def test_several_calls_and_one_that_is_cut(client):
    answer = chat(client, tools=[WEATHER], tool_choice="required", max_tokens=200, temperature=1, seed=3).choices[0]
    *whole, _ = answer.message.tool_calls
    assert whole and all(1 <= json.loads(call.function.arguments)["days"] <= 9 for call in whole)
    assert answer.finish_reason == "length"


def test_a_call_stays_possible_beside_a_format(client, tokenizer):
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer", "maximum": 99}}}
    options = {"tools": [WEATHER], "response_format": form, "temperature": 1.5, "parallel_tool_calls": False}
    options["logit_bias"] = {str(tokenizer.convert_tokens_to_ids("<")): 5}  # calls begin with it
    answers = [chat(client, **options, seed=seed, max_tokens=150).choices[0].message for seed in (8, 9)]
    called = [answer for answer in answers if answer.tool_calls]
    assert called and len(called) < len(answers)
    assert all(isinstance(json.loads(answer.content), int) for answer in answers if not answer.tool_calls)


def test_a_conversation_with_calls_and_results(client):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    assert chat(client, messages=messages, tools=[WEATHER]).choices[0].message.tool_calls is None
