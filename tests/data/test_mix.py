"""A mixture of prompts: what is left out and why, what is held out, and what `data regenerate` can read."""

import json

import pytest
import yaml

from medusa.data.__main__ import main
from medusa.data.mix import Conversation, Mixer, write
from medusa.data.mixture import Mixture
from medusa.data.overlap import Overlap, evaluation_texts
from medusa.data.prompts import conversations
from medusa.data.sources import Source

LONG = " ".join(f"word{number}" for number in range(30))


def source(name, lines, **more):
    return {"name": name, "kind": "chat", "files": [f"{name}.txt"], "licence": "MIT", "url": "https://x", **more}, lines


@pytest.fixture
def mixture(tmp_path):
    """A function that writes sources and a mixture of them, and returns the mixture's file."""

    def made(*sources, **more):
        for about, lines in sources:
            if isinstance(lines, str):
                (tmp_path / about["files"][0]).write_text(lines, encoding="utf-8")
        path = tmp_path / "mixture.yaml"
        path.write_text(yaml.safe_dump({"sources": [about for about, _ in sources], **more}), encoding="utf-8")
        return path

    return made


def mixer(path, evaluations=(), seed=0):
    return Mixer(Mixture.read(path), path.parent, evaluations, lambda text: len(text.split()), seed)


def said(found):
    return sorted(one.turns[0] for one in found)


def test_what_shares_words_overlaps():
    texts = Overlap([LONG, "Who wrote Faust?"])
    assert f"Summarise: {LONG.upper()}!" in texts
    assert " ".join(LONG.split()[5:18]) in texts  # thirteen words
    assert " ".join(LONG.split()[5:17]) not in texts
    assert "who wrote faust" in texts
    assert "Who wrote Faust, and when?" not in texts
    assert "" not in texts


def test_every_prompt_is_kept_or_left_out_for_a_reason(mixture):
    lines = "\n".join(["asked once", "Asked once!", LONG, "a " * 60, "what b is", "what c is"])
    path = mixture(source("one", lines), source("two", "asked once\nwhat d is", most=5), most_tokens=50)
    mixed = mixer(path, ["not this one", LONG])
    assert said(mixed.mix(heldout=True)) == []
    found = mixed.mix(heldout=False)
    kept = {one.turns[0] for one in found}
    assert {"what b is", "what c is", "what d is"} <= kept and len(kept) == 4
    assert mixed.counts["one"] == {"kept": 3, "duplicate": 1, "evaluation": 1, "too long": 1}
    assert mixed.counts["two"] == {"kept": 1, "duplicate": 1}


def test_what_is_held_out_is_not_trained_on(mixture):
    path = mixture(source("ours", f"{LONG} again\nanother"), source("theirs", LONG, heldout=True))
    mixed = mixer(path)
    assert said(mixed.mix(heldout=True)) == [LONG]
    assert said(mixed.mix(heldout=False)) == ["another"]
    assert mixed.counts["ours"] == {"kept": 1, "held out": 1}


def test_the_order_follows_from_the_seed_and_most_takes_any(mixture):
    lines = "\n".join(f"question {number}" for number in range(200))
    path = mixture(source("one", lines, most=50))
    first, again, other = (mixer(path, seed=seed).mix(heldout=False) for seed in (0, 0, 1))
    assert first == again != other
    assert len(first) == 50 and said(first) != said(other)


def test_long_prompts_have_their_share(mixture):
    lines = "\n".join(
        ["long " * 20 + str(number) for number in range(50)] + [f"short {number}" for number in range(90)]
    )
    path = mixture(source("one", lines), long_tokens=10, long_share=0.1)
    mixed = mixer(path)
    found = mixed.mix(heldout=False)
    assert sum(one.tokens > 10 for one in found) == 10
    assert mixed.counts["one"] == {"kept": 100, "long": 40}


def test_second_turns_come_by_chance(mixture):
    lines = "\n".join(f"question {number}" for number in range(200))
    path = mixture(source("one", lines), second_turns=["Why?"], second_share=0.25)
    found = mixer(path).mix(heldout=False)
    assert 30 < sum(one.turns[1:] == ["Why?"] for one in found) < 70
    assert all(len(one.turns) == 1 for one in found if one.turns[1:] != ["Why?"])


def test_records_fill_questions_and_empty_fields_leave_their_lines_out(mixture):
    about, _ = source("one", None, files=["one.jsonl"], asks=["Do: {task}\n{input}"])
    path = mixture((about, None))
    records = [{"task": "add", "input": "1 and 2"}, {"task": "sing", "input": ""}]
    (path.parent / "one.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert said(mixer(path).mix(heldout=False)) == ["Do: add\n1 and 2", "Do: sing"]
    (path.parent / "one.jsonl").write_text(json.dumps({"question": "?"}))
    with pytest.raises(ValueError, match=r"line 1 has none of the fields of 'Do: .*'; its fields are question"):
        mixer(path).mix(heldout=False)


def test_sentences_of_a_treebank_and_turns_of_conversations(mixture):
    german, _ = source("german", None, files=["*.conllu"], asks=["Translate: {text}"])
    chats, _ = source("chats", None, files=["chats.jsonl"])
    path = mixture((german, None), (chats, None))
    (path.parent / "a.conllu").write_text("# sent_id = 1\n# text = Guten Tag.\n1\tGuten\n\n# text = Ja.\n")
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "Bye"},
    ]
    (path.parent / "chats.jsonl").write_text(json.dumps({"messages": turns}))
    found = mixer(path).mix(heldout=False)
    assert sorted(one.turns for one in found) == [["Hi", "Bye"], ["Translate: Guten Tag."], ["Translate: Ja."]]


def test_regenerate_reads_what_is_written(tmp_path):
    found = [Conversation([f"question {number}", "Why?"], "one", "chat", 2) for number in range(5)]
    write(found, tmp_path / "train", 2)
    files = sorted((tmp_path / "train").iterdir())
    assert [file.name for file in files] == ["000.jsonl", "001.jsonl", "002.jsonl"]
    prompts = list(conversations(Source(str(files[1]))))
    assert [prompt.asked[0][0]["content"] for prompt in prompts] == ["question 2", "question 3"]
    assert [[message["content"] for message in asked] for asked in prompts[0].asked] == [["question 2"], ["Why?"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": []}, r"lists no sources; write sources: "),
        ({"sources": [{"name": "one"}]}, r"source 1 lacks kind; it needs name, kind, files, licence, url"),
        ({"sources": ["one"]}, r"source 1 \('one'\) must be a mapping of name, "),
        ({"most_token": 5}, r"most_token is not known; known are sources, "),
        ({"second_turns": "Why?"}, r"second_turns \('Why\?'\) must be <class 'list'>"),
    ],
)
def test_a_wrong_mixture_is_one_clear_error(mixture, change, message):
    with pytest.raises(ValueError, match=message):
        Mixture.read(mixture(source("one", "x"), **change))


def test_a_key_that_is_there_twice_is_refused(mixture):
    path = mixture(source("one", "x"), long_share=0.1)
    path.write_text(path.read_text() + "long_share: 0.2\n")
    with pytest.raises(ValueError, match=r"mixture .* is not YAML in UTF-8: long_share is there twice, .*line 1"):
        Mixture.read(path)


def test_the_command_writes_both_sides_and_a_report(mixture, tmp_path, caplog):
    caplog.set_level("INFO")
    path = mixture(source("ours", "what b is\nwhat c is\nWho wrote it?"), source("theirs", "held out?", heldout=True))
    questions = tmp_path / "question.jsonl"
    questions.write_text(json.dumps({"question_id": 1, "category": "x", "turns": ["Who wrote it?"]}))
    assert list(evaluation_texts(questions)) == ["Who wrote it?"]
    (tmp_path / "other.jsonl").write_text('{"prompt": "Why?"}\n{"instruction": "Add.", "output": "x"}\n')
    assert list(evaluation_texts(tmp_path / "other.jsonl")) == ["Why?", "Add."]
    out = tmp_path / "out"
    command = ["mix", str(path), "--sources", str(tmp_path), "--out", str(out), "--without", str(questions)]
    assert main(command) == 0
    assert len((out / "train" / "000.jsonl").read_text().splitlines()) == 2
    assert json.loads((out / "heldout" / "000.jsonl").read_text())["messages"][0]["content"] == "held out?"
    report = json.loads((out / "report.json").read_text())
    assert report["prompts"] == {"heldout": 1, "train": 2}
    assert report["sources"]["ours"]["evaluation"] == 1
    assert main(command) == 0 and "is there already" in caplog.text
    (tmp_path / "ours.txt").unlink()
    assert main([*command[:4], "--out", str(tmp_path / "other")]) == 1
    assert "source ours (ours.txt) has no file below" in caplog.text and "get it from https://x" in caplog.text
