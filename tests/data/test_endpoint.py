import copy
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from functools import partial
from pathlib import Path

import httpx
import pytest

from medusa.data import chat_completions
from medusa.data.__main__ import main
from medusa.data.chat import documents, special_tokens
from medusa.data.chat_completions import ChatClient, EndpointError
from medusa.data.endpoint import EndpointAnswerer
from medusa.data.exchange import EndpointSettings, Prompt, Settings, UnansweredError
from medusa.data.regenerate import regenerate
from tests.data.fake_server import FakeServer, completion
from tests.data.test_golden import TOKENS, byte_tokenizer
from tests.data.test_golden import conversation as golden_conversation
from tests.data.watched import Watched, lines

ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}END{% endgeneration %}"
    "{% else %}{{ m.content }}END{% endif %}{% endfor %}"
)
YES = (200, {}, completion("yes"))
QUICK = EndpointSettings(concurrency=4, retries=2, timeout=10)


@pytest.fixture
def server():
    with FakeServer().running() as running:
        yield running


@pytest.fixture
def answerer(server, tokenizer):
    def make(endpoint=QUICK, tokenizer=tokenizer, **changes):
        options = {"url": server.url, "model": "m", "settings": Settings(seed=3), "endpoint": endpoint, "key": None}
        options |= {"first_wait": 0.001}
        return EndpointAnswerer(partial(ChatClient, **options | changes), tokenizer, endpoint.concurrency, seed=3)

    return make


def conversation(*questions):
    return Prompt(tuple(({"role": "user", "content": question},) for question in questions))


def numbered(*prompts):
    return list(enumerate(prompts))


def spans(sample, tokenizer):
    """The text of a sample with what is supervised in brackets."""
    text, before = "", 0
    for token, mark in zip(sample["input_ids"], sample["loss_mask"], strict=True):
        text += ("[" if mark > before else "]" if mark < before else "") + tokenizer.decode([token])
        before = mark
    return text + "]" * before


def test_every_user_turn_is_answered_with_the_servers_own_answers_before_it(server, answerer, tokenizer, tmp_path):
    server.reply = lambda request: (200, {}, completion(f"{len(request['messages'])}!"))
    settings = Settings(max_new_tokens=9, temperature=0.7, top_p=0.9)
    report = regenerate([conversation("hi", "go", "on")], answerer(settings=settings), tmp_path / "a.jsonl", {})
    (sample,) = lines(tmp_path / "a.jsonl")
    assert spans(sample, tokenizer) == "hi<end>[1!<end>]go<end>[3!<end>]on<end>[5!<end>]"
    assert report.tokens == sum(sample["loss_mask"]) == 9
    assert [message["content"] for message in server.requests[-1]["messages"]] == ["hi", "1!", "go", "3!", "on"]
    last = server.requests[-1]
    assert (last["model"], last["max_tokens"], last["temperature"], last["top_p"]) == ("m", 9, 0.7, 0.9)
    assert len({request["seed"] for request in server.requests}) == 3


def test_requests_run_side_by_side_and_no_more_than_asked_for(server, answerer):
    together = threading.Barrier(4)

    def reply(request):
        if int(request["messages"][0]["content"]) < 4:
            together.wait(timeout=5)  # broken, and so a failed request, unless four are here at once
        return YES

    server.reply = reply
    answers = dict(answerer().answer(numbered(*(conversation(str(number)) for number in range(12)))))
    assert sorted(answers) == list(range(12))
    assert server.most == 4
    assert len(server.requests) == 12


def test_seeds_are_those_of_the_prompts_whatever_their_order(server, answerer):
    prompts = numbered(conversation("a"), conversation("b"), conversation("c"))
    seeds = []
    for order in (prompts, prompts[::-1], prompts[1:2]):
        server.requests.clear()
        list(answerer().answer(order))
        seeds.append({request["messages"][0]["content"]: request["seed"] for request in server.requests})
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0].values())) == 3
    assert seeds[2] == {"b": seeds[0]["b"]}


@pytest.mark.parametrize("status", [429, 408, 500, 503])
def test_a_busy_server_is_asked_again(server, answerer, status):
    replies = iter([(status, {}, "busy"), (status, {}, "busy")])
    server.reply = lambda request: next(replies, YES)
    ((number, exchanges),) = answerer().answer(numbered(conversation("a")))
    assert (number, len(exchanges), len(server.requests)) == (0, 1, 3)


def test_the_pause_that_a_server_asks_for_is_kept(server, answerer, monkeypatch):
    monkeypatch.setattr(chat_completions, "_retry_after", lambda response: float(response.headers["retry-after"]))
    replies = iter([(429, {"retry-after": "0.3"}, "")])
    server.reply = lambda request: next(replies, YES)
    begin = time.monotonic()
    list(answerer().answer(numbered(conversation("a"))))
    assert 0.3 <= time.monotonic() - begin < 4.0


def _in_hours(hours):
    return format_datetime(datetime.now(UTC) + timedelta(hours=hours), usegmt=True)


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [("7", 7, 7), (_in_hours(2), 6900, 7200), (_in_hours(-2), 0, 0), ("soon", None, None)],
    ids=["seconds", "later", "past", "no time"],  # processes that share tests must name them alike
)
def test_pauses_are_seconds_or_dates(header, low, high):
    found = chat_completions._retry_after(httpx.Response(429, headers={"retry-after": header}))
    assert found is None if low is None else low <= found <= high


def test_waits_double_up_to_a_limit_and_are_spread():
    for tried, longest in ((0, 1), (1, 2), (5, 32), (6, 60), (20, 60)):
        waits = [chat_completions._wait(1.0, tried, None) for _ in range(200)]
        assert longest / 2 <= min(waits) < max(waits) <= longest
        assert max(waits) - min(waits) > longest / 4


def test_a_silent_server_is_asked_again(server, answerer):
    silent = iter([True])

    def reply(request):
        if next(silent, False):
            time.sleep(0.6)
        return YES

    server.reply = reply
    impatient = EndpointSettings(concurrency=1, retries=1, timeout=0.3)
    ((_, exchanges),) = answerer(impatient).answer(numbered(conversation("a")))
    assert len(exchanges) == 1


def test_prompts_that_stay_without_an_answer_are_counted_and_left_out(server, answerer, tokenizer, tmp_path, caplog):
    def reply(request):
        return {"long": (400, {}, "context length exceeded"), "bad": (500, {}, "no luck")}.get(
            request["messages"][0]["content"], YES
        )

    server.reply = reply
    prompts = [conversation(text) for text in ("a", "long", "b", "bad", "c")]
    report = regenerate(prompts, answerer(), tmp_path / "a.jsonl", {})
    assert report.failed == 2
    texts = [spans(sample, tokenizer) for sample in lines(tmp_path / "a.jsonl")]
    assert texts == ["a<end>[yes<end>]", "b<end>[yes<end>]", "c<end>[yes<end>]"]
    assert server.asked.count("long") == 1, "a refusal is final"
    assert server.asked.count("bad") == 3
    assert "2 of 5 prompts are left out" in caplog.text


def test_a_file_of_failures_is_an_error(server, answerer, tmp_path):
    server.reply = lambda request: (400, {}, '{"error": "max_tokens is too large"}')
    with pytest.raises(ValueError, match=r"prompts \(2\) got no answer .*400 Bad Request: .*max_tokens is too large"):
        regenerate([conversation("a"), conversation("b")], answerer(), tmp_path / "a.jsonl", {})
    assert not (tmp_path / "a.jsonl").exists()


def test_a_server_that_went_down_stops_the_run(server, answerer):
    server.reply = lambda request: YES if len(server.requests) < 3 else (502, {}, "down")
    answers = answerer().answer(numbered(*(conversation(str(number)) for number in range(100))))
    with pytest.raises(EndpointError, match=r"failed 16 prompts in a row, at last: 502 Bad Gateway: down"):
        list(answers)
    assert len(server.requests) < 80


def test_failures_that_are_not_in_a_row_do_not_stop_it(server, answerer):
    failing = EndpointSettings(concurrency=1, retries=0, timeout=10)
    server.reply = lambda request: YES if request["messages"][0]["content"] == "15" else (503, {}, "")
    answers = dict(answerer(failing).answer(numbered(*(conversation(str(number)) for number in range(31)))))
    assert [number for number, answered in answers.items() if not isinstance(answered, UnansweredError)] == [15]


def test_a_connection_that_is_lost_later_is_tried_again(answerer):
    one = EndpointSettings(concurrency=1, retries=1, timeout=10)
    with FakeServer().running() as server:
        server.reply = lambda request: (200, {"connection": "close"}, completion("yes"))
        answers = answerer(one, url=server.url).answer(numbered(conversation("a"), conversation("b")))
        assert len(next(answers)[1]) == 1
    _, answered = next(answers)
    assert isinstance(answered, UnansweredError)
    assert "failed 2 times" in str(answered)
    answers.close()


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, r"says 401 Unauthorized: no such key; name .* --api-key-env"),
        (404, r"model m\) says 404 Not Found: no such key; give the address up to /v1, and --model"),
    ],
)
def test_a_wrong_key_or_address_ends_at_once(server, answerer, status, message):
    server.reply = lambda request: (status, {}, "no such\n key")
    with pytest.raises(EndpointError, match=message):
        list(answerer().answer(numbered(*(conversation(str(number)) for number in range(50)))))
    assert len(server.requests) <= QUICK.concurrency


def test_an_unreachable_host_ends_at_once(answerer):
    with pytest.raises(EndpointError, match=r"endpoint \(http://127.0.0.1:9/v1, model m\) cannot be reached"):
        list(answerer(url="http://127.0.0.1:9/v1").answer(numbered(conversation("a"), conversation("b"))))


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://host/v1", "http://", "http://host:port/v1"])
def test_what_is_no_address_is_said(answerer, url):
    with pytest.raises(ValueError, match=r"is not an address; give one like http://"):
        list(answerer(url=url).answer(numbered(conversation("a"))))


def choice(**message):
    return {"choices": [{"message": {"content": "hi"} | message, "finish_reason": "stop"}]}


def test_a_gateway_that_reports_its_error_as_an_answer_is_asked_again(server, answerer):
    answers = iter([completion("a"), {"error": {"message": "overloaded"}}, completion("b")])
    server.reply = lambda request: (200, {}, next(answers))
    told = dict(answerer(replace(QUICK, concurrency=1)).answer(numbered(conversation("1"), conversation("2"))))
    assert not any(isinstance(answer, UnansweredError) for answer in told.values())
    assert len(server.requests) == 3


NO_COMPLETION = r"sent no chat completion .*; give the address up to /v1"
NO_TOKEN = r"token id \(999\) that the tokenizer .* give the base .* as --base"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("<html>hello</html>", NO_COMPLETION),
        ({"choices": []}, NO_COMPLETION),
        ({"choices": None}, NO_COMPLETION),
        ([], NO_COMPLETION),
        (choice(content=[{"type": "text", "text": "hi"}]), NO_COMPLETION),
        (completion("hi", token_ids=["hi"]) | {"prompt_token_ids": [1]}, NO_COMPLETION),
        (completion("hi", token_ids=[9, 999]) | {"prompt_token_ids": [5]}, NO_TOKEN),
        (choice(reasoning_content="2+2"), "start the server without a reasoning parser"),
    ],
)
def test_an_answer_that_cannot_be_learned_is_said(server, answerer, body, message):
    server.reply = lambda request: (200, {}, body)
    with pytest.raises(EndpointError, match=message):
        list(answerer().answer(numbered(conversation("a"))))


def test_an_answer_that_the_limit_cut_has_no_end_of_turn(server, answerer, tokenizer, tmp_path):
    server.reply = lambda request: (200, {}, completion("and so", finish_reason="length"))
    regenerate([conversation("a", "b")], answerer(), tmp_path / "a.jsonl", {})
    (sample,) = lines(tmp_path / "a.jsonl")
    assert spans(sample, tokenizer) == "a<end>[and so]<end>b<end>[and so]", "the template's own end is not learned"


def test_a_tokenizer_without_a_template_ends_at_once(server, answerer, tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(EndpointError, match="has no chat template"):
        list(answerer(tokenizer=bare).answer(numbered(conversation("a"))))


def _refusing(tokenizer, words):
    """A tokenizer whose template refuses conversations that begin with one of these."""
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = (
        f"{{% if messages[0].content in {words} %}}{{{{ raise_exception('roles') }}}}{{% endif %}}" + TEMPLATE
    )
    return strict


def test_the_first_conversation_may_be_refused_by_the_template(server, answerer, tokenizer, tmp_path, caplog):
    prompts = [Prompt(conversation(text).asked, place=f"line {n}") for n, text in enumerate("bac", start=1)]
    one_by_one = EndpointSettings(concurrency=1, retries=0)
    report = regenerate(prompts, answerer(one_by_one, _refusing(tokenizer, ["b"])), tmp_path / "out.jsonl", {})
    assert report.failed == 1
    assert "1 of 3 prompts are left out; the first one: line 1: conversation" in caplog.text
    assert "is refused by the chat template: roles" in caplog.text


def test_a_template_that_takes_nothing_ends_the_run(server, answerer, tokenizer):
    strict = _refusing(tokenizer, ["b"])
    with pytest.raises(EndpointError, match="is refused by the chat template: roles"):
        list(answerer(tokenizer=strict).answer(numbered(*[conversation("b")] * 40)))
    assert len(server.requests) < 40


def test_a_pause_of_a_year_is_bounded_and_said_once(server, answerer, caplog):
    replies = iter([(429, {"retry-after": str(365 * 24 * 3600)}, ""), (503, {"retry-after": "9" * 400}, "")])
    server.reply = lambda request: next(replies, YES)
    begin = time.monotonic()
    ((_, exchanges),) = answerer(longest_pause=0.05).answer(numbered(conversation("a")))
    assert len(exchanges) == 1
    assert time.monotonic() - begin < 5.0
    assert [message for message in caplog.messages if "asks to wait 31536000 s; it is asked again after" in message]
    assert sum("asks to wait" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, reason) for name in TOKENS for reason in ("stop", "length")),
        *(("chatml", reason) for reason in ("content_filter", None)),
    ],
)
def test_answers_end_under_real_templates_as_the_base_ended_them(server, answerer, tmp_path, name, reason):
    recorded = golden_conversation(name)
    asked = [tuple(turn for turn in recorded[:1] if turn["role"] == "system")]
    answers = {turn["content"]: answer["content"] for turn, answer in itertools.pairwise(recorded)}
    for turn in recorded:
        if turn["role"] == "user":
            asked[-1] += (turn,)
        elif turn["role"] == "assistant":
            asked.append(())
    server.reply = lambda request: (
        200, {}, completion(answers[request["messages"][-1]["content"]], finish_reason=reason),
    )  # fmt: skip
    tokenizer = byte_tokenizer(name)
    regenerate([Prompt(tuple(asked[:-1]))], answerer(tokenizer=tokenizer), tmp_path / "a.jsonl", {})
    found = [(sample["input_ids"], sample["loss_mask"]) for sample in lines(tmp_path / "a.jsonl")]
    expected = spoken(tokenizer, documents(tokenizer, recorded))
    if reason != "stop":
        assert all(special_tokens(tokenizer).search(text) for text in expected)
        expected = [special_tokens(tokenizer).split(text)[0] for text in expected]
    assert spoken(tokenizer, found) == expected


def spoken(tokenizer, parts):
    """The supervised stretches, in order."""
    texts = []
    for ids, mask in parts:
        for marked, run in itertools.groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
            texts += [tokenizer.decode([token for token, _ in run])] if marked else []
    return texts


def test_the_servers_own_tokens_are_taken_where_it_tells_them(server, answerer, tmp_path):
    server.reply = lambda request: (200, {}, completion("yes", token_ids=[9, 8, 0]) | {"prompt_token_ids": [5, 6, 7]})
    regenerate([conversation("a")], answerer(), tmp_path / "a.jsonl", {})
    assert lines(tmp_path / "a.jsonl") == [{"input_ids": [5, 6, 7, 9, 8, 0], "loss_mask": [0, 0, 0, 1, 1, 1]}]
    assert server.requests[0]["return_token_ids"] is True


def test_a_strict_server_is_asked_without_the_extra(server, answerer):
    def reply(request):
        if "return_token_ids" in request:
            return 400, {}, "Unrecognized request argument supplied: return_token_ids"
        return YES

    server.reply = reply
    no_retries = EndpointSettings(concurrency=1, retries=0, timeout=10)
    answers = dict(answerer(no_retries).answer(numbered(conversation("a"), conversation("b"))))
    assert [len(exchanges) for exchanges in answers.values()] == [1, 1]
    assert len(server.requests) == 3, "it is asked once"


def test_a_later_turn_without_an_answer_ends_the_conversation(server, answerer, tokenizer, tmp_path, caplog):
    server.reply = lambda request: (400, {}, "too long") if len(request["messages"]) > 1 else YES
    prompt = Prompt(conversation("a", "b", "c").asked, place="line 7")
    report = regenerate([prompt], answerer(), tmp_path / "a.jsonl", {})
    (sample,) = lines(tmp_path / "a.jsonl")
    assert spans(sample, tokenizer) == "a<end>[yes<end>]"
    assert report.failed == 0
    assert "1 conversations end before a turn that has no answer; the first: line 7: endpoint" in caplog.text


def test_an_empty_answer_that_was_cut_is_none(server, answerer):
    server.reply = lambda request: (200, {}, completion("", finish_reason="length"))
    ((_, answered),) = answerer().answer(numbered(conversation("a")))
    assert isinstance(answered, UnansweredError)


def test_a_stopped_run_asks_for_what_is_missing_only(server, answerer, tmp_path):
    prompts = [conversation(f"question {number}") for number in range(20)]
    regenerate(prompts, answerer(), tmp_path / "whole.jsonl", {})
    server.requests.clear()
    server.reply = lambda request, reply=server.reply: (time.sleep(hash(str(request)) % 7 / 500), reply(request))[1]
    with pytest.raises(KeyboardInterrupt):
        regenerate(prompts, Watched(answerer(), stop_after=7), tmp_path / "cut.jsonl", {})
    part = tmp_path / "cut.jsonl.part"
    kept = [f"question {json.loads(line)['prompt']}" for line in part.read_text().splitlines()[1:]]
    part.write_text(part.read_text() + '{"prompt": 3, "sam')
    server.requests.clear()
    regenerate(prompts, answerer(), tmp_path / "cut.jsonl", {})
    assert sorted(server.asked + kept) == sorted(f"question {number}" for number in range(20))
    assert lines(tmp_path / "cut.jsonl") == lines(tmp_path / "whole.jsonl")


def test_the_command_line_asks_a_server(server, base_directory, tmp_path, monkeypatch, caplog):
    (tmp_path / "chats.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "cd"}\n')
    words = ["regenerate", "--base", str(base_directory), "--out", str(tmp_path / "a.jsonl"), "--endpoint", server.url]
    assert main([word for word in words if word not in ("--base", str(base_directory))]) == 2
    assert "--endpoint needs --base" in caplog.text
    assert main(words) == 2
    assert "--prompts (train) holds code to continue" in caplog.text
    words += ["--prompts", str(tmp_path / "chats.jsonl"), "--model", "served", "--api-key-env", "SOME_KEY"]
    monkeypatch.delenv("SOME_KEY", raising=False)
    assert main(words) == 2
    assert "--api-key-env (SOME_KEY) is not set; export SOME_KEY=KEY" in caplog.text
    assert main([word for word in words if word not in ("--endpoint", server.url)]) == 2
    assert "--model belongs to a server" in caplog.text
    monkeypatch.setenv("SOME_KEY", "secret\n")
    assert main(words) == 0
    assert len(lines(tmp_path / "a.jsonl")) == 2
    assert server.authorization == ["Bearer secret"] * 2
    assert server.requests[0]["model"] == "served"


@pytest.mark.slow
def test_ctrl_c_ends_at_once_and_the_same_command_goes_on(server, base_directory, tmp_path):
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"prompt": f"q{n}"}) + "\n" for n in range(6)))
    hanging = threading.Event()

    def reply(request):
        if int(request["messages"][0]["content"][1:]) >= 3 and not hanging.wait(30):
            return 500, {}, "stuck"
        return YES

    server.reply = reply
    words = [sys.executable, "-m", "medusa", "data", "regenerate", "--base", base_directory, "--endpoint", server.url]
    words += ["--prompts", tmp_path / "chats.jsonl", "--out", tmp_path / "a.jsonl"]
    process = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "80"})
    part = tmp_path / "a.jsonl.part"
    while not part.exists() or part.read_bytes().count(b"\n") < 4:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - begin < 10, "it does not wait for requests under way"
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "stopped; the same command continues where it stopped"
    assert "Traceback" not in errors
    hanging.set()
    server.requests.clear()
    assert main([str(word) for word in words[4:]]) == 0
    assert sorted(server.asked) == ["q3", "q4", "q5"]
    assert len(lines(tmp_path / "a.jsonl")) == 6
