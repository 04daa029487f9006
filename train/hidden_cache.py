"""The base's hidden states at kept positions, on disk: those of a frozen base are the same in every epoch and run.

A directory holds `manifest.json` (the base, tokenizer, rows and heads of the states) and shards. A shard is a
safetensors file with `hidden` [M, F] in the base's dtype, the `rows` that it holds, and the number of kept positions
`per_row`. Shards are first written under another name, so a directory is valid however its writer ended. Their names
contain a digest of the manifest. Any process may add shards, and missing rows are computed.

Shapes: B rows, M kept positions, F width of hidden states: the base's hidden size, or a multiple of it with feature
layers.
"""

import hashlib
import json
import logging
import secrets
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from medusa.base.model import BaseModel
from medusa.data.packing import PackedRows
from medusa.files import read_object, replace_file, sweep, write_json
from medusa.train.features import BasePass, Positions
from medusa.train.run_directory import disk_errors_named

LOGGER = logging.getLogger("medusa.train")
MANIFEST = "manifest.json"
FORMAT = 2
"""Format version; increased when the files or the choice of kept positions change."""
ROWS_AT_A_TIME = 64
"""Number of rows whose missing states are in memory at a time."""
SAMPLED = 4096
"""Number of values of each weight that the base's checksum reads."""
NO_MATTER = {"_name_or_path", "transformers_version", "dtype", "use_cache"}
"""Keys of a base's config that do not affect hidden states, or that are compared separately."""


def identity(base: BaseModel, packed: PackedRows, num_heads: int, whole: bool = False) -> dict[str, Any]:
    """All that hidden states depend on; runs with equal identity can share them."""
    tokenizer = base.tokenizer
    config = {key: value for key, value in base.model.config.to_diff_dict().items() if key not in NO_MATTER}
    known = {
        "format": FORMAT,
        "base": _base_checksum(base),
        "config": _digest(config),  # what the weights do not show: stretched positions, windows, epsilons
        "tokenizer": _digest([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]),
        "rows": packed.fingerprint(),
        "heads": num_heads,
        "hidden_size": base.hidden_size,
        "dtype": str(base.dtype).removeprefix("torch."),
    }
    if base.feature_layers:
        known["layers"] = list(base.feature_layers)
    if whole:
        known["positions"] = "all"
    if base.traits.separation != "positions":  # caches from before this measurement may have leaking documents
        known["documents"] = "separate"
    return known


def _base_checksum(base: BaseModel) -> str:
    """Digest of the names, shapes and sampled values of all weights; it differs between fine-tunes."""
    digest = hashlib.sha256()
    for name, weight in base.model.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().flatten()
        sampled = flat[:: max(1, flat.numel() // SAMPLED)].contiguous().cpu()
        digest.update(sampled.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


class HiddenCache:
    """States from the disk; missing ones are computed by the base and written.

    Args:
        directory: directory of one identity, shared by the machines of a run.
        base: the frozen model, for its identity and its device only.
        packed: the rows.
        num_heads: K.
        source: computes missing states.
        shard_bytes: size of one file.
        whole: whether all positions of documents are kept.

    Raises:
        ValueError: the directory has another identity; the message names the differences.
    """

    def __init__(
        self,
        directory: Path,
        base: BaseModel,
        packed: PackedRows,
        num_heads: int,
        source: BasePass,
        shard_bytes: int,
        whole: bool = False,
    ) -> None:
        self._directory, self._packed, self._num_heads, self._whole = directory, packed, num_heads, whole
        self._source, self._shard_bytes, self._device = source, shard_bytes, base.device
        self._places: dict[int, tuple[Path, slice]] = {}  # by row: its shard, and where its states are
        self._seen: set[Path] = set()
        self._pending: dict[int, Tensor] = {}
        sweep(directory, ".*.tmp*")
        known = identity(base, packed, num_heads, whole)
        with disk_errors_named(f"hidden-state cache ({directory})"):
            directory.mkdir(parents=True, exist_ok=True)
            if not (directory / MANIFEST).is_file():
                write_json(directory / MANIFEST, known)
        _check_manifest(directory, known)
        self._owner = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:8]
        self._look()

    def read(self, rows_B: Tensor) -> "Mapped":
        """Hidden states [M, F] at the kept positions of rows; those on disk are read when they are indexed."""
        rows = rows_B.tolist()
        if self._missing(rows):
            self._look()  # another process may have written them
        missing = self._missing(rows)
        for start in range(0, len(missing), ROWS_AT_A_TIME):
            self._compute(missing[start : start + ROWS_AT_A_TIME])
        shards: dict[Path, Tensor] = {}  # each is mapped once: the system limits the number of mappings
        return Mapped([self._states(row, shards) for row in rows], self._device)

    def fill(self, rows_B: Tensor, rows_at_a_time: int, shown: bool) -> None:
        """Compute and write the missing states of rows, with a progress bar if `shown`."""
        missing = self._missing(rows_B.tolist())
        parts = range(0, len(missing), rows_at_a_time)
        for start in tqdm(parts, desc="hidden states", unit="batch", disable=not (shown and missing)):
            self._compute(missing[start : start + rows_at_a_time])
        self.flush()

    def flush(self) -> None:
        """Write the pending states in memory as one shard."""
        if not self._pending:
            return
        states = list(self._pending.values())
        shard = {
            "hidden": torch.cat(states),
            "rows": torch.tensor(list(self._pending)),
            "per_row": torch.tensor([len(row) for row in states]),
        }
        path = self._directory / f"{self._owner}-{secrets.token_hex(8)}.safetensors"
        with disk_errors_named(f"hidden-state cache ({self._directory})"):
            replace_file(path, partial(save_file, shard))
        self._pending = {}
        self._look()

    def _missing(self, rows: list[int]) -> list[int]:
        return [row for row in rows if row not in self._places and row not in self._pending]

    def _compute(self, rows: list[int]) -> None:
        index = torch.tensor(rows)
        per_row = Positions.of(self._packed, index, self._num_heads, self._whole).per_row.tolist()
        for row, states in zip(rows, self._source.read(index).cpu().split(per_row), strict=True):
            self._pending[row] = states.clone()  # a view would keep the whole pass in memory
        if sum(states.nbytes for states in self._pending.values()) >= self._shard_bytes:
            self.flush()

    def _states(self, row: int, shards: dict[Path, Tensor]) -> Tensor:
        if row in self._pending:
            return self._pending[row]
        shard, place = self._places[row]
        if shard not in shards:
            shards[shard] = _open(shard).get_tensor("hidden")
        return shards[shard][place]

    def _look(self) -> None:
        """Read the tables of new shards; damaged ones are ignored."""
        for path in sorted(set(self._directory.glob(f"{self._owner}-*.safetensors")) - self._seen):
            self._seen.add(path)
            try:
                shard = _open(path)
                rows, per_row = shard.get_tensor("rows").tolist(), shard.get_tensor("per_row").tolist()
            except (OSError, SafetensorError) as error:
                LOGGER.warning("hidden states (%s) cannot be read and are computed again: %s; delete it", path, error)
                continue
            start = 0
            for row, count in zip(rows, per_row, strict=True):
                self._places[row] = path, slice(start, start + count)
                start += count


class Mapped:
    """States of many rows, one tensor each, in memory or memory-mapped; a `Gathered`.

    Args:
        parts: tensors [M_i, F].
        device: device of the indexed states.
    """

    def __init__(self, parts: list[Tensor], device: torch.device) -> None:
        self._parts, self.device = parts, device
        self._ends = torch.tensor([len(part) for part in parts]).cumsum(0)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, at: tuple[Tensor, slice]) -> Tensor:
        index_N, numbers = at
        part_N = torch.searchsorted(self._ends, index_N, right=True)
        order_N = part_N.argsort(stable=True)
        touched, counts = part_N[order_N].unique_consecutive(return_counts=True)
        taken_Nf = self._parts[0].new_empty(len(index_N), self._parts[0][:0, numbers].shape[1])
        for part, places in zip(touched.tolist(), order_N.split(counts.tolist()), strict=True):
            states = self._parts[part]
            taken_Nf[places] = states[index_N[places] - int(self._ends[part]) + len(states), numbers]
        return taken_Nf.to(self.device)


@lru_cache(maxsize=64)
def _open(path: Path) -> Any:
    """A memory-mapped shard; at most 64 are open."""
    return safe_open(path, framework="pt")


def _check_manifest(directory: Path, known: dict[str, Any]) -> None:
    stored = read_object(directory / MANIFEST, "manifest", f"delete {directory}, or give another directory")
    changed = [
        f"{key} is {known.get(key)}, the states have {stored.get(key)}"
        for key in known | stored
        if known.get(key) != stored.get(key)
    ]
    if changed:
        raise ValueError(
            f"hidden-state cache ({directory}) belongs to something else: {'; '.join(changed)}; "
            "delete it or give another directory (--recipe.cache.directory DIR)"
        )
