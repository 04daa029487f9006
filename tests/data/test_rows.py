import errno
import json
import logging
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from medusa.data.packing import PackedRows, pack
from medusa.data.rows import open_rows
from medusa.data.sources import Source, read_samples

Opening = Callable[..., PackedRows]


@pytest.fixture
def source(tmp_path: Path) -> Source:
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps({"text": "word " * (1 + n % 9)}) + "\n" for n in range(50)))
    return Source(str(path))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def opened(source: Source, tokenizer: PreTrainedTokenizerFast, cache: Path) -> Opening:
    """Open the rows of the source, or of something else."""

    def opened(source: Source = source, tokenizer=tokenizer, row_tokens: int = 32) -> PackedRows:
        return open_rows(source, tokenizer, row_tokens, cache)

    return opened


def _same(a: PackedRows, b: PackedRows) -> bool:
    fields = ("input_ids", "position_ids", "loss_mask", "lengths")
    return all(torch.equal(getattr(a, field), getattr(b, field)) for field in fields)


def _entries(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.is_dir()]


def test_rows_on_disk_are_those_of_memory(source: Source, opened: Opening, tokenizer: PreTrainedTokenizerFast) -> None:
    rows, packed = opened(), pack(read_samples(source, tokenizer), 32)
    assert _same(rows, packed)
    assert rows.fingerprint() == packed.fingerprint()
    dtypes = [tensor.dtype for tensor in (rows.input_ids, rows.loss_mask, rows.lengths)]
    assert dtypes == [torch.int32, torch.bool, torch.int64]
    assert torch.equal(rows.targets(torch.tensor([2, 0]), 2), packed.targets(torch.tensor([2, 0]), 2))


def test_they_are_made_once_and_not_read_again(opened: Opening, cache: Path) -> None:
    first = opened()
    (entry,) = _entries(cache)
    made = {path: path.stat().st_mtime_ns for path in (entry, *entry.iterdir())}
    again = opened()
    assert _same(first, again)
    assert {path: path.stat().st_mtime_ns for path in (entry, *entry.iterdir())} == made
    assert first.fingerprint() == again.fingerprint()


def test_windows_are_packed_one_by_one(
    source: Source, opened: Opening, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa.data.rows.WINDOW", 20)
    rows, found = opened(), read_samples(source, tokenizer)
    parts = [pack(found[start : start + 20], 32) for start in (0, 20, 40)]
    assert torch.equal(rows.input_ids, torch.cat([part.input_ids for part in parts]))
    assert torch.equal(rows.position_ids, torch.cat([part.position_ids for part in parts]))


def test_where_a_tokenizer_was_read_and_how_it_was_used_makes_no_other_entry(
    opened: Opening, tokenizer: PreTrainedTokenizerFast, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for offline, directory in ((False, "tokenizer"), (True, "tokenizer"), (False, "moved")):
        if directory == "moved":
            (tmp_path / "tokenizer").rename(tmp_path / "moved")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)
        loaded = AutoTokenizer.from_pretrained(tmp_path / directory)
        opened(tokenizer=loaded)
        loaded("too long a text", truncation=True, max_length=1)
        opened(tokenizer=loaded)
    assert len(_entries(cache)) == 1


def test_another_source_tokenizer_or_row_is_another_entry(
    source: Source, opened: Opening, tokenizer: PreTrainedTokenizerFast, cache: Path
) -> None:
    other = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<end>", chat_template="{{ 'x' }}")
    for changed in ({}, {"row_tokens": 48}, {"tokenizer": other}, {"source": Source(source.path, limit=9)}):
        opened(**changed)
    assert len(_entries(cache)) == 4
    Path(source.path).write_text('{"text": "words words"}\n')
    assert len(opened()) == 1
    assert len(_entries(cache)) == 5


@pytest.mark.parametrize("damage", ["short", "manifest", "missing"])
def test_damaged_rows_are_made_again(
    opened: Opening, cache: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened()
    (entry,) = _entries(cache)
    if damage == "short":
        content = (entry / "input_ids").read_bytes()
        (entry / "input_ids").unlink()  # the rows above still hold the old file
        (entry / "input_ids").write_bytes(content[:-4])
    elif damage == "manifest":
        (entry / "manifest.json").write_text('{"rows": 3')
    else:
        (entry / "lengths").unlink()
    with caplog.at_level(logging.WARNING):
        assert _same(opened(), first)
    assert "are damaged; they are made again" in caplog.text


def test_a_failure_leaves_nothing_behind(source: Source, opened: Opening, cache: Path) -> None:
    with Path(source.path).open("a") as file:
        file.write("{broken\n")
    with pytest.raises(ValueError, match="line 51: not JSON"):
        opened()
    assert not _entries(cache)
    Path(source.path).write_text('{"input_ids": [1, 2, 3], "loss_mask": [1, 1, 0]}\n')
    with pytest.raises(ValueError, match=r"samples\.jsonl \(1\) hold no supervised token"):
        opened()
    assert not _entries(cache)


def test_what_a_killed_process_left_is_removed(opened: Opening, cache: Path) -> None:
    opened()
    (made,) = _entries(cache)
    left, of_another = (cache / f"{key}.x1y2.tmp" for key in (made.name, "0123456789abcdef"))
    for directory in (left, of_another):
        directory.mkdir()
        (directory / "input_ids").write_bytes(b"half")
    opened()
    assert set(_entries(cache)) == {made, of_another}  # another process may be making those


def test_a_full_disk_is_named(opened: Opening, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("medusa.data.rows.pack_window", full)
    with pytest.raises(OSError, match=r"disk of .*cache is full; free space"):
        opened()
    assert not _entries(cache)


def test_processes_at_the_same_time_make_them_once(
    source: Source, opened: Opening, tokenizer: PreTrainedTokenizerFast, cache: Path
) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    tell = lambda: answers.put(opened().input_ids.sum().item())  # noqa: E731
    processes = [context.Process(target=tell) for _ in range(3)]
    for process in processes:
        process.start()
    sums = {answers.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
    assert sums == {pack(read_samples(source, tokenizer), 32).input_ids.sum().item()}
    assert len(_entries(cache)) == 1
