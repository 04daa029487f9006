"""Log-probabilities of prompts and completions, and what a stream tells beside its text."""

import json
from copy import deepcopy
from itertools import chain

import httpx
import pytest
import torch

from medusa import BaseModel, MedusaModel
from medusa.serve.settings import ApiSettings, EngineSettings
from tests.serve.live import serving

PROMPT = list(b"the quick brown fox")


@pytest.fixture(scope="module")
def live(speaker):
    with serving(speaker, EngineSettings(prefill_rows=7), ApiSettings()) as server:
        yield server


def complete(client, prompt=PROMPT, **options):
    options = {"max_tokens": 5, "temperature": 0, "echo": True, "logprobs": 2} | options
    return client.completions.create(model="small", prompt=prompt, **options).choices


@pytest.mark.parametrize("most", [0, 5])
def test_a_prompt_is_scored(client, speaker, most):
    (whole,) = complete(client, max_tokens=most)
    told = whole.logprobs
    text = torch.tensor([PROMPT])
    expected = speaker.base.logits(speaker.base.hidden_states(text))[0].float().log_softmax(-1)
    assert whole.text.startswith(speaker.base.tokenizer.decode(PROMPT)) and whole.finish_reason in ("length", "stop")
    assert len(told.tokens) == len(told.token_logprobs) == len(PROMPT) + most
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    for place in range(1, len(PROMPT)):
        assert told.token_logprobs[place] == pytest.approx(float(expected[place - 1, PROMPT[place]]), abs=1e-4)
        assert told.top_logprobs[place][told.tokens[place]] == told.token_logprobs[place], (
            "with the one that stands there"
        )
        assert max(told.top_logprobs[place].values()) == pytest.approx(float(expected[place - 1].max()), abs=1e-4)
    assert told.text_offset[:3] == [0, 1, 2]
    assert complete(client, max_tokens=most)[0] == whole, "what is cached does not matter"


def test_a_stream_scores_its_prompt_too(client):
    (whole,) = complete(client, max_tokens=4)
    pieces = [choice for chunk in complete_stream(client, max_tokens=4) for choice in chunk.choices]
    assert "".join(piece.text for piece in pieces) == whole.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        told = chain.from_iterable(getattr(piece.logprobs, name) for piece in pieces if piece.logprobs)
        assert list(told) == getattr(whole.logprobs, name)


def complete_stream(client, **options):
    options = {"max_tokens": 5, "temperature": 0, "echo": True, "logprobs": 2} | options
    return client.completions.create(model="small", prompt=PROMPT, stream=True, **options)


def test_nothing_is_written_where_nothing_is_wanted(client, speaker):
    (only,) = complete(client, max_tokens=0, echo=False, logprobs=None)
    assert (only.text, only.finish_reason, only.logprobs) == ("", "length", None)
    (only,) = complete(client, max_tokens=0, logprobs=None)
    assert (only.text, only.logprobs) == (speaker.base.tokenizer.decode(PROMPT), None)
    full = PROMPT * 20
    full = full[: speaker.base.context_length]
    (scored,) = complete(client, full, max_tokens=0, logprobs=0)
    assert len(scored.logprobs.tokens) == speaker.base.context_length
    assert scored.logprobs.top_logprobs[1] == {scored.logprobs.tokens[1]: scored.logprobs.token_logprobs[1]}


@pytest.fixture(scope="module")
def ending(base, make_heads):
    """A client of a base that ends with the first token that it says."""
    (token,) = MedusaModel(base).generate(PROMPT, max_new_tokens=1).tokens
    tokenizer, model = deepcopy(base.tokenizer), deepcopy(base.model)
    model.generation_config.eos_token_id = token
    with serving(MedusaModel(BaseModel(model, tokenizer, base.name))) as live, live.client() as client:
        yield client


def test_an_end_is_a_token_of_a_completion_and_not_of_a_chat(ending):
    (whole,) = complete(ending, max_tokens=3)
    assert whole.finish_reason == "stop" and len(whole.logprobs.tokens) == len(PROMPT) + 1
    options = {"messages": [{"role": "user", "content": bytes(PROMPT).decode()}], "temperature": 0, "logprobs": True}
    answer = ending.chat.completions.create(model="small", max_tokens=3, **options)
    *_, last = ending.chat.completions.create(model="small", max_tokens=3, stream=True, **options)
    assert last.choices[0].finish_reason and last.choices[0].logprobs is None
    assert answer.choices[0].logprobs is not None


def test_parts_of_characters_have_bytes(client):
    bias = {"logit_bias": {"227": 100}, "max_tokens": 2}
    token = client.chat.completions.create(
        model="small", messages=[{"role": "user", "content": "a"}], logprobs=True, **bias
    ).choices[0].logprobs.content[0]  # fmt: skip
    assert token.token == "\ufffd" and len(token.bytes) == 1 and token.bytes[0] >= 128
    (plain,) = complete(client, **bias)
    assert plain.logprobs.tokens[-1] == f"bytes:\\x{token.bytes[0]:02x}"


def test_numbers_of_tokens_come_when_they_are_asked_for(client):
    def usages(**options):
        messages = [{"role": "user", "content": "a"}]
        options = {"messages": messages, "stream": True, "max_tokens": 6, "temperature": 0, "stream_options": options}
        return [chunk.usage for chunk in client.chat.completions.create(model="small", **options)]

    assert set(usages(include_usage=False)) == set(usages(include_usage=None)) == {None}
    *some, last = usages(include_usage=True)
    assert set(some) == {None} and last.completion_tokens == 6
    counted = usages(include_usage=True, continuous_usage_stats=True)
    assert None not in counted and counted[0].completion_tokens == 0 and counted[0].prompt_tokens > 0
    numbers = [usage.completion_tokens for usage in counted]
    assert numbers == sorted(numbers) and numbers[-1] == 6


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_tells_token_ids(live, path):
    asked = {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    body = {"model": "small", "temperature": 0, "max_tokens": 6, "return_token_ids": True, **asked}
    whole = httpx.post(f"{live.url}/v1/{path}", json=body).json()
    lines = httpx.post(f"{live.url}/v1/{path}", json=body | {"stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]
    assert chunks[0]["prompt_token_ids"] == chunks[0]["choices"][0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
