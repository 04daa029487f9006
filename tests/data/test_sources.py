import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.chat import render
from data.sources import read_samples

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
        ([1, 2], r"line 2: a list is no sample"),
        ({"txt": "hi"}, r"line 2: keys \(txt\) are no known sample; write \{input_ids"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, r"line 2: input_ids \(2\) and loss_mask \(1\) differ"),
        ({"input_ids": [1, 99], "loss_mask": [1, 1]}, r"line 2: input_ids hold a value outside 0\.\.5"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, r"line 2: loss_mask holds a value other than"),
        (
            {"messages": [{"role": "robot", "content": "hi"}, CHAT[1]]},
            r"line 2: conversation .* refused .* no such role",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_samples(_file(tmp_path, {"text": "hi"}, line), _tokenizer())


def test_empty_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sample file \(.*samples\.jsonl\) is empty; write"):
        read_samples(_file(tmp_path, b"  "), _tokenizer())
    with pytest.raises(FileNotFoundError, match=r"sample file \(.*none\.jsonl\) does not exist; give"):
        read_samples(tmp_path / "none.jsonl", _tokenizer())


def test_no_template_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokenizer \(tiny\) has no chat template; set one"):
        render(_tokenizer(None), CHAT)
