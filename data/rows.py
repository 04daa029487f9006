"""Tokenised, packed rows on disk: made once for equal data, then memory-mapped.

A directory `<cache>/<digest>` holds one raw file per tensor of `PackedRows` and a manifest. It gets its name when it is
complete. One process makes the rows; others that need them wait on a file lock. A barrier would time out before a large
data set is tokenised.
"""

import fcntl
import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from medusa.data.packing import PackedRows, pack_window
from medusa.data.sources import Sample, Source, samples
from medusa.files import full_disk_named, sweep, write_json

LOGGER = logging.getLogger("medusa.data")

FORMAT = 3
"""Version of the files and of all code that affects their content: shapes, masks, packing."""
WINDOW = 8192
"""Number of samples in memory at a time; each window is packed by itself."""
TENSORS = {
    "input_ids": np.int32, "position_ids": np.int32, "loss_mask": np.bool_, "lengths": np.int64, "samples": np.int64,
}  # fmt: skip
"""Fields of `PackedRows`, and the types in their files."""
MANIFEST = "manifest.json"
PASSING = ("is_local", "local_files_only", "name_or_path", "truncation", "padding")
"""Keys in a tokenizer's files about its origin or last use, which do not affect samples."""


def open_rows(
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    row_tokens: int,
    cache: str | Path,
    vocabulary: int | None = None,
) -> PackedRows:
    """Rows of a source, mapped from disk; they are made first if the cache lacks them or its files are damaged.

    Any number of processes may call this at once: one makes the rows.

    Args:
        source: the samples.
        tokenizer: the base's tokenizer.
        row_tokens: T.
        cache: directory of all cached rows.
        vocabulary: see `samples`.

    Raises:
        FileNotFoundError: there is no such source.
        ValueError: samples cannot be read, or there is nothing to train on.
        OSError: the cache cannot be written.
    """
    key = _key(source, tokenizer, row_tokens)
    directory = Path(cache) / key
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_suffix(".lock")):
        sweep(directory.parent, f"{key}.*.tmp", age=0)  # left by a process that was killed
        if (packed := _opened(directory)) is None:
            if directory.exists():
                LOGGER.warning("rows in %s are damaged; they are made again", directory)
                shutil.rmtree(directory)
            _make(directory, samples(source, tokenizer, vocabulary), source, row_tokens)
            packed = _opened(directory)
    if packed is None:
        raise OSError(f"rows in {directory} cannot be read back; free space on its disk, or change data.cache")
    return replace(packed, prompts=source.prompts)


def _key(source: Source, tokenizer: PreTrainedTokenizerBase, row_tokens: int) -> str:
    """Digest of everything that affects the content of rows."""
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        files = sorted(path for path in Path(scratch).rglob("*") if path.is_file())
        words = [hashlib.sha256(_lasting(path)).hexdigest() for path in files]
    words += [source.fingerprint(), f"{FORMAT}/{row_tokens}/{WINDOW}", *["prompts"] * source.prompts]
    return hashlib.sha256("/".join(words).encode()).hexdigest()[:16]


def _lasting(path: Path) -> bytes:
    """A file of a tokenizer without the keys that differ from process to process."""
    content = path.read_bytes()
    if path.suffix != ".json" or not isinstance(found := json.loads(content), dict):
        return content
    return json.dumps({key: value for key, value in found.items() if key not in PASSING}, sort_keys=True).encode()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _opened(directory: Path) -> PackedRows | None:
    """The rows of a directory; None if it is missing or damaged."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["bytes"] == _sizes(directory):
            return replace(_mapped(directory, int(manifest["row_tokens"])), digest=manifest["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None


def _mapped(directory: Path, row_tokens: int) -> PackedRows:
    """The files as tensors."""
    flat = {name: torch.from_numpy(np.memmap(directory / name, kind, "c")) for name, kind in TENSORS.items()}
    ids, positions, mask = (flat[name].view(-1, row_tokens) for name in ("input_ids", "position_ids", "loss_mask"))
    return PackedRows(ids, positions, mask, flat["lengths"], flat["samples"])


def _sizes(directory: Path) -> dict[str, int]:
    """Bytes of each file."""
    return {name: (directory / name).stat().st_size for name in TENSORS}


def _make(directory: Path, found: Iterable[Sample], source: Source, row_tokens: int) -> None:
    """Write the rows to a temporary directory, and move it to its place."""
    temporary = Path(tempfile.mkdtemp(".tmp", f"{directory.name}.", directory.parent))
    try:
        with full_disk_named(directory.parent, "free space, or move data.cache"):
            _write(temporary, found, source, row_tokens)
            manifest = {
                "source": source.path, "row_tokens": row_tokens, "bytes": _sizes(temporary),
                "fingerprint": _mapped(temporary, row_tokens).fingerprint(),
            }  # fmt: skip
            write_json(temporary / MANIFEST, manifest)
            temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(directory: Path, found: Iterable[Sample], source: Source, row_tokens: int) -> None:
    """Write the files of the tensors, window by window."""
    rows = seen = 0
    stream = iter(tqdm(found, desc=f"samples of {source.path} tokenised", unit="", disable=None, delay=1, leave=False))
    with ExitStack() as stack:
        files = {field: stack.enter_context((directory / field).open("wb")) for field in TENSORS}
        while members := list(islice(stream, WINDOW)):
            packed = pack_window(members, row_tokens, source.prompts)
            rows, seen = rows + len(packed), seen + len(members)
            for field, file in files.items():
                file.write(getattr(packed, field).numpy().tobytes())
    if not rows:
        raise ValueError(
            f"samples of {source.path} ({seen}) hold no supervised token past the second one; "
            "give samples whose loss mask marks what the base answers"
        )
