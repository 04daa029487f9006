"""Reads training samples from files, directories and Hub data sets.

A record is a conversation in one of the forms of `data.shapes`, whose assistant turns are supervised, or

- `{"input_ids": [...], "loss_mask": [0/1 ...]}`: tokens, the format of `data regenerate`
- `{"text": "..."}`: a document; every token is supervised

Conversations without an answer are left out, unless the source reads prompts too.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from medusa.data.chat import NoAnswerError, Tokens, documents, question
from medusa.data.files import Placed, file_records, sample_files
from medusa.data.hub import HubData, means_files
from medusa.data.shapes import KNOWN, conversation, plain_text, present, visible

Item = TypeVar("Item")

LOGGER = logging.getLogger("medusa.data")


@dataclass(frozen=True)
class Sample:
    """One document."""

    input_ids: Tensor
    """int32 [T] token ids."""
    loss_mask: Tensor
    """bool [T]; tokens that the heads learn to predict."""

    @property
    def prompt(self) -> list[int]:
        """Token ids before the first supervised one."""
        supervised = self.loss_mask.nonzero()
        return self.input_ids[: int(supervised[0])].tolist() if len(supervised) else self.input_ids.tolist()


@dataclass(frozen=True)
class Source:
    """A source of samples."""

    path: str
    """A .jsonl, .json or .parquet file, a directory of them, or the name of a Hub data set."""
    split: str = "train"
    """Split of a Hub data set; files have none."""
    subset: str = ""
    """Configuration of a Hub data set; empty = its default."""
    streaming: bool = False
    """Read a Hub data set while it is downloaded; needs a limit."""
    limit: int = 0
    """Most records; 0 = all."""
    prompts: bool = False
    """Also read conversations without an answer, as far as the base would read them to answer the first question."""

    def __post_init__(self) -> None:
        if self.streaming and not self.limit:
            raise ValueError(f"data ({self.path}) is streamed without a limit; give one (data.limit)")

    def records(self) -> Iterator[Placed]:
        """All records with their places, for errors.

        Raises:
            FileNotFoundError: a file does not exist.
            ValueError: records or a data set cannot be read; names the place.
        """
        found = self._hub.records() if self._hub else file_records(self.path)
        return islice(found, self.limit or None)

    def parsed(
        self, parse: Callable[[str, dict[str, Any]], Iterable[Item]], wanted: str, remedy: str = ""
    ) -> Iterator[Item]:
        """Parse the records; records without anything to learn are skipped and counted in one warning.

        Args:
            parse: parses a record, given its place and the record.
            wanted: what skipped records lack, for the warning.
            remedy: the remedy if all records lack it.

        Raises:
            ValueError: a record cannot be parsed (names its place), or all records were skipped.
        """
        total, skipped, reason = 0, 0, ""
        for place, record in self.records():
            total += 1
            try:
                yield from parse(place, record)
            except NoAnswerError as error:
                skipped, reason = skipped + 1, reason or f"{place}: {error}"
            except (ValueError, TypeError) as error:
                raise ValueError(f"{place}: {error}") from error
        if skipped == total:
            raise ValueError(f"data ({self.path}): none of its {total} records has {wanted} ({reason}){remedy}")
        if skipped:
            LOGGER.warning("%d of %d records are skipped; the first: %s", skipped, total, reason)

    def fingerprint(self) -> str:
        """Digest of the content: of the bytes of files, or of the revision of a Hub data set."""
        digest = hashlib.sha256(f"limit {self.limit}".encode())
        if self._hub:
            digest.update(self._hub.fingerprint().encode())
            return digest.hexdigest()
        for file in sample_files(Path(self.path)):
            with file.open("rb") as stream:
                digest.update(file.suffix.encode() + hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    @cached_property
    def _hub(self) -> HubData | None:
        return None if means_files(self.path) else HubData(self.path, self.split, self.subset, self.streaming)


def read_samples(
    source: str | Path | Source, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None = None
) -> list[Sample]:
    """All samples of a source that fits into memory; see `samples`."""
    return list(samples(source if isinstance(source, Source) else Source(str(source)), tokenizer, vocabulary))


def samples(source: Source, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None = None) -> Iterator[Sample]:
    """Tokenise a source, record by record; records without anything to learn are skipped and counted in one warning.

    A record becomes one document, or several if the chat template rewrites earlier turns.

    Args:
        source: the records.
        tokenizer: the base's tokenizer.
        vocabulary: number of tokens that the base can write, often more than its tokenizer has; None = the tokenizer's.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the source is empty, a record is not a sample (names its place), or no record has an answer.
    """

    def parse(_: str, record: Mapping[str, Any]) -> list[Sample]:
        found = _tokens(present(record), tokenizer, source.prompts)
        return [_sample(ids, mask, vocabulary or len(tokenizer), source.prompts) for ids, mask in found]

    remedy = (
        "; if they are prompts, let the base answer them (data regenerate), or learn from them (data.supervise: all)"
    )
    return source.parsed(parse, "an answer to learn", remedy)


def _sample(ids: list[Any], mask: list[Any], vocabulary: int, prompts: bool) -> Sample:
    if len(ids) != len(mask):
        raise ValueError(f"input_ids ({len(ids)}) and loss_mask ({len(mask)}) differ in length; write one mark per id")
    if not all(type(token) is int and 0 <= token < vocabulary for token in ids):
        raise ValueError(f"input_ids hold a value outside 0..{vocabulary - 1}; tokenize with the base's own tokenizer")
    if any(mark not in (0, 1) for mark in mask):
        raise ValueError("loss_mask holds a value other than 0 and 1; write 1 for each token to be predicted, else 0")
    if not any(mask) and not prompts:
        raise NoAnswerError(f"loss_mask marks none of its {len(mask)} tokens")
    return Sample(torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.bool))


def _tokens(record: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, prompts: bool) -> list[Tokens]:
    if "input_ids" in record and "loss_mask" in record:
        given, marks = record["input_ids"], record["loss_mask"]
        if not isinstance(given, list) or not isinstance(marks, list):
            raise ValueError("input_ids and loss_mask must be lists; write one mark per id")
        return [(given, marks)]
    turns = conversation(record)
    if turns is None and "prompt" in record and "text" not in record:
        if not prompts:
            raise NoAnswerError("it is a prompt alone")
        turns = [{"role": "user", "content": plain_text(record["prompt"])}]
    if turns is not None:
        unanswered = prompts and not any(turn["role"] == "assistant" for turn in turns)
        return [question(tokenizer, turns)] if unanswered else documents(tokenizer, turns)
    if "text" in record:
        ids: list[int] = list(tokenizer(plain_text(record["text"]), verbose=False)["input_ids"])
        if tokenizer.eos_token_id is not None and ids[-1:] != [tokenizer.eos_token_id]:
            ids.append(tokenizer.eos_token_id)
        return [(ids, [1] * len(ids))]
    raise ValueError(f"keys ({visible(', '.join(map(str, record)))}) are not those of a known sample; write {KNOWN}")
