"""Records of .jsonl, .json and .parquet files, and of directories of them."""

import hashlib
import json
import logging
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from medusa.data.shapes import KNOWN

LOGGER = logging.getLogger("medusa.data")

SUFFIXES = (".jsonl", ".json", ".parquet")
RECORDED = "recorded-*.jsonl"
"""Names of the files that a server writes (``medusa serve --record``)."""
DESCRIPTIONS = ("dataset_infos.json",)
"""Files of the Hub's repositories that hold no samples."""
PARQUET_ROWS = 1024
"""Number of rows of a .parquet file in memory at a time."""

Placed = tuple[str, dict[str, Any]]
"""The place of a record, for errors, and the record."""


def sample_files(path: Path) -> list[Path]:
    """The files of a directory, sorted by name, or the one file.

    Raises:
        FileNotFoundError: there is no such file, or no sample file in the directory.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise FileNotFoundError(f"sample file ({path}) does not exist; give a {', '.join(SUFFIXES)} file of {KNOWN}")
    found = (file for file in path.rglob("*") if file.suffix in SUFFIXES and file.name not in DESCRIPTIONS)
    files = sorted(file for file in found if file.is_file())
    if not files:
        raise FileNotFoundError(f"directory ({path}) holds no sample file; put {', '.join(SUFFIXES)} files into it")
    return files


def common_files(one: Path, other: Path) -> list[tuple[Path, Path]]:
    """Pairs of sample files below two paths that are the same file or have the same content; may be empty."""
    try:
        ours, theirs = sample_files(one), sample_files(other)
    except FileNotFoundError:
        return []
    content = cache(_content)

    def same(our: Path, their: Path) -> bool:
        equal_size = our.stat().st_size == their.stat().st_size
        return equal_size and (our.samefile(their) or content(our) == content(their))

    return [(our, their) for their in theirs for our in ours if same(our, their)]


def _content(file: Path) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def file_records(path: str | Path) -> Iterator[Placed]:
    """All records of a file, or of the files of a directory sorted by name; empty lines are skipped.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is empty or damaged, or a record is not a JSON object in UTF-8; names the place.
    """
    for file in sample_files(Path(path)):
        placed = None
        for placed in {".parquet": _parquet, ".json": _json}.get(file.suffix, _lines)(file):
            yield placed
        if placed is None:
            raise ValueError(f"sample file ({file}) is empty; write one JSON object per line: {KNOWN}")


def _lines(file: Path) -> Iterator[Placed]:
    """Records of a file of JSON lines; where a server writes them, the last one may be unfinished."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                place = f"{file}, line {number}"
                try:
                    record = _parse(place, line)
                except ValueError as error:
                    if not fnmatch(file.name, RECORDED) or line.endswith(b"\n"):
                        raise
                    LOGGER.warning("an unfinished last line is left out: %s", error)
                    return
                yield place, _object(place, record)


def _json(file: Path) -> Iterator[Placed]:
    """A list of records, directly or under `data`; many .json files hold JSON lines."""
    content = file.read_bytes()
    if not content.strip():
        return
    try:
        whole = json.loads(content)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from _lines(file)
            return
        raise ValueError(f"{file}, line {error.lineno}: not JSON ({error.msg}); write a list of objects") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    except RecursionError:
        raise ValueError(f"{file}: too deeply nested; write a list of objects") from None
    found = whole.get("data", [whole]) if isinstance(whole, dict) else whole
    if not isinstance(found, list):
        raise ValueError(f'{file}: holds no list of records; write [{{...}}, ...] or {{"data": [{{...}}, ...]}}')
    for number, record in enumerate(found, start=1):
        place = f"{file}, record {number}"
        yield place, _object(place, record)


def _parquet(file: Path) -> Iterator[Placed]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ValueError(f"{file} needs a package ({error}); pip install 'medusa-decoding[train]'") from error
    number = 0
    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=PARQUET_ROWS):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{file}, record {number}", record
    except (ArrowException, OSError) as error:  # the latter: damaged pages
        reason = " ".join(str(error).split())
        raise ValueError(f"{file}: no readable .parquet file ({reason}); write it again") from error


def _parse(place: str, line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))  # a file from Windows may begin with a byte order mark
    except UnicodeDecodeError as error:
        reason = f"byte {error.start + 1} (0x{line[error.start]:02x}) is not UTF-8; save the file as UTF-8"
    except json.JSONDecodeError as error:
        reason = f"not JSON at column {error.colno} ({error.msg}); write one JSON object per line"
    except RecursionError:
        reason = "too deeply nested; write one JSON object per line"
    raise ValueError(f"{place}: {reason}")


def _object(place: str, record: Any) -> dict[str, Any]:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: a {type(record).__name__} is not a sample; write a JSON object: {KNOWN}")
    return record
