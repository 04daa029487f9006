import json
import logging
import shutil
from pathlib import Path

import pytest

from medusa.data.__main__ import main


@pytest.fixture
def words(tmp_path: Path, base_directory: Path) -> list[str]:
    path = tmp_path / "samples.jsonl"
    records = [{"prompt": f"hi {n}", "response": "there" * n} for n in range(1, 5)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return ["inspect", "--base", str(base_directory), "--source", str(path)]


def test_trained_text_is_between_brackets(words: list[str], capsys: pytest.CaptureFixture, caplog) -> None:
    assert main([*words, "--index", "1", "--count", "2", "--row-tokens", "20"]) == 0
    assert capsys.readouterr().out == (
        "--- sample 1: 16 tokens, 11 trained\nhi 2<end>⟦therethere<end>⟧\n"
        "--- sample 2: 21 tokens, 16 trained\nhi 3<end>⟦theretherethere<end>⟧\n"
    )


def test_a_terminal_shows_colours(
    words: list[str], capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main([*words, "--count", "1"]) == 0
    special = "\x1b[1m<end>\x1b[0m"
    expected = f"\x1b[2mhi 1{special}\x1b[2m\x1b[0m\x1b[32mthere{special}\x1b[32m\x1b[0m\n"
    assert capsys.readouterr().out.endswith(expected)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main([*words, "--count", "1"]) == 0
    assert capsys.readouterr().out.endswith("hi 1<end>⟦there<end>⟧\n")


def test_figures_go_to_a_file(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "out.json"
    assert main([*words, "--count", "1", "--row-tokens", "20", "--limit", "3", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report.pop("shown") == [{"index": 0, "text": "hi 1<end>⟦there<end>⟧"}]
    assert report.pop("source") == words[-1]
    assert report == {"row_tokens": 20, "samples": 3, "tokens": 48, "trained_tokens": 33, "longest": 21, "cut": 1}
    assert not capsys.readouterr().out


def test_failures_are_one_message(words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert main([*words, "--count", "0"]) == 0
    assert caplog.messages[-1].startswith("4 samples of at most 1000 records: 74 tokens")
    assert main([*words, "--base", str(tmp_path)]) == 1
    assert caplog.messages[-1].startswith(f"tokenizer of the base ({tmp_path}) cannot be loaded: ")
    assert "\n" not in caplog.messages[-1]
    assert main([*words, "--index", "9"]) == 1
    assert caplog.messages[-1] == "sample (--index 9) does not exist; the 4 begin at 0"
    assert main([*words[:-1], "none.jsonl"]) == 1
    assert caplog.messages[-1].startswith("sample file (none.jsonl) does not exist; give")
    with pytest.raises(SystemExit) as wrong:
        main([*words, "--count", "-1"])
    assert wrong.value.code == 2
    assert main([*words, "--streaming", "--limit", "0"]) == 2
    assert caplog.messages[-1] == "--streaming needs --limit, the number of records to read; give it"


def test_a_base_may_write_more_tokens_than_its_tokenizer_has(tmp_path: Path, base_directory: Path, caplog) -> None:
    words = ["inspect", "--base", str(shutil.copytree(base_directory, tmp_path / "base")), "--count", "0"]
    config = json.loads((base_directory / "config.json").read_text())
    samples = tmp_path / "samples.jsonl"
    samples.write_text(json.dumps({"input_ids": [1, config["vocab_size"]], "loss_mask": [0, 1]}) + "\n")
    assert main([*words, "--source", str(samples)]) == 1
    assert f"outside 0..{config['vocab_size'] - 1}" in caplog.messages[-1]
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 1}))
    assert main([*words, "--source", str(samples)]) == 0


def test_a_terminal_obeys_no_data_set(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch
) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e ok\n\tß"
    (tmp_path / "samples.jsonl").write_text(json.dumps({"prompt": evil, "response": evil}) + "\n")
    for coloured in (False, True):
        monkeypatch.setattr("sys.stdout.isatty", lambda coloured=coloured: coloured)
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert main([*words, "--count", "1"]) == 0
        shown = capsys.readouterr().out
        for own in ("\x1b[32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"):
            shown = shown.replace(own, "")
        assert not set(shown) & set("\x1b\x07\x9b\r\u202e")
        assert r"\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e ok" + "\n\tß" in shown


def test_errors_show_keys_harmlessly(words: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "samples.jsonl").write_text(json.dumps({"\x1b[2J": 1}) + "\n")
    assert main(words) == 1
    assert "\x1b" not in caplog.text
    assert r"keys (\x1b[2J) are not those of a known sample" in caplog.text


def test_prompts_are_told_from_answers(tmp_path, capsys, caplog):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Explain rain."}\n{"messages": [{"role": "user", "content": "Name rivers."}]}\n')
    assert main(["inspect", "--source", str(path)]) == 1
    assert "none of its 2 records has an answer to learn" in caplog.messages[-1]
    assert caplog.messages[-1].endswith(
        "; if they are prompts, let the base answer them (data regenerate), or learn from them (data.supervise: all)"
    )
