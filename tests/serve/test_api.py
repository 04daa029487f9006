"""The API as OpenAI's own client and plain HTTP see it."""

import json
import time
from itertools import chain

import httpx
import openai
import pytest

from medusa.data.chat_completions import ChatClient
from medusa.data.endpoint import EndpointAnswerer
from medusa.data.exchange import EndpointSettings, Prompt, Settings
from medusa.data.local import LocalAnswerer
from medusa.serve.settings import ApiSettings, EngineSettings
from tests.serve.live import serving

KEY, ADMIN = "secret", "root"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def live(speaker):
    api = ApiSettings(admin_key=ADMIN, max_body=100_000, max_n=8)
    with serving(speaker, EngineSettings(max_batch=8), api) as server:
        yield server


def ask(text="say hello", **options):
    messages = [{"role": "user", "content": text}]
    return {"model": "small", "messages": messages, "temperature": 0, "max_tokens": 20} | options


def post(live, headers=None, **options):
    """A chat by plain HTTP."""
    return httpx.post(f"{live.url}/v1/chat/completions", json=ask(**options), headers=headers)


def streaming(live, **options):
    """One whose stream goes on for some time."""
    options = {"max_tokens": 200, "stream": True, "ignore_eos": True} | options
    return httpx.stream("POST", f"{live.url}/v1/chat/completions", json=ask(**options))


def chat(client, text="say hello", **options):
    """The one choice of a chat."""
    return client.chat.completions.create(**ask(text, **options)).choices[0]


def choices(client, **options):
    """All choices of a stream."""
    chunks = client.chat.completions.create(**ask(stream=True, **options))
    return [choice for chunk in chunks for choice in chunk.choices]


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def until_idle(live):
    """Wait until no request is under way."""
    until = time.monotonic() + 20
    while live.engine._jobs and time.monotonic() < until:
        time.sleep(0.05)
    assert not live.engine._jobs and not live.engine._of


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.5, "seed": 3}])
def test_a_chat_is_what_generate_writes(client, speaker, options):
    prompt = speaker.chat_prompt([{"role": "user", "content": "say hello"}])
    expected = speaker.generate(prompt, max_new_tokens=20, **options)
    answer = client.chat.completions.create(**ask(**options))
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == {"eos": "stop", "length": "length"}[expected.finish_reason]
    assert answer.usage.prompt_tokens == len(prompt) and answer.usage.completion_tokens == len(expected.tokens)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_same_text(client):
    options = {"n": 2, "seed": 3, "temperature": 0.8}
    whole = client.chat.completions.create(**ask(**options))
    counted = {"stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**ask(stream=True, **counted, **options))
    texts = ["", ""]
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1], "completion i of n has seed + i"
    assert last.usage == whole.usage


def test_an_answer_tells_the_seed_that_drew_it(live):
    drawn = post(live, temperature=1.0).json()
    assert post(live, temperature=1.0, seed=drawn["seed"]).json()["choices"] == drawn["choices"]
    assert post(live, temperature=1.0).json()["seed"] != drawn["seed"]
    assert "seed" not in post(live).json()


def test_completions_of_several_prompts(client, speaker):
    answer = client.completions.create(
        model="small", prompt=["abc", "hello"], n=2, max_tokens=5, temperature=0, echo=True,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, prompt in zip(answer.choices, ["abc", "abc", "hello", "hello"], strict=True):
        output = speaker.generate(prompt, max_new_tokens=5)
        assert choice.text == prompt + output.text
        assert choice.token_ids == output.tokens
    assert answer.usage.prompt_tokens == 8
    ids = client.completions.create(model="small", prompt=[70, 71], max_tokens=5, temperature=0)
    assert ids.choices[0].text == speaker.generate([70, 71], max_new_tokens=5).text


def test_stop_strings_are_not_told(client):
    on = {"ignore_eos": True}
    text = chat(client, extra_body=on).message.content
    stopped = chat(client, stop=[text[3:5]], extra_body=on)
    assert stopped.message.content == text[: text.index(text[3:5])]
    assert stopped.finish_reason == "stop"


def test_log_probabilities_go_with_the_text(client, speaker):
    options = {"logprobs": True, "top_logprobs": 3, "extra_body": {"ignore_eos": True}}
    content = chat(client, **options).logprobs.content
    expected = speaker.generate(speaker.chat_prompt(ask()["messages"]), max_new_tokens=20, logprobs=3, ignore_eos=True)
    assert [entry.token for entry in content] == [speaker.base.tokenizer.decode([token]) for token in expected.tokens]
    assert [entry.logprob for entry in content] == [entry.logprob for entry in expected.logprobs]
    assert all(entry.top_logprobs[0].token == entry.token for entry in content), "greedy takes the best"
    told = [choice.logprobs.content for choice in choices(client, **options) if choice.logprobs]
    assert list(chain.from_iterable(told)) == content
    plain = client.completions.create(model="small", prompt="abc", max_tokens=6, temperature=0, logprobs=2).choices[0]
    assert len(plain.logprobs.tokens) == len(plain.logprobs.token_logprobs) == 6
    assert plain.logprobs.text_offset[0] == 0 and len(plain.logprobs.top_logprobs[0]) == 2


def test_a_request_says_how_it_is_drafted(client, speaker):
    def metrics(**speculation):
        answer = client.chat.completions.create(**ask(extra_body={"speculation": {"metrics": True, **speculation}}))
        return answer.choices[0].message.content, answer.model_extra["metrics"]["speculative_decoding"]

    plain, figures = metrics(enabled=False)
    assert figures["num_draft_tokens"] == 0 and figures["mean_acceptance_length"] == 1
    for how in ({"drafter": "heads", "nodes": 6}, {"tree": [[0], [1], [0, 0]]}, {"drafter": "prompt-lookup"}):
        text, figures = metrics(**how)
        assert text == plain
        drafted = sum(depth * count for depth, count in enumerate(figures["acceptance_histogram"]))
        assert figures["num_accepted_draft_tokens"] == drafted <= figures["num_draft_tokens"]
        assert figures["num_spec_steps"] == sum(figures["acceptance_histogram"])
    assert "metrics" not in client.chat.completions.create(**ask()).model_extra


def test_a_stream_tells_what_was_drafted(client):
    speculation = {"trace": True, "drafter": "heads", "nodes": 8}
    told = [choice.model_extra.get("pieces", []) for choice in choices(client, extra_body={"speculation": speculation})]
    texts, drafted = zip(*chain.from_iterable(told), strict=True)
    assert "".join(texts) == chat(client).message.content
    assert {type(each) for each in drafted} == {bool}


@pytest.mark.parametrize(
    ("wrong", "status", "message"),
    [
        ({"model": "other"}, 404, "model (other) does not exist"),
        ({"temperature": -1}, 400, "temperature (-1) must be between"),
        ({"n": 9}, 400, "n (9 completions) exceeds the limit (8)"),
        ({"max_tokens": 0}, 400, "max_tokens (0) must be at least 1"),
        ({"audio": {"voice": "alloy"}}, 400, "audio: is not supported; this model writes text only"),
        ({"logit_bias": {"9999": 1}}, 400, "token id (9999)"),
        ({"top_logprobs": 3}, 400, "top_logprobs needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs (21) must be between 0 and 20"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options needs stream"),
        ({"speculation": {"drafter": "guess"}}, 400, "drafter ('guess') is not known"),
        ({"speculation": {"enabled": False, "nodes": 4}}, 400, "leave one out"),
        ({"speculation": {"acceptance": "typical"}}, 400, "acceptance 'typical' cannot be combined with temperature 0"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages.0.content"),
        ({"messages": []}, 400, "messages"),
        ({"speculation": {"node": 3}}, 400, "speculation.node: is not known"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "has no tools"),
        ({"temperature": "warm"}, 400, "temperature"),
        ({"stop": ""}, 400, "stop ('') is empty"),
        ({"stop": ["x"] * 20}, 400, "stop: List should have at most 16 items"),
        ({"max_completion_tokens": 5}, 400, "mean the same"),
        ({"temperature": 10**400}, 400, "temperature"),
        ({"timeout": 10**400}, 400, "timeout"),
        ({"logit_bias": dict.fromkeys(map(str, range(2000)), 1)}, 400, "logit_bias"),
        ({"stop": "x" * 2000}, 400, "stop"),
        ({"speculation": {"nodes": 65}}, 400, "nodes (65) exceed the limit (64)"),
        ({"speculation": {"tree": [[rank] for rank in range(64)]}}, 400, "nodes (65) exceed the limit (64)"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"format": ["a"]}}}}, 400, "format"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_an_error_of_openai(live, wrong, status, message):
    answer = post(live, **wrong)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert message in error["message"] and error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}


def test_bodies_that_are_none(live):
    url = f"{live.url}/v1/chat/completions"
    assert httpx.post(url, content=b"{not", headers=JSON).json()["error"]["message"] == "body is not JSON; correct it"
    for content, headers in ((b'{"model": "small"}', {}), (b"[]", JSON), (b"", JSON)):
        said = httpx.post(url, content=content, headers=headers).json()["error"]["message"]
        assert said == "body is not a JSON object; send one, with the header Content-Type: application/json"
    for place in ("v1/chat/completions", "v1/completions", "tokenize"):
        half = httpx.post(f"{live.url}/{place}", content=rb'{"model": "\uD83D", "prompt": "\ud83d"}', headers=JSON)
        assert half.status_code == 400 and "half of a character" in half.json()["error"]["message"]
    for content in (b'{"prompt": "a\xed\xa0\x80b"}', '{"prompt": "a"}'.encode("utf-16")):
        other = httpx.post(f"{live.url}/tokenize", content=content, headers=JSON)
        assert other.status_code == 400 and "body is not in UTF-8" in other.json()["error"]["message"]
    for number in (b"NaN", b"-Infinity"):
        body = b'{"model": "small", "input": "a", "tools": [{"type": "f", "x": ' + number + b"}]}"
        said = httpx.post(f"{live.url}/v1/responses", content=body, headers=JSON)
        assert (
            said.status_code == 400 and f"body holds {number.decode()}, which JSON" in said.json()["error"]["message"]
        )
    for levels in (800, 968, 3000):
        nested = b'{"a":' * levels + b"{}" + b"}" * levels
        body = (
            b'{"model": "small", "messages": [{"role": "user", "content": "\\ud83d\\ude00"}], "chat_template_kwargs": '
        )
        assert httpx.post(url, content=body + nested + b"}", headers=JSON).status_code in (200, 400)
    whole = {"prompt": "\U0001f600 \\ud83d"}  # a pair of escapes, and an escaped backslash
    assert httpx.post(f"{live.url}/tokenize", content=json.dumps(whole), headers=JSON).status_code == 200
    huge = post(live, text="x" * 200_000)
    assert huge.status_code == 413 and "exceeds the limit (100000 bytes)" in huge.json()["error"]["message"]

    def endless():
        for _ in range(30):
            yield b" " * 10_000

    assert httpx.post(url, content=endless()).status_code == 413
    assert httpx.get(f"{live.url}/nowhere").json()["error"]["message"] == "Not Found"


def test_models_tokens_and_figures(live, client, speaker):
    assert [model.id for model in client.models.list()] == ["small"]
    assert client.models.retrieve("small").max_model_len == speaker.base.context_length
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    ids = httpx.post(f"{live.url}/tokenize", json={"prompt": "abc"}).json()
    assert ids["count"] == 3 and ids["tokens"] == list(speaker.base.tokenizer("abc").input_ids)
    chat = httpx.post(f"{live.url}/tokenize", json={"messages": ask()["messages"]}).json()["tokens"]
    assert chat == speaker.chat_prompt(ask()["messages"])
    assert httpx.post(f"{live.url}/detokenize", json={"tokens": ids["tokens"]}).json() == {"prompt": "abc"}
    assert httpx.post(f"{live.url}/detokenize", json={"tokens": [10**9]}).status_code == 400
    assert httpx.get(f"{live.url}/health").status_code == 200
    client.chat.completions.create(**ask())
    figures = httpx.get(f"{live.url}/metrics").text
    for name in ("spec_decode_num_draft_tokens_total", "time_to_first_token_seconds_bucket", "num_requests_running"):
        assert f"medusa:{name}{{" in figures


def test_answers_carry_the_id_of_their_request(live):
    assert httpx.get(f"{live.url}/health", headers={"X-Request-Id": "mine"}).headers["x-request-id"] == "mine"
    assert len(httpx.get(f"{live.url}/health").headers["x-request-id"]) == 32


def test_keys(speaker):
    with serving(speaker, api=ApiSettings(api_keys=frozenset([KEY, "other"]))) as live:
        refused = post(live)
        assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        assert [post(live, headers=bearer(key)).status_code for key in ("wrong", KEY)] == [401, 200]
        assert httpx.get(f"{live.url}/health").status_code == 200
        assert httpx.post(f"{live.url}/v1/heads", json={"name": "a", "path": "b"}).status_code == 403


def test_heads_come_and_go_at_run_time(live, client, speaker, make_heads, tmp_path):
    directory = speaker.with_heads({}).save_pretrained(tmp_path / "more")
    body = {"name": "more", "path": str(directory)}

    def load(headers=None, **changes):
        answer = httpx.post(f"{live.url}/v1/heads", json=body | changes, headers=headers or bearer(ADMIN))
        return answer.status_code, answer.json().get("error", {}).get("message", "")

    def remove():
        return httpx.delete(f"{live.url}/v1/heads/more", headers=bearer(ADMIN)).status_code

    assert [load(bearer("wrong"))[0], load()[0]] == [401, 200]
    assert [model.id for model in client.models.list()] == ["small", "more"]
    assert load()[0] == 400, "the name is taken"
    texts = [client.chat.completions.create(**ask(model=name)) for name in ("small", "more")]
    assert texts[0].choices == texts[1].choices and texts[1].model == "more"
    (directory / "heads.safetensors").write_bytes(b"damaged")
    status, message = load(name="bad")
    assert status == 400 and "heads" in message
    assert load(name="bad", path="/nowhere")[0] == 400
    assert [chat(client, model="more")] == texts[0].choices, "the service goes on"
    assert [remove(), remove()] == [200, 404]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**ask(model="more"))


def test_a_full_queue_is_429(speaker):
    with (
        serving(speaker, EngineSettings(max_batch=1, max_waiting=1)) as live,
        streaming(live) as first,
        streaming(live) as second,
    ):
        assert first.status_code == second.status_code == 200
        third = post(live)
        assert third.status_code == 429 and int(third.headers["retry-after"]) >= 1
        error = third.json()["error"]
        assert error["type"] == "rate_limit_error" and "queue is full (1 requests wait" in error["message"]


def test_clients_that_vanish_leave_nothing_behind(live):
    body = ask(max_tokens=200, n=4, ignore_eos=True, temperature=1)
    for _ in range(4):
        with streaming(live) as answer:
            next(answer.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=0.05)
    until_idle(live)
    assert len(live.engine._batch) == 0


def test_a_slow_reader_holds_up_nobody(live, client):
    with streaming(live, max_tokens=100) as answer:
        assert chat(client).message.content
        until_idle(live)  # it is complete although nobody has read it
        assert list(answer.iter_lines())[-2] == "data: [DONE]"


def test_time_limits(live):
    answer = post(live, timeout=1e-9)
    error = answer.json()["error"]
    assert answer.status_code == 408 and error["code"] == "timeout"
    assert error["message"].startswith("timeout (1e-09 s) has passed")


def test_a_server_that_goes_down_ends_its_answers(speaker):
    with serving(speaker) as live, streaming(live, max_tokens=100) as answer:
        lines = answer.iter_lines()
        next(lines)
        live.server.should_exit = True
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_data_regenerate_asks_it(live, speaker):
    """The base's own tokens, those of its answers in this process."""
    more, prompts = ({"role": "user", "content": "more"},), []
    for number in range(3):
        first = ({"role": "user", "content": f"say {number}"},)
        prompts.append((number, Prompt((first, more), tuple(speaker.chat_prompt(first)))))
    settings = Settings(max_new_tokens=12)
    asked = EndpointSettings(concurrency=3, retries=1, timeout=30)

    def connect():
        return ChatClient(f"{live.url}/v1", "small", settings, asked, None)

    there = EndpointAnswerer(connect, speaker.base.tokenizer, 3, seed=0)
    here = LocalAnswerer(speaker, settings)
    assert dict(there.answer(prompts)) == dict(here.answer(prompts))


@pytest.mark.parametrize(
    "wanted",
    [
        {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
        {"type": "grammar", "grammar": 'root ::= "a" b\nb ::= b'},
    ],
    ids=str,
)
def test_a_grammar_that_leads_nowhere_hurts_nobody(live, wanted):
    assert post(live, response_format=wanted, max_tokens=5).status_code in (200, 400)
    assert post(live).status_code == 200
