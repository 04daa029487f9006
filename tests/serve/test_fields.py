"""Fields that clients send: what they mean, what is refused and how, what is left alone."""

import re

import httpx
import pytest
from pydantic import ValidationError

from medusa import BaseModel, MedusaModel
from medusa.serve.api.items import ResponsesRequest
from medusa.serve.api.protocol import ChatRequest, CompletionRequest
from medusa.serve.api.texts import Texts
from medusa.serve.server import build_parser, read_keys
from medusa.serve.settings import ApiSettings
from tests.serve.live import serving

CHAT, COMPLETIONS = "v1/chat/completions", "v1/completions"


@pytest.fixture(scope="module")
def live(speaker):
    with serving(speaker, api=ApiSettings(origins=("http://elsewhere",), allow_credentials=True)) as server:
        yield server


def post(live, path=CHAT, **fields):
    asked = {"messages": [{"role": "user", "content": "say hello"}]} if path == CHAT else {}
    asked = {"model": "small", "temperature": 0, "max_tokens": 12, **asked} | fields
    return httpx.post(f"{live.url}/{path}", json=asked, timeout=60)


def text(live, **fields):
    answer = post(live, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 50_000}]}, "messages"),
        (CHAT, {"max_tokens": 250}, "messages"),
        (CHAT, {"max_tokens": None, "max_completion_tokens": 256}, "messages"),
        (COMPLETIONS, {"prompt": "x" * 256}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 255, "max_tokens": 2}, "prompt"),
    ],
)
def test_what_does_not_fit_into_the_context(live, path, fields, param):
    answer = post(live, path, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert "maximum context length is 256 tokens" in error["message"]


def test_what_was_not_asked_for_fits_always(live):
    answer = post(live, COMPLETIONS, prompt="x" * 250, max_tokens=None, ignore_eos=True)
    assert answer.json()["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("path", "fields", "param", "message"),
    [
        (CHAT, {"seed": 2**63}, "seed", "less than"),
        (CHAT, {"seed": -(2**63) - 1}, "seed", "greater than"),
        (CHAT, {"logit_bias": {"1.5": 1}}, "logit_bias", "its keys are token ids"),
        (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias", "token id (-1)"),
        (CHAT, {"logit_bias": {"1_0": 1}}, "logit_bias", "its keys are token ids"),
        (CHAT, {"logit_bias": {"99999": 1}}, "logit_bias", "token id (99999)"),
        (CHAT, {"temperature": "1"}, "temperature", "should be a number"),
        (CHAT, {"temperature": 1e300}, "temperature", "must be between 0 and 4.61169e+18"),
        (CHAT, {"response_format": {"type": "grammar"}}, "response_format", "give its grammar"),
        (CHAT, {"response_format": {"type": "regex"}}, "response_format", "give its pattern"),
        (CHAT, {"structured_outputs": {}}, "structured_outputs", "must have one of json, regex, choice"),
        (CHAT, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "(regex, choice) must"),
        (CHAT, {"structured_outputs": {"json": "{"}}, "structured_outputs", "Expecting property name"),
        (
            CHAT,
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "response_format",
        ),
        (
            CHAT,
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "give one of them",
        ),
        (CHAT, {"guided_choice": ["a"]}, "guided_choice", "give structured_outputs"),
        (CHAT, {"min_tokens": 5}, "min_tokens", "set max_tokens and ignore_eos"),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "mean the same"),
        (COMPLETIONS, {"prompt": "a", "stop_token_ids": [5]}, "stop_token_ids", "give their texts as stop"),
        (CHAT, {"bad_words": ["a"]}, "bad_words", "give logit_bias"),
        (CHAT, {"chat_template": "{{ 1 }}"}, "chat_template", "the base's own"),
        (COMPLETIONS, {"prompt": "a", "cache_salt": "mine"}, "cache_salt", "a server of your own"),
        (COMPLETIONS, {"prompt": "a", "include_stop_str_in_output": True}, "include_stop_str_in_output", "yourself"),
        (CHAT, {"tool_choice": "auto"}, "tool_choice", "needs tools"),
        (
            CHAT,
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "maybe", "tools": []}}},
            "tool_choice.allowed_tools.mode",
            "'auto' or 'required'",
        ),
        (CHAT, {"model": None}, "model", "is missing; give it"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities", "writes text only"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions", "give tools"),
        (CHAT, {"web_search_options": {}}, "web_search_options", "no web search"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "exclude"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
            "this model reads text only",
        ),
        (CHAT, {"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs", "no value of a template"),
        (CHAT, {"chat_template_kwargs": {"messages": 5}}, "chat_template_kwargs", "no value of a template"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "has no tools"),
        (COMPLETIONS, {"prompt": ""}, "prompt", "is empty"),
        (COMPLETIONS, {"prompt": [5000]}, "prompt", "token id (5000)"),
        (CHAT, {"speculation": {"drafter": "mtp"}}, "speculation", "needs"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2}, "best_of", "other than n"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix", "only be continued"),
    ],
)
def test_what_is_known_and_cannot_be_had_is_refused(live, path, fields, param, message):
    answer = post(live, path, **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and message in error["message"] and error["param"] == param, error


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"choice": ["yes", 'no "x"']}, 'yes|no "x"'),
        ({"regex": "[ab]{3}c"}, "[ab]{3}c"),
        ({"grammar": 'root ::= "a" | "b"'}, "a|b"),
        ({"json": {"const": 7}}, "7"),
        ({"json": '{"enum": [1, 2]}'}, "[12]"),
        ({"json_object": True}, r"\{.*"),
    ],
)
def test_formats_may_be_asked_for_as_of_vllm(live, asked, pattern):
    for path in (CHAT, COMPLETIONS):
        more = {"prompt": "a"} if path == COMPLETIONS else {"max_tokens": 40, "max_completion_tokens": 40}
        answer = post(live, path, structured_outputs=asked, **more).json()["choices"][0]
        assert re.fullmatch(pattern, answer.get("text") or answer["message"]["content"], re.DOTALL)


def test_special_tokens_may_be_part_of_the_text(live, base):
    end = base.tokenizer.decode([0])
    bias = {"logit_bias": {"0": 100}, "max_tokens": 4}
    for skip, text_of_it in ((True, ""), (False, end * 4)):
        asked = {"prompt": "a", "ignore_eos": True, "skip_special_tokens": skip, **bias}
        assert post(live, COMPLETIONS, **asked).json()["choices"][0]["text"] == text_of_it
        assert post(live, COMPLETIONS, **asked | {"ignore_eos": False}).json()["choices"][0]["text"] == ""


def test_what_clients_send_back_and_along_is_taken(live):
    said = {"role": "assistant", "content": "Hi", "annotations": [], "refusal": None, "audio": None, "tool_calls": None}
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "reasoning_content": "Hm."}
    called = {"role": "function", "name": "f", "content": "4"}
    messages = [{"role": "user", "content": "a"}, said, refused, called, {"role": "user", "content": "b"}]
    along = {
        "modalities": ["text"], "function_call": "none", "functions": [], "store": False, "metadata": {"a": "b"},
        "prompt_cache_retention": "24h", "prompt_cache_key": "k", "service_tier": "auto", "safety_identifier": "x",
        "tool_choice": "none", "seed": -1, "suffix": None, "min_tokens": 0, "stop_token_ids": [], "guided_json": None,
    }  # fmt: skip
    enough = {"min_tokens": 9, "max_tokens": 9, "ignore_eos": True}
    assert post(live, **enough).json()["usage"]["completion_tokens"] == 9
    answer = post(live, messages=messages, **along)
    assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers
    plain = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Hi"}]
    plain += [{"role": "assistant", "content": "No."}, {"role": "tool", "content": "4"}, messages[-1]]
    assert answer.json()["choices"][0]["message"]["content"] == text(live, messages=plain)
    assert post(live, COMPLETIONS, prompt="a", best_of=1, suffix="").status_code == 200


def test_fields_that_nobody_knows_are_left_alone_and_named(live):
    more = {"verbosity": "low", "größe\r\n": 1, "messages": [
        {"role": "user", "content": [{"type": "text", "text": "say hello", "cache_control": {}}]}
    ]}  # fmt: skip
    answer = post(live, **more)
    assert answer.json()["choices"][0]["message"]["content"] == text(live)
    assert answer.headers["x-ignored-fields"] == "verbosity, gre, messages.0.content.0.cache_control"
    assert post(live, stream=True, **more).headers["x-ignored-fields"] == answer.headers["x-ignored-fields"]


def test_a_prediction_is_a_draft(live):
    letters = {"max_tokens": 60, "logit_bias": {str(token): -100 for token in (0, *range(95, 257))}}
    plain = post(live, **letters, speculation={"enabled": False}).json()["choices"]
    said = plain[0]["message"]["content"]
    ways = {"prediction": {"type": "content", "content": [{"type": "text", "text": said}]}}
    helped = post(live, **letters, speculation={"metrics": True}, **ways).json()
    assert helped["choices"] == plain
    right = helped["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert right == helped["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 40


def test_an_answer_goes_on_with_what_is_begun(base):
    tokenizer = base.tokenizer.__class__(tokenizer_object=base.tokenizer._tokenizer, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role[0] }}:{{ message.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}a:{{ mood or '' }}{% endif %}"
    )
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
    with serving(MedusaModel(BaseModel(base.model, tokenizer, base.name))) as live:

        def read(**fields):
            ids = httpx.post(f"{live.url}/tokenize", json={"messages": messages, **fields}).json()["tokens"]
            asked = post(live, messages=messages, return_token_ids=True, **fields).json()
            assert asked["prompt_token_ids"] == ids
            return tokenizer.decode(ids)

        assert read() == "u:hi<end>a:Well<end>a:"
        assert read(add_generation_prompt=False) == "u:hi<end>a:Well<end>"
        assert read(continue_final_message=True) == "u:hi<end>a:Well"
        assert read(chat_template_kwargs={"mood": "!"}) == "u:hi<end>a:Well<end>a:!"


def test_tokens_have_names(live, speaker):
    told = httpx.post(
        f"{live.url}/tokenize", json={"prompt": "a b", "return_token_strs": True, "model": "small"}
    ).json()
    assert told["token_strs"] == speaker.base.tokenizer.convert_ids_to_tokens(told["tokens"]) and told["count"] == 3
    assert httpx.post(f"{live.url}/tokenize", json={"prompt": ""}).json()["tokens"] == []
    assert httpx.post(f"{live.url}/tokenize", json={"prompt": "a", "chat_template": "x"}).status_code == 400


def test_keys_come_from_the_command_line_and_the_environment(monkeypatch):
    monkeypatch.setenv("MEDUSA_API_KEYS", "a, b,")
    assert read_keys(build_parser().parse_args(["--api-key", "c", "d"]).api_key) == {"a", "b", "c", "d"}
    monkeypatch.delenv("MEDUSA_API_KEYS")
    assert read_keys([]) == frozenset()
    with pytest.raises(ValueError, match="name no key"):
        read_keys([" "])


def test_pages_of_other_hosts_may_ask_and_send_cookies_where_they_are_named(live):
    headers = {"Origin": "http://elsewhere", "Access-Control-Request-Method": "POST"}
    answer = httpx.options(f"{live.url}/{CHAT}", headers=headers)
    assert answer.headers["access-control-allow-origin"] == "http://elsewhere"
    assert answer.headers["access-control-allow-credentials"] == "true"
    answer = httpx.options(f"{live.url}/{CHAT}", headers=headers | {"Origin": "http://evil"})
    assert "access-control-allow-origin" not in answer.headers


def test_long_lists_of_mistakes_have_one_error_each():
    for kind, fields in (
        (CompletionRequest, {"prompt": [5] * 1000 + ["x"] * 1000}),
        (CompletionRequest, {"prompt": "a", "stop": [5] * 1000}),
        (ChatRequest, {"messages": [{"role": "nobody"}] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": 5}] * 1000}]}),
        (ResponsesRequest, {"input": [{"role": "nobody"}] * 1000}),
    ):
        with pytest.raises(ValidationError) as raised:
            kind.model_validate({"model": "small", **fields})
        assert raised.value.error_count() < 6, "one for each type that it may have"


def test_what_would_keep_others_waiting_is_refused_before_it_is_read(live, monkeypatch):
    monkeypatch.setattr(Texts, "encode", lambda *_: pytest.fail("it is encoded"))
    error = post(live, COMPLETIONS, prompt=["a"] * 1000).json()["error"]
    assert error["param"] == "n" and "1000 completions" in error["message"]
    call = {"id": "a", "function": {"name": "f", "arguments": '{"a": 1}'}}
    error = post(live, messages=[{"role": "assistant", "tool_calls": [call] * 1000}]).json()["error"]
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")


def test_arguments_of_calls_may_be_no_json(live):
    call = {"id": "a", "function": {"name": "f", "arguments": "[" * 10_000}}
    assert post(live, messages=[{"role": "assistant", "tool_calls": [call]}]).status_code == 200
