import json
import logging
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from medusa.data.files import file_records
from medusa.data.sources import Source, read_samples

WORDS = ["<end>", "hi", "there", "who", "are", "you"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} <end>{% endgeneration %}"
    "{% elif m['role'] == 'user' %}{{ m['content'] }} <end> {% else %}{{ raise_exception('no such role') }}{% endif %}"
    "{% endfor %}"
)


def _tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<end>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", chat_template=template, name_or_path="tiny")


def _file(path: Path, *lines: Any) -> Path:
    path = path / "samples.jsonl"
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(encoded) + b"\n")
    return path


CHAT = [{"role": "user", "content": "who are you"}, {"role": "assistant", "content": "hi"}]


@pytest.mark.parametrize(
    ("record", "ids", "mask"),
    [
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}, [1, 2, 3], [0, 1, 1]),
        ({"messages": CHAT}, [3, 4, 5, 0, 1, 0], [0, 0, 0, 0, 1, 1]),
        ({"prompt": "who are you", "response": "hi"}, [3, 4, 5, 0, 1, 0], [0, 0, 0, 0, 1, 1]),
        ({"text": "hi there"}, [1, 2, 0], [1, 1, 1]),
    ],
)
def test_the_four_shapes(tmp_path: Path, record: dict[str, Any], ids: list[int], mask: list[int]) -> None:
    (sample,) = read_samples(_file(tmp_path, record), _tokenizer())
    assert sample.input_ids.tolist() == ids
    assert sample.loss_mask.int().tolist() == mask
    assert sample.prompt == ids[: mask.index(1)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "caf\xe9"}', r"line 2: byte 14 \(0xe9\) is not UTF-8; save"),
        (b'{"text": "hi"', r"line 2: not JSON at column \d+ .* one JSON object per line"),
        (b"[" * 200_000, r"line 2: too deeply nested; write one JSON object per line"),
        ([1, 2], r"line 2: a list is not a sample"),
        ({"txt": "hi"}, r"line 2: keys \(txt\) are not those of a known sample; write \{input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, r"line 2: input_ids \(2\) and loss_mask \(1\) differ"),
        ({"input_ids": [1, 99], "loss_mask": [1, 1]}, r"line 2: input_ids hold a value outside 0\.\.5"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, r"line 2: loss_mask holds a value other than"),
        ({"input_ids": [1, 2], "loss_mask": [1, [1]]}, r"line 2: loss_mask holds a value other than"),
        ({"input_ids": 1, "loss_mask": 1}, r"line 2: input_ids and loss_mask must be lists"),
        ({"text": ["hi", "there"]}, r"line 2: content \(\['hi', 'there'\]\) is not text"),
        (b'{"text": "a\\ud800"}', r"line 2: content \('a\\ud800'\) holds half a character"),
        (
            {"messages": [{"role": "robot", "content": "hi"}, CHAT[1]]},
            r"line 2: conversation .* refused .* no such role",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_samples(_file(tmp_path, {"text": "hi"}, line), _tokenizer())


@pytest.mark.parametrize(
    ("record", "ids"),
    [
        ({"messages": CHAT[:1]}, [3, 4, 5, 0]),
        ({"messages": [*CHAT[:1], {"role": "user", "content": "there"}]}, [3, 4, 5, 0]),
        ({"prompt": "who are you"}, [3, 4, 5, 0]),
        ({"prompt": "who are you", "category": "x"}, [3, 4, 5, 0]),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}, [1, 2, 3]),
    ],
)
def test_conversations_without_an_answer_are_read_where_prompts_count(tmp_path: Path, record: Any, ids: Any) -> None:
    path = _file(tmp_path, {"messages": CHAT}, record)
    assert _ids(path) == [[3, 4, 5, 0, 1, 0]]
    assert _ids(path, prompts=True) == [[3, 4, 5, 0, 1, 0], ids]
    assert not any(read_samples(Source(str(path), prompts=True), _tokenizer())[1].loss_mask)


RECORDS = [{"messages": CHAT, "text": None}, {"messages": None, "text": "hi there"}]
IDS = [[3, 4, 5, 0, 1, 0], [1, 2, 0]]


def _write(path: Path, records: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        text = "".join(json.dumps(r) + "\n" for r in records) if path.suffix == ".jsonl" else json.dumps(records)
        path.write_text(text)
    return path


def _ids(path: Any, **options: Any) -> list[list[int]]:
    return [sample.input_ids.tolist() for sample in read_samples(Source(str(path), **options), _tokenizer())]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_all_kinds_of_files_hold_the_same(tmp_path: Path, suffix: str) -> None:
    path = _write(tmp_path / f"a{suffix}", RECORDS)
    assert _ids(path) == IDS
    assert _ids(path, limit=1) == IDS[:1]
    assert [place.rpartition(" ")[2] for place, _ in file_records(path)] == ["1", "2"]


def test_a_json_file_may_hold_a_list_under_data_or_lines(tmp_path: Path) -> None:
    assert _ids(_write(tmp_path / "a.json", {"data": RECORDS})) == IDS
    (tmp_path / "b.json").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    assert _ids(tmp_path / "b.json") == IDS
    assert _ids(_write(tmp_path / "c.json", RECORDS[1])) == IDS[1:], "one record is a list of one"


def test_a_directory_is_its_files_by_name(tmp_path: Path) -> None:
    _write(tmp_path / "b.parquet", RECORDS[1:])
    _write(tmp_path / "a.jsonl", RECORDS[:1])
    (tmp_path / "README.md").write_text("not a sample")
    _write(tmp_path / "dataset_infos.json", [{"default": {"features": {}}}])
    assert _ids(tmp_path) == IDS
    (tmp_path / "none").mkdir()
    with pytest.raises(FileNotFoundError, match=r"directory \(.*none\) holds no sample file; put"):
        _ids(tmp_path / "none")


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_bytes(b'\xef\xbb\xbf{"text": "hi"}\n{"text": "there"}\n')
        assert len(_ids(tmp_path / name)) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'[{"text": ]', r"a\.json, line 1: not JSON"),
        ("a.json", b'["hi"]', r"a\.json, record 1: a str is not a sample"),
        ("a.json", b"[" * 200_000, r"a\.json: too deeply nested"),
        ("a.json", b"3", r"a\.json: holds no list of records"),
        ("a.json", b'["\xe9"]', r"a\.json: byte 3 is not UTF-8"),
        ("a.json", b"[]", r"a\.json\) is empty"),
        ("a.json", b" ", r"a\.json\) is empty"),
        ("a.jsonl", b"  \n", r"sample file \(.*a\.jsonl\) is empty; write"),
        ("a.parquet", b"PAR1 no table", r"a\.parquet: no readable \.parquet file"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        _ids(tmp_path / name)


def test_a_damaged_page_of_a_table_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.parquet", RECORDS)
    content = bytearray(path.read_bytes())
    content[4:34] = b"\xff" * 30
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.parquet: no readable \.parquet file \(.*\); write it again"):
        _ids(path)


def test_a_bad_record_of_a_table_is_named(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.parquet", [{"txt": "hi", "text": "hi"}, {"txt": "hi", "text": None}])
    with pytest.raises(ValueError, match=r"a\.parquet, record 2: keys \(txt\) are not those of a known sample"):
        _ids(path)


def test_records_without_an_answer_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = _file(tmp_path, {"text": "hi"}, {"messages": CHAT[:1]}, {"input_ids": [1, 2], "loss_mask": [0, 0]})
    with caplog.at_level(logging.WARNING):
        assert _ids(path) == [[1, 0]]
    assert "2 of 3 records are skipped; the first: " in caplog.text
    assert "samples.jsonl, line 2: conversation ('user: who are you') has no answer" in caplog.text
    with pytest.raises(ValueError, match=r"none of its 1 records has an answer to learn \(.*line 1: conv"):
        _ids(_file(tmp_path, {"messages": CHAT[1:]}))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A data set with two splits under a name of the Hub."""
    _write(tmp_path / "set" / "train.jsonl", RECORDS)
    _write(tmp_path / "set" / "test.jsonl", RECORDS[1:])
    find = datasets.load_dataset_builder

    def found(name: str, subset: str | None) -> Any:
        assert (name, subset) == ("team/chats", None)
        return find(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset_builder", found)
    return "team/chats"


@pytest.mark.parametrize("options", [{}, {"streaming": True, "limit": 9}])
def test_a_data_set_of_the_hub(hub: str, options: dict[str, Any]) -> None:
    assert _ids(hub, **options) == IDS
    assert _ids(hub, split="test", **options) == IDS[1:]
    with pytest.raises(ValueError, match=r"data \(team/chats\) is not a file here, and cannot .* \(.*; correct"):
        _ids(hub, split="none", **options)


def test_a_data_set_on_disk(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(RECORDS)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "many")
    assert _ids(tmp_path / "one") == IDS
    assert _ids(tmp_path / "many", split="test") == IDS[1:]
    with pytest.raises(ValueError, match=r"many\) .* cannot be read .* \('none'\)"):
        _ids(tmp_path / "many", split="none")


def test_a_name_that_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"^data \(team/none\) is not a file here, and cannot be read as a data set"):
        _ids("team/none")


def test_the_fingerprint_follows_the_content(hub: str, tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", RECORDS)
    _write(tmp_path / "copy" / "b.jsonl", RECORDS)
    first = Source(str(path)).fingerprint()
    assert Source(str(tmp_path / "copy")).fingerprint() == first, "names do not matter"
    assert Source(str(path), limit=1).fingerprint() != first
    _write(path, RECORDS[:1])
    assert Source(str(path)).fingerprint() != first
    assert Source(hub).fingerprint() == Source(hub).fingerprint() != Source(hub, split="test").fingerprint()


def test_a_stream_needs_an_end() -> None:
    with pytest.raises(ValueError, match=r"data \(team/chats\) is streamed without a limit; give one"):
        Source("team/chats", streaming=True)


@pytest.mark.parametrize(("package", "name"), [("datasets", "team/chats"), ("pyarrow", "a.parquet")])
def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ValueError, match=rf"{name}.* needs a package .*{package}.*; pip install"):
        _ids(name)
