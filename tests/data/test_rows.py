import errno
import json
import logging
import multiprocessing
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data.packing import PackedRows, pack
from data.rows import open_rows
from data.sources import Source, read_samples


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps({"text": "word " * (1 + n % 9)}) + "\n" for n in range(50)))
    return Source(str(path))


def _same(a: PackedRows, b: PackedRows) -> bool:
    fields = ("input_ids", "position_ids", "loss_mask", "lengths")
    return all(torch.equal(getattr(a, field), getattr(b, field)) for field in fields)


def _entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_rows_on_disk_are_those_of_memory(source: Source, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = open_rows(source, tokenizer, 32, tmp_path / "cache")
    packed = pack(read_samples(source, tokenizer), 32)
    assert _same(rows, packed)
    assert rows.fingerprint() == packed.fingerprint()
    assert [tensor.dtype for tensor in (rows.input_ids, rows.loss_mask, rows.lengths)] == [
        torch.int32, torch.bool, torch.int64,
    ]  # fmt: skip
    assert torch.equal(rows.targets(torch.tensor([2, 0]), 2), packed.targets(torch.tensor([2, 0]), 2))


def test_they_are_made_once_and_not_read_again(
    source: Source, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    first = open_rows(source, tokenizer, 32, tmp_path / "cache")
    (entry,) = _entries(tmp_path / "cache")
    made = {path: path.stat().st_mtime_ns for path in (entry, *entry.iterdir())}
    again = open_rows(source, tokenizer, 32, tmp_path / "cache")
    assert _same(first, again)
    assert {path: path.stat().st_mtime_ns for path in (entry, *entry.iterdir())} == made
    assert first.fingerprint() == again.fingerprint()


def test_windows_are_packed_one_by_one(source: Source, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = open_rows(source, tokenizer, 32, tmp_path / "cache", window=20)
    found = read_samples(source, tokenizer)
    parts = [pack(found[start : start + 20], 32) for start in (0, 20, 40)]
    assert torch.equal(rows.input_ids, torch.cat([part.input_ids for part in parts]))
    assert torch.equal(rows.position_ids, torch.cat([part.position_ids for part in parts]))


def test_where_a_tokenizer_was_read_and_how_it_was_used_makes_no_other_entry(
    source: Source, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for offline, directory in (("0", "tokenizer"), ("1", "tokenizer"), ("0", "moved")):
        if directory == "moved":
            (tmp_path / "tokenizer").rename(tmp_path / "moved")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline == "1")
        loaded = AutoTokenizer.from_pretrained(tmp_path / directory)
        open_rows(source, loaded, 32, tmp_path / "cache")
        loaded("too long a text", truncation=True, max_length=1)
        open_rows(source, loaded, 32, tmp_path / "cache")
    assert len(_entries(tmp_path / "cache")) == 1


def test_another_source_tokenizer_or_row_is_another_entry(
    source: Source, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    other = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<end>", chat_template="{{ 'x' }}")
    open_rows(source, tokenizer, 32, cache)
    open_rows(source, tokenizer, 48, cache)
    open_rows(source, other, 32, cache)
    open_rows(Source(source.path, limit=9), tokenizer, 32, cache)
    assert len(_entries(cache)) == 4
    Path(source.path).write_text('{"text": "words words"}\n')
    assert len(open_rows(source, tokenizer, 32, cache)) == 1
    assert len(_entries(cache)) == 5


@pytest.mark.parametrize("damage", ["short", "manifest", "missing"])
def test_damaged_rows_are_made_again(
    source: Source, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = open_rows(source, tokenizer, 32, tmp_path / "cache")
    (entry,) = _entries(tmp_path / "cache")
    if damage == "short":
        content = (entry / "input_ids").read_bytes()
        (entry / "input_ids").unlink()  # the rows above still hold the old file
        (entry / "input_ids").write_bytes(content[:-4])
    elif damage == "manifest":
        (entry / "manifest.json").write_text('{"rows": 3')
    else:
        (entry / "lengths").unlink()
    with caplog.at_level(logging.WARNING):
        assert _same(open_rows(source, tokenizer, 32, tmp_path / "cache"), first)
    assert "are damaged; they are made again" in caplog.text


def test_a_failure_leaves_nothing_behind(source: Source, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with Path(source.path).open("a") as file:
        file.write("{broken\n")
    with pytest.raises(ValueError, match="line 51: not JSON"):
        open_rows(source, tokenizer, 32, tmp_path / "cache")
    assert not _entries(tmp_path / "cache")
    Path(source.path).write_text('{"input_ids": [1, 2, 3], "loss_mask": [1, 1, 0]}\n')
    with pytest.raises(ValueError, match=r"samples\.jsonl \(1\) hold no supervised token"):
        open_rows(source, tokenizer, 32, tmp_path / "cache")
    assert not _entries(tmp_path / "cache")


def test_what_a_killed_process_left_is_removed(
    source: Source, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    open_rows(source, tokenizer, 32, tmp_path / "cache")
    (made,) = _entries(tmp_path / "cache")
    left, of_another = (tmp_path / "cache" / f"{key}.x1y2.tmp" for key in (made.name, "0123456789abcdef"))
    for directory in (left, of_another):
        directory.mkdir()
        (directory / "input_ids").write_bytes(b"half")
    open_rows(source, tokenizer, 32, tmp_path / "cache")
    assert set(_entries(tmp_path / "cache")) == {made, of_another}  # another process may be making those


def test_a_full_disk_is_named(
    source: Source, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("data.rows.pack_window", full)
    with pytest.raises(OSError, match=r"disk of .*cache is full; free space"):
        open_rows(source, tokenizer, 32, tmp_path / "cache")
    assert not _entries(tmp_path / "cache")


def test_processes_at_the_same_time_make_them_once(
    source: Source, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def open_and_tell() -> None:
        answers.put(open_rows(source, tokenizer, 32, tmp_path / "cache").input_ids.sum().item())

    processes = [context.Process(target=open_and_tell) for _ in range(3)]
    for process in processes:
        process.start()
    sums = {answers.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert sums == {pack(read_samples(source, tokenizer), 32).input_ids.sum().item()}
    assert len(_entries(tmp_path / "cache")) == 1
