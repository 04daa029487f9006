"""Records of completed requests, from which heads learn: ``medusa serve --record DIR``.

What users ask and the base answers is the best training data for the heads that serve them. A line holds one request as
``{"input_ids", "loss_mask"}``, the format of ``data regenerate``: the tokens that the base read, whatever the endpoint,
and those that it wrote, which are marked.
"""

import json
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from medusa.data.exchange import Exchange, samples
from medusa.data.files import RECORDED

logger = logging.getLogger(__name__)

PARTS, LARGEST = 8, 64 << 20
"""Least number of files that share the limit, and most bytes of one; whole files are removed, the oldest first."""
MOST_WAITING = 10_000
"""Most records that wait for a slow disk; further ones are left out."""


class Recorder:
    """Writes records in a thread of its own, so that a slow or full disk keeps no request waiting.

    Args:
        directory: Where they are written, in files that only this user can read. Several servers can share it.
        most: Most bytes of all files together; servers that share a directory exceed it by up to an eighth each.

    Raises:
        OSError: The directory cannot be made or written.
    """

    def __init__(self, directory: str | Path, most: int) -> None:
        self._directory, self._most = Path(directory), most
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(self._directory, os.W_OK | os.X_OK):
            raise PermissionError(f"directory of records ({directory}) cannot be written; choose another --record")
        self._path = self._directory / "none"
        self._size = self._part = min(LARGEST, most // PARTS)  # of the current file: the first line begins a new one
        self._failing = False
        self._waiting: queue.SimpleQueue[Exchange | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Record a request. A single token, as scoring a text asks for, teaches nothing and is left out."""
        if len(answer) > 1 and self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(Exchange(list(prompt), list(answer)))

    def close(self) -> None:
        """Write what waits, and end."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (exchange := self._waiting.get()) is not None:
            line = json.dumps(samples([exchange])[0], separators=(",", ":")).encode() + b"\n"
            try:
                if len(line) <= self._most:
                    self._write(line)
                self._failing = False
            except OSError as error:
                if not self._failing:
                    logger.warning("requests are not recorded: %s", error)
                self._failing = True

    def _write(self, line: bytes) -> None:
        """Append a line, whole or not at all."""
        if self._size + len(line) > self._part:
            now = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
            self._path, self._size = self._directory / f"recorded-{now}-{secrets.token_hex(2)}.jsonl", 0
            self._remove_oldest(max(self._part, len(line)))
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        before = os.fstat(file).st_size  # 0 also if another server has removed it meanwhile
        try:
            if os.write(file, line) < len(line):
                raise OSError(f"disk of {self._directory} is full; free space")
            self._size = before + len(line)
        except OSError:
            os.ftruncate(file, before)
            if not before:  # an empty file is no data
                self._path.unlink()
            raise
        finally:
            os.close(file)

    def _remove_oldest(self, needed: int) -> None:
        """Leave room for so many bytes within the limit."""
        sizes = {}
        for path in sorted(self._directory.glob(RECORDED)):
            with suppress(FileNotFoundError):  # another server has removed it
                sizes[path] = path.stat().st_size
        room = self._most - needed - sum(sizes.values())
        for path, size in sizes.items():
            if room < 0:
                path.unlink(missing_ok=True)
                room += size
