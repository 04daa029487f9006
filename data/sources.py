"""Reads training samples: JSON lines in any of four shapes.

- `{"input_ids": [...], "loss_mask": [0/1 ...]}`: tokens, as `data regenerate` writes them
- `{"messages": [{"role", "content"}, ...]}`: a conversation; the assistant's turns are supervised
- `{"prompt": "...", "response": "..."}`: a conversation of one turn
- `{"text": "..."}`: a document; every token is supervised
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.chat import render

SHAPES = "{input_ids, loss_mask}, {messages}, {prompt, response} or {text}"


@dataclass(frozen=True)
class Sample:
    """One document."""

    input_ids: Tensor
    """int32 [T]."""
    loss_mask: Tensor
    """bool [T]; tokens that the heads learn to predict."""

    @property
    def prompt(self) -> list[int]:
        """Token ids before the first supervised one."""
        supervised = self.loss_mask.nonzero()
        return self.input_ids[: int(supervised[0])].tolist() if len(supervised) else self.input_ids.tolist()


def read_samples(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
    """Read all samples of a .jsonl file.

    Args:
        path: the file.
        tokenizer: the base's tokenizer.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an empty file, or a line that is no sample; names the line.
    """
    samples = []
    for number, record in read_records(path):
        try:
            samples.append(_sample(record, tokenizer))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return samples


def read_records(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and JSON objects of a .jsonl file; empty lines are passed over.

    Raises:
        FileNotFoundError: no such file.
        ValueError: an empty file, or a line that is no JSON object in UTF-8; names the line.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"sample file ({path}) does not exist; give a .jsonl file of {SHAPES}")
    number = 0
    with Path(path).open("rb") as file:
        for number, line in ((n, text) for n, text in enumerate(file, start=1) if text.strip()):
            try:
                yield number, _record(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    if not number:
        raise ValueError(f"sample file ({path}) is empty; write one JSON object per line: {SHAPES}")


def _record(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8; save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON at column {error.colno} ({error.msg}); write one JSON object per line") from None
    if not isinstance(record, dict):
        raise ValueError(f"a {type(record).__name__} is no sample; write a JSON object: {SHAPES}")
    return record


def _sample(record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Sample:
    ids, mask = _tokens(record, tokenizer)
    if len(ids) != len(mask):
        raise ValueError(f"input_ids ({len(ids)}) and loss_mask ({len(mask)}) differ in length; write one mark per id")
    vocabulary = len(tokenizer)
    if not all(isinstance(token, int) and 0 <= token < vocabulary for token in ids):
        raise ValueError(f"input_ids hold a value outside 0..{vocabulary - 1}; tokenize with the base's own tokenizer")
    if not set(mask) <= {0, 1}:
        raise ValueError("loss_mask holds a value other than 0 and 1; write 1 for each token to be predicted, else 0")
    return Sample(torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.bool))


def _tokens(record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[list[Any], list[Any]]:
    if "input_ids" in record and "loss_mask" in record:
        return list(record["input_ids"]), list(record["loss_mask"])
    if "messages" in record:
        return render(tokenizer, record["messages"])
    if "prompt" in record and "response" in record:
        turns = ("user", record["prompt"]), ("assistant", record["response"])
        return render(tokenizer, [{"role": role, "content": content} for role, content in turns])
    if "text" in record:
        ids: list[int] = list(tokenizer(record["text"])["input_ids"])
        if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
            ids.append(tokenizer.eos_token_id)
        return ids, [1] * len(ids)
    raise ValueError(f"keys ({', '.join(map(str, record))}) are no known sample; write {SHAPES}")
