"""What ``medusa serve --record`` writes, and what it leaves out."""

import json
import logging
import os
import stat

import pytest

from medusa.data.files import file_records
from medusa.data.sources import read_samples
from medusa.serve import recorder as recording
from medusa.serve.recorder import PARTS, RECORDED, Recorder
from medusa.serve.server import build_parser, main
from tests.serve.live import serving

CHAT, COMPLETIONS = "v1/chat/completions", "v1/completions"


def lines(directory):
    """All records, in the order of their files."""
    return [json.loads(line) for path in sorted(directory.glob(RECORDED)) for line in path.open()]


@pytest.fixture
def live(speaker, tmp_path):
    with serving(speaker, recorder=Recorder(tmp_path / "kept", 1 << 20)) as server:
        yield server


def test_records_are_the_tokens_that_were_read_and_written_at_every_endpoint(live, speaker, tmp_path):
    with live.client() as client:
        turns = [{"role": "user", "content": "say hello"}]
        options = {"model": "small", "temperature": 0}
        chat = client.chat.completions.create(messages=turns, max_tokens=5, **options)
        client.responses.create(input="say hello", max_output_tokens=5, **options)
        sampled = client.completions.create(prompt="ab", max_tokens=6, n=2, seed=1, model="small")
        for delta in client.completions.create(prompt="abc", max_tokens=4, stream=True, **options):
            assert delta.choices
    live.stop()
    asked, prompt = speaker.chat_prompt(turns), [speaker.base.tokenizer(text).input_ids for text in ("ab", "abc")]
    found = lines(tmp_path / "kept")
    read = [record["input_ids"][: record["loss_mask"].index(1)] for record in found]
    assert read == [asked, asked, prompt[0], prompt[0], prompt[1]]
    answers = [record["input_ids"][record["loss_mask"].index(1) :] for record in found]
    whole = speaker.generate(asked, max_new_tokens=5)
    assert answers[0] == answers[1] == whole.tokens
    assert whole.text == chat.choices[0].message.content
    decoded = {speaker.base.tokenizer.decode(ids, skip_special_tokens=True) for ids in answers[2:4]}
    assert decoded == {choice.text for choice in sampled.choices}
    assert answers[4] == speaker.generate(prompt[1], max_new_tokens=4).tokens
    (file,) = (tmp_path / "kept").glob(RECORDED)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700
    samples = read_samples(tmp_path / "kept", speaker.base.tokenizer)
    assert [int(sample.loss_mask.sum()) for sample in samples] == [5, 5, 6, 6, 4]


def test_what_is_not_recorded(live, tmp_path):
    with live.client() as client:
        options = {"model": "small", "prompt": "ab", "temperature": 0}
        client.completions.create(max_tokens=5, extra_body={"store": False}, **options)
        client.completions.create(max_tokens=1, **options)
        client.completions.create(max_tokens=0, echo=True, logprobs=1, **options)
        typical = {"speculation": {"acceptance": "typical"}}
        client.completions.create(max_tokens=5, extra_body=typical, **options | {"temperature": 1})
        with client.completions.create(max_tokens=200, stream=True, **options) as left:
            next(iter(left))
        client.completions.create(max_tokens=3, extra_body={"store": True}, **options)
    live.stop()
    assert [sum(record["loss_mask"]) for record in lines(tmp_path / "kept")] == [3]


def test_the_oldest_files_make_room_and_others_stay(tmp_path, monkeypatch):
    names = iter(f"{number:02d}" for number in range(1000))
    monkeypatch.setattr(recording.secrets, "token_hex", lambda _: next(names))
    monkeypatch.setattr(recording.time, "strftime", lambda *_: "now")
    (tmp_path / "mine.jsonl").write_text("{}\n")
    recorder = Recorder(tmp_path, 4000)
    for number in range(300):
        recorder.add([number], [1, 2])
    recorder.close()
    files = sorted(tmp_path.glob(RECORDED))
    assert 2 < len(files) <= PARTS
    assert sum(path.stat().st_size for path in files) <= 4000
    last = [record["input_ids"][0] for record in lines(tmp_path)]
    assert last == list(range(last[0], 300))
    assert (tmp_path / "mine.jsonl").exists()


def test_a_record_may_be_longer_than_a_file_but_not_than_all(tmp_path):
    recorder = Recorder(tmp_path, 4000)
    for number in range(20):
        recorder.add([1], [number] * 500)
        recorder.add([2], [number] * 5000)
    recorder.close()
    assert 0 < sum(path.stat().st_size for path in tmp_path.glob(RECORDED)) <= 4000
    assert {record["input_ids"][0] for record in lines(tmp_path)} == {1}


def test_a_file_that_another_server_removes_is_begun_again(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path, 1 << 20)
    recorder._write(b"[1]\n")
    next(tmp_path.glob(RECORDED)).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(recording.os, "write", lambda *_: 1)
        with pytest.raises(OSError, match="is full"):
            recorder._write(b"[2]\n")
    recorder._write(b"[3]\n")
    assert lines(tmp_path) == [[3]]


def test_a_file_that_is_being_written_can_be_read(tmp_path, caplog):
    path = tmp_path / "recorded-1.jsonl"
    path.write_text('{"input_ids": [1, 2], "loss_mask": [0, 1]}\n{"input_i')
    with caplog.at_level(logging.WARNING):
        assert len([*file_records(tmp_path)]) == 1
    assert "an unfinished last line is left out" in caplog.text
    path.rename(tmp_path / "mine.jsonl")
    with pytest.raises(ValueError, match="line 2: not JSON"):
        [*file_records(tmp_path)]


def test_a_full_disk_leaves_no_half_of_a_line_and_costs_no_later_one(tmp_path, monkeypatch, caplog):
    write = os.write
    monkeypatch.setattr(recording.os, "write", lambda file, line: write(file, line[: len(line) // full[0]]))
    full = [1]
    recorder = Recorder(tmp_path, 1 << 20)

    def add(first):
        recorder._write(json.dumps([first]).encode() + b"\n")

    full[0] = 2
    with pytest.raises(OSError, match="is full; free space"):
        add(0)
    assert not list(tmp_path.iterdir()), "no empty file"
    full[0] = 1
    add(1)
    full[0] = 2
    for _ in range(2):
        with pytest.raises(OSError, match="is full; free space"):
            add(2)
    full[0] = 1
    add(3)
    assert lines(tmp_path) == [[1], [3]]
    full[0] = 2
    with caplog.at_level(logging.WARNING):
        recorder.add([1], [2, 3])
        recorder.add([1], [2, 3])
        recorder.close()
    said = [record.message for record in caplog.records]
    assert said == [f"requests are not recorded: disk of {tmp_path} is full; free space"], "once"
    assert lines(tmp_path) == [[1], [3]]


def test_a_directory_that_cannot_be_written_is_one_error_before_anything_is_loaded(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    assert main(["--base", "small", "--port", "0", "--record", str(tmp_path / "file")]) == 1
    assert "file" in caplog.text
    assert "loaded" not in caplog.text
    with pytest.raises(SystemExit):
        build_parser().parse_args(["--record", "x", "--record-most", "much"])
