"""The base's hidden states at kept positions, on disk: a frozen base says the same in every epoch and every run.

A directory holds `manifest.json` (which base, tokenizer, rows and heads the states belong to) and shards, each a
safetensors file with `hidden` [M, F] in the base's dtype, the `rows` that it holds, and the kept positions `per_row`.
Shards are written whole under another name first, so a directory that exists is right however its writer died, and
their names tell whose they are; any process may add shards, and rows that are not there yet are computed.

Shapes: B rows, M kept positions, F width of hidden states: the base's hidden size, times more with feature layers.
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
FORMAT = 2
"""Grows when the files or the choice of kept positions change."""
ROWS_AT_A_TIME = 64
"""Rows whose missing states are in memory together."""
SAMPLED = 4096
"""Values of each weight that the base's checksum reads."""
NO_MATTER = {"_name_or_path", "transformers_version", "dtype", "use_cache"}
"""Keys of a base's configuration that hidden states do not depend on, or that are compared by themselves."""


def identity(base: BaseModel, packed: PackedRows, num_heads: int, whole: bool = False) -> dict[str, Any]:
    """What states depend on: they are right for a run whose identity is equal."""
    tokenizer = base.tokenizer
    config = {key: value for key, value in base.model.config.to_diff_dict().items() if key not in NO_MATTER}
    known = {
        "format": FORMAT,
        "base": _base_checksum(base),
        "config": _digest(config),  # what is not in the weights: stretched positions, windows, epsilons
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
    if base.separation != "positions":  # a cache that is older than the measurement holds states that leak
        known["documents"] = "separate"
    return known


def _base_checksum(base: BaseModel) -> str:
    """Digest of the names, shapes and sampled values of all weights: another fine-tune has another one."""
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
    """States from the disk where it has them, else from the base, which fills the disk.

    Args:
        directory: of one identity; the machines of a run share it.
        base: the frozen model; it is asked for nothing but its identity and its device.
        packed: the rows.
        num_heads: K.
        source: computes what is missing.
        shard_bytes: size of one file.
        whole: all positions of documents are kept.

    Raises:
        ValueError: the directory's states belong to something else; names what differs.
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
        directory.mkdir(parents=True, exist_ok=True)
        sweep(directory, ".*.tmp*")
        known = identity(base, packed, num_heads, whole)
        _check_manifest(directory, known)
        self._owner = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:8]
        self._look()

    def read(self, rows_B: Tensor) -> "Mapped":
        """Hidden states [M, F] of the kept positions of rows; those on the disk stay there until they are taken."""
        rows = rows_B.tolist()
        if self._missing(rows):
            self._look()  # another process may have written them
        missing = self._missing(rows)
        for start in range(0, len(missing), ROWS_AT_A_TIME):
            self._compute(missing[start : start + ROWS_AT_A_TIME])
        return Mapped([self._states(row) for row in rows], self._device)

    def fill(self, rows_B: Tensor, rows_at_a_time: int, shown: bool) -> None:
        """Compute and write the states of all rows that are missing, with a progress bar where `shown`."""
        missing = self._missing(rows_B.tolist())
        parts = range(0, len(missing), rows_at_a_time)
        for start in tqdm(parts, desc="hidden states", unit="batch", disable=not (shown and missing)):
            self._compute(missing[start : start + rows_at_a_time])
        self.flush()

    def flush(self) -> None:
        """Write the states that are in memory only, as one shard."""
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
            self._pending[row] = states.clone()  # not a view that would keep the whole pass
        if sum(states.nbytes for states in self._pending.values()) >= self._shard_bytes:
            self.flush()

    def _states(self, row: int) -> Tensor:
        if row in self._pending:
            return self._pending[row]
        shard, place = self._places[row]
        states: Tensor = _open(shard).get_tensor("hidden")[place]
        return states

    def _look(self) -> None:
        """Read the tables of shards that were not there before; a damaged one does not count."""
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
    """States of many rows, one tensor each, in memory or on a disk that memory maps; a `Gathered`.

    Args:
        parts: [M_i, F] each.
        device: where what is taken goes.
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
    """A shard, mapped into memory; the oldest of many is closed."""
    return safe_open(path, framework="pt")


def _check_manifest(directory: Path, known: dict[str, Any]) -> None:
    path = directory / "manifest.json"
    if not path.is_file():
        write_json(path, known)
    stored = read_object(path, "manifest", f"delete {directory}, or give another directory")
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
