import json

import pytest

from data import EMBEDDED, resolve_base_name
from data import regenerate as module
from data.__main__ import main
from data.regenerate import Settings, file_prompts, regenerate


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def prompts(base):
    return [base.tokenizer(text).input_ids for text in ("def f", "a", "import os, sys", "x = 1", "class B")]


def test_answers_are_the_bases_own_and_only_they_are_supervised(model, prompts, tmp_path):
    tokens = regenerate(model, prompts, tmp_path / "a.jsonl", Settings(max_new_tokens=12, batch=2))
    samples = lines(tmp_path / "a.jsonl")
    assert len(samples) == len(prompts)
    assert tokens == sum(sum(s["loss_mask"]) for s in samples)
    for sample in samples:
        start = sample["loss_mask"].index(1)
        prompt, answer = sample["input_ids"][:start], sample["input_ids"][start:]
        assert prompt in prompts
        assert answer == model.generate(prompt, max_new_tokens=12, nodes=1).tokens
        assert set(sample["loss_mask"][start:]) == {1}


def test_a_stopped_run_goes_on_and_gives_the_same_file(model, prompts, tmp_path, monkeypatch):
    settings = Settings(max_new_tokens=8, batch=2)
    regenerate(model, prompts, tmp_path / "whole.jsonl", settings)
    calls = []
    generate = model.generate

    def stop_at_the_second(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(*args, **options)

    monkeypatch.setattr(model, "generate", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        regenerate(model, prompts, tmp_path / "cut.jsonl", settings)
    part = tmp_path / "cut.jsonl.part"
    part.write_text(part.read_text() + '{"input_ids": [1, 2')
    regenerate(model, prompts, tmp_path / "cut.jsonl", settings)
    assert lines(tmp_path / "cut.jsonl") == lines(tmp_path / "whole.jsonl")
    assert len(calls) == 4, "the first batch was not answered again"
    assert not part.exists()


def test_an_unfinished_file_of_other_settings_is_refused(model, prompts, tmp_path):
    (tmp_path / "a.jsonl.part").write_text('{"other": 1}\n')
    with pytest.raises(ValueError, match="begun with other prompts"):
        regenerate(model, prompts, tmp_path / "a.jsonl", Settings(max_new_tokens=8))


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": "hi", "response": "there"}, "hi<end>"),
        ({"prompt": "hi"}, "hi<end>"),
        ({"messages": [{"role": "user", "content": "yo"}]}, "yo<end>"),
        ({"messages": [{"role": "user", "content": "yo"}, {"role": "assistant", "content": "x"}]}, "yo<end>"),
    ],
)
def test_prompts_come_from_conversations_with_or_without_answers(model, tmp_path, record, prompt):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (ids,) = file_prompts(model, path)
    assert model.base.tokenizer.decode(ids) == prompt


@pytest.mark.parametrize("record", [{"text": "a document"}, {"messages": []}, {"messages": [{"role": "assistant"}]}])
def test_lines_without_a_prompt_are_named(model, tmp_path, record):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"prompt": "fine"}\n' + json.dumps(record) + "\n")
    with pytest.raises(ValueError, match="line 2: no prompt"):
        file_prompts(model, path)


def test_other_prompts_do_not_continue_a_file(model, prompts, tmp_path, monkeypatch):
    generate = model.generate
    monkeypatch.setattr(model, "generate", lambda *args, **options: (_ for _ in ()).throw(KeyboardInterrupt))
    settings = Settings(max_new_tokens=8, batch=2)
    with pytest.raises(KeyboardInterrupt):
        regenerate(model, prompts, tmp_path / "a.jsonl", settings)
    monkeypatch.setattr(model, "generate", generate)
    with pytest.raises(ValueError, match="begun with other prompts"):
        regenerate(model, [[7], *prompts[1:]], tmp_path / "a.jsonl", settings)


def test_the_command_line_writes_a_file_once(base_directory, tmp_path, monkeypatch):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"prompt": "hi", "response": "there"}) + "\n")
    out = tmp_path / "out.jsonl"
    words = ["regenerate", "--base", str(base_directory), "--prompts", str(path), "--out", str(out)]
    assert main([*words, "--max-new-tokens", "5"]) == 0
    assert len(lines(out)) == 1
    monkeypatch.setattr(module, "regenerate", None)
    assert main(words) == 0, "the file is kept"


def test_wrong_use_and_failures_have_their_exit_status(tmp_path, capsys):
    with pytest.raises(SystemExit) as wrong:
        main(["regenerate", "--out", "x", "--count", "0"])
    assert wrong.value.code == 2
    assert "at least 1" in capsys.readouterr().err
    assert main(["regenerate", "--base", str(tmp_path / "no" / "base"), "--out", str(tmp_path / "x")]) == 1


def test_only_the_embedded_name_is_special():
    assert resolve_base_name("some/base") == "some/base"
    assert resolve_base_name(EMBEDDED).endswith("data/embedded/base")
