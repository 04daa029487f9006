"""The command line of the chat: flags, errors, exit statuses; with a model here, or behind a server."""

import io
import re
import shutil

import pytest
import torch

from medusa import MedusaModel, Tree
from medusa.attention import BACKENDS
from medusa.cpu import native
from medusa.drafters.ngram import NgramCache
from medusa.io.tree_file import save_tree
from medusa.serve.chat import __main__ as chat
from medusa.serve.chat.remote import RemoteModel
from medusa.serve.chat.terminal import Terminal
from medusa.serve.model_options import ATTENTION, DEFAULT_HEADS, ModelOptions
from medusa.serve.settings import ApiSettings
from tests.serve.fake_model import Person
from tests.serve.live import serving


@pytest.mark.parametrize(
    "flags",
    [
        "--bogus", "--nodes 0", "--nodes x", "--temperature -1", "--acceptance no", "--drafter eagle",
        "--attention paged", "--acceptance sampling", "--acceptance greedy --temperature 0.5",
        "--nodes 8 --tree tree.json", "--drafter heads --tree tree.json", "--endpoint http://x/v1 --base base",
        "--endpoint http://x/v1 --int8", "--model small",
    ],
)  # fmt: skip
def test_wrong_use_exits_2(flags, capsys):
    with pytest.raises(SystemExit) as raised:
        chat.main(flags.split())
    assert raised.value.code == 2
    assert flags.rsplit(maxsplit=1)[-1].lstrip("-") in capsys.readouterr().err


def test_help_says_what_is_lossy(capsys):
    with pytest.raises(SystemExit) as raised:
        chat.main(["--help"])
    assert raised.value.code == 0
    text = capsys.readouterr().out
    assert "LOSSY" in text
    assert "runs/demo/heads" in text
    assert "(default: 512)" in text
    assert "default: None" not in text


def test_attention_names_are_those_of_the_registry():
    assert ("auto", *BACKENDS) == ATTENTION


@pytest.fixture(scope="module")
def heads(speaker, tmp_path_factory):
    """Three heads of the tiny base, saved."""
    return str(speaker.save_pretrained(tmp_path_factory.mktemp("chat") / "heads"))


@pytest.fixture
def say(monkeypatch):
    """Run the chat over lines of input; returns its exit status."""

    def run(lines, *flags):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines), "utf-8"))
        return chat.main(["--max-new-tokens", "12", *map(str, flags)])

    return run


def test_a_static_tree_reaches_the_model(say, heads, tmp_path, capsys):
    path = tmp_path / "tree.json"
    assert say(b"hello\n", "--heads", heads, "--tree", path) == 1
    assert f"tree ({path}) does not exist; make one with medusa.save_tree" in capsys.readouterr().err
    save_tree(Tree.full((2, 1)), path)
    assert say(b"hello\n", "--heads", heads, "--tree", path) == 0
    assert capsys.readouterr().out
    save_tree(Tree.chain(4), path)
    say(b"hello\n", "--heads", heads, "--tree", path)
    assert "tree depth (4) exceeds the number of heads (3)" in capsys.readouterr().err


@pytest.mark.skipif(not native.available(), reason="no compiler")
def test_completions_are_drafted_from_in_the_next_chat(say, heads, tmp_path, capsys):
    told = []
    for _ in range(2):
        assert say(b"hello\n", "--heads", heads, "--ngrams", tmp_path / "ngrams") == 0
        told.append(capsys.readouterr())
        told.append(len(NgramCache.load(tmp_path / "ngrams")))
    assert told[0].out == told[2].out
    assert 0 < told[1] < told[3]
    assert "hybrid+ngram" in told[0].err


def test_flags_reach_the_answer(say, heads, capsys):
    options = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 5, "nodes": 8}
    options |= {"drafter": "heads", "repetition_penalty": 1.2, "acceptance": "typical", "max_new_tokens": 30}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
    assert say(b"hello\n", *flags, "--heads", heads, "--system", "be brief", "--dtype", "float32") == 0
    streams = capsys.readouterr()
    assert "3 recurrent heads" in streams.err
    model = MedusaModel.from_pretrained(heads, dtype=torch.float32)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    expected = model.generate(model.chat_prompt(messages), **options)
    assert streams.out.strip() == expected.text.strip()


def test_heads_that_cannot_be_used_are_one_message(say, heads, tmp_path, capsys):
    broken = shutil.copytree(heads, tmp_path / "broken")
    (broken / "heads.safetensors").write_bytes(b"no tensors")
    for directory, words in ((broken, "heads.safetensors"), (tmp_path / "nowhere", "not found: name others")):
        assert say(b"hello\n", "--heads", directory) == 1
        streams = capsys.readouterr()
        assert streams.out == ""
        assert len(streams.err.splitlines()) == 1
        assert words in streams.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_device_that_is_not_there(say, heads, capsys):
    assert say(b"", "--heads", heads, "--device", "cuda:1") == 1
    assert "device (cuda:1) is not there" in capsys.readouterr().err


class Interrupted(io.StringIO):
    """An input at which Ctrl-C is pressed."""

    def readline(self, *_):
        raise KeyboardInterrupt


def test_ctrl_c_outside_of_an_answer(heads, monkeypatch):
    monkeypatch.setattr("sys.stdin", Interrupted())
    assert chat.main(["--heads", heads]) == 130


def test_input_that_is_not_utf8_does_not_end_the_chat(say, heads, capsys):
    assert say("caf\ufffd\nhello\n".encode(), "--heads", heads) == 0
    expected = capsys.readouterr().out
    assert say(b"caf\xe9\nhello\n", "--heads", heads) == 0
    assert capsys.readouterr().out == expected


def test_a_line_that_fails_shows_in_the_status_of_a_pipe(say, heads, capsys):
    assert say(b"/nonsense\nhello\n", "--heads", heads) == 1
    out, notes = capsys.readouterr()
    assert out.strip() and "unknown command (/nonsense)" in notes


@pytest.fixture(scope="module")
def url(speaker):
    with serving(speaker) as server:
        yield f"{server.url}/v1"


def test_a_model_behind_a_server_writes_what_it_writes_here(url, speaker):
    remote = RemoteModel(url)
    messages = [{"role": "user", "content": "say hello"}]
    assert remote.chat_prompt(messages) == speaker.chat_prompt(messages)
    assert remote.base.context_length == speaker.base.context_length
    options = {"max_new_tokens": 20, "temperature": 0.7, "seed": 3, "nodes": 4, "drafter": "heads", "prefix": None}
    streams = [model.stream(speaker.chat_prompt(messages), **options) for model in (remote, speaker)]
    pieces = [[(str(piece), piece.drafted) for piece in stream] for stream in streams]
    theirs, ours = (stream.output for stream in streams)
    assert pieces[0] == pieces[1]
    assert (theirs.text, len(theirs.tokens), theirs.steps) == (ours.text, len(ours.tokens), ours.steps)


def test_the_chat_asks_a_server(url, say, capsys):
    assert say(b"say hello\n/stats\n", "--endpoint", url) == 0
    out, notes = capsys.readouterr()
    assert out.strip() and "model  small at" in notes and "tokens/step" in notes


@pytest.mark.parametrize(
    ("flags", "message"), [("--model other", "model (other) is not served"), ("--drafter mtp", "400: ")]
)
def test_what_a_server_refuses_is_said(url, say, capsys, flags, message):
    assert say(b"say hello\n", "--endpoint", url, *flags.split()) == 1
    assert message in capsys.readouterr().err


def test_keys_are_needed_where_they_are(speaker, say, monkeypatch, capsys):
    with serving(speaker, api=ApiSettings(api_keys=frozenset(["secret"]))) as live:
        assert say(b"say hello\n", "--endpoint", f"{live.url}/v1") == 1
        assert "401: API key is missing" in capsys.readouterr().err
        monkeypatch.setenv("MEDUSA_API_KEY", "secret")
        assert say(b"say hello\n", "--endpoint", f"{live.url}/v1") == 0


def test_an_address_that_is_no_api_is_said(url, say, capsys):
    for wrong in (f"{url.removesuffix('/v1')}/docs?", url.removesuffix("/v1"), "nonsense"):
        assert say(b"", "--endpoint", wrong) == 1
        assert re.search(rf"endpoint \({re.escape(wrong)}/models\) .*; (give|start)", capsys.readouterr().err)


def test_a_chat_without_trained_heads_offers_smollm2(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for typed, base in (("\n", "smollm2"), ("y\n", "smollm2"), ("n\n", None), ("", None)):
        out = io.StringIO()
        assert chat._offered(Person(io.StringIO(typed), out, out), ModelOptions()).base == base
        assert "no heads in runs/demo/heads yet" in out.getvalue()
    pipe = Terminal(io.StringIO("y\n"), out, out)
    assert chat._offered(pipe, ModelOptions()).base is None
    with pytest.raises(FileNotFoundError, match=r"run ./launch\.sh first, .* take --base smollm2"):
        ModelOptions().load()
    assert ModelOptions(base="embedded").heads_or_default() is None, "who names a base gets it, with heads or without"
    (tmp_path / DEFAULT_HEADS).mkdir(parents=True)
    out = io.StringIO()
    assert chat._offered(Person(io.StringIO("y\n"), out, out), ModelOptions()).base is None
    assert not out.getvalue()
    assert ModelOptions(base="embedded").heads_or_default() == DEFAULT_HEADS


def test_a_template_of_a_file_takes_the_place_of_the_base_s(base_directory, tmp_path):
    path, question = tmp_path / "template.jinja", [{"role": "user", "content": "hi"}]
    options = ModelOptions(base=str(base_directory), device="cpu", chat_template=str(path))
    with pytest.raises(ValueError, match=r"chat template \(.*template\.jinja\) cannot be read: .*; give a Jinja"):
        options.load()
    path.write_text("{% for message in messages %}<{{ message['content'] }}>{% endfor %}")
    model = options.load()
    assert model.base.tokenizer.decode(model.chat_prompt(question)) == "<hi>"
    path.write_text("{% for message in messages %}")
    with pytest.raises(ValueError, match=r"chat template of the base .* refuses this: Unexpected end of template"):
        options.load()


def test_nobody_there(say, capsys):
    assert say(b"", "--endpoint", "http://127.0.0.1:9/v1") == 1
    assert "does not answer" in capsys.readouterr().err
