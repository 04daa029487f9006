"""The chat with a model behind a server."""

import io

import pytest

from medusa import MedusaModel
from serve.chat import __main__ as chat
from serve.chat.remote import RemoteModel
from serve.settings import ApiSettings
from tests.serve.live import serving


@pytest.fixture(scope="module")
def speaker(base, make_heads):
    return MedusaModel(base, make_heads())


@pytest.fixture(scope="module")
def live(speaker):
    with serving(speaker) as server:
        yield server


def test_a_model_behind_a_server_writes_what_it_writes_here(live, speaker):
    remote = RemoteModel(f"{live.url}/v1")
    messages = [{"role": "user", "content": "say hello"}]
    assert remote.chat_prompt(messages) == speaker.chat_prompt(messages)
    assert remote.base.context_length == speaker.base.context_length
    options = {"max_new_tokens": 20, "temperature": 0.7, "seed": 3, "nodes": 4, "drafter": "heads", "prefix": None}
    streams = [model.stream(speaker.chat_prompt(messages), **options) for model in (remote, speaker)]
    pieces = [[(str(piece), piece.drafted) for piece in stream] for stream in streams]
    theirs, ours = (stream.output for stream in streams)
    assert pieces[0] == pieces[1]
    assert (theirs.text, len(theirs.tokens), theirs.steps) == (ours.text, len(ours.tokens), ours.steps)


def test_the_chat_asks_a_server(live, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("say hello\n/stats\n"))
    assert chat.main(["--endpoint", f"{live.url}/v1", "--max-new-tokens", "10"]) == 0
    out, notes = capsys.readouterr()
    assert out.strip() and "model  small at" in notes and "tokens/step" in notes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "other"], "model (other) is not served"),
        (["--max-new-tokens", "20", "--drafter", "mtp"], "400: "),
    ],
)
def test_what_a_server_refuses_is_said(live, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("sys.stdin", io.StringIO("say hello\n"))
    chat.main(["--endpoint", f"{live.url}/v1", *arguments])
    assert message in capsys.readouterr().err


def test_keys_are_needed_where_they_are(speaker, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("say hello\n"))
    with serving(speaker, api=ApiSettings(api_keys=frozenset(["secret"]))) as live:
        assert chat.main(["--endpoint", f"{live.url}/v1"]) == 1
        assert "401: API key is missing" in capsys.readouterr().err
        monkeypatch.setenv("MEDUSA_API_KEY", "secret")
        monkeypatch.setattr("sys.stdin", io.StringIO("say hello\n"))
        assert chat.main(["--endpoint", f"{live.url}/v1", "--max-new-tokens", "5"]) == 0


def test_nobody_there(capsys):
    assert chat.main(["--endpoint", "http://127.0.0.1:9/v1"]) == 1
    assert "does not answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--endpoint", "http://x/v1", "--base", "smollm2"], "leave --base out"),
        (["--model", "x"], "name the server with --endpoint"),
    ],
)
def test_flags_that_contradict_each_other(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        chat.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
