"""Regenerates answers with the base, so that heads learn to predict the base's text and not a corpus.

Labels that the base wrote are on-policy: heads predict exactly such text when they are used.
"""

import fcntl
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from medusa.data.exchange import Answerer, Exchange, Prompt, UnansweredError, named, samples
from medusa.files import full_disk_named, replace_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Report:
    """The result of a run."""

    lines: int
    """Number of lines in the file."""
    failed: int
    """Number of prompts without an answer, which are left out."""
    tokens: int
    """Number of supervised tokens."""


def regenerate(
    prompts: Sequence[Prompt],
    answerer: Answerer,
    out: str | Path,
    made_by: Mapping[str, Any],
    records: Callable[[Sequence[Exchange]], Sequence[Mapping[str, Any]]] = samples,
    shown: bool = True,
    distinct: bool = False,
) -> Report:
    """Let prompts be answered; write one ``{"input_ids", "loss_mask"}`` line per conversation, in the prompts' order.

    Finished conversations are appended to ``OUT.part``, and the file gets its name when it is complete. A stopped run
    can be started again and continues.

    Args:
        prompts: The prompts.
        answerer: Generates the answers.
        out: The file to write.
        made_by: All settings on which the answers depend; a run continues only if they are the same.
        records: Makes the lines of one conversation.
        shown: Show a progress bar.
        distinct: Leave out lines that equal an earlier one.

    Raises:
        UnansweredError: None of the prompts was answered.
        ValueError: There are no prompts, or the unfinished file is damaged or belongs to other prompts or settings.
    """
    if not prompts:
        raise ValueError("prompts (0) hold nothing to answer; give at least one")
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    room = full_disk_named(out.parent, "free space, then the same command continues")
    with room, closing(Part(out.with_name(f"{out.name}.part"), {"prompts": _digest(prompts), **made_by})) as part:
        missing = [(number, prompt) for number, prompt in enumerate(prompts) if number not in part.lines]
        done = len(part.lines)
        bar = tqdm(desc="the base answers", total=len(prompts), initial=done, unit="prompt", disable=not shown)
        with bar, closing(answerer.answer(missing)) as answers:
            for number, answer in answers:
                bar.update()
                if isinstance(answer, UnansweredError):
                    failures.append(named(prompts[number], answer))
                else:
                    part.add(number, records(answer))
        if not part.lines:
            raise UnansweredError(f"prompts ({len(prompts)}) got no answer at all; the first one: {failures[0]}")
        lines, tokens = part.finish(out, distinct)
    if failures:
        logger.warning("%d of %d prompts are left out; the first one: %s", len(failures), len(prompts), failures[0])
    return Report(lines, len(failures), tokens)


def _digest(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.asked, prompt.ids]).encode())
    return digest.hexdigest()[:16]


class Part:
    """An unfinished file: a line with the settings, then one line per finished prompt, in the order of completion.

    Attributes:
        lines: Offset in bytes of the line of each finished prompt.

    Raises:
        ValueError: The file is damaged, in use, or belongs to other prompts or settings.
    """

    def __init__(self, path: Path, made_by: Mapping[str, Any]) -> None:
        self._path, self._file = path, path.open("a+b")
        self.lines: dict[int, int] = {}
        self._end = 0
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(json.dumps(made_by).encode() + b"\n")
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"unfinished file ({path}) is written by another process; wait for it") from None
        except ValueError:
            self._file.close()
            raise

    def add(self, number: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Add the samples of a finished prompt."""
        self.lines[number] = self._end
        self._append(json.dumps({"prompt": number, "samples": records}).encode() + b"\n")

    def finish(self, out: Path, distinct: bool) -> tuple[int, int]:
        """Write all samples to ``out``, in the prompts' order, and remove this file; returns lines and labels."""
        lines, tokens, seen = 0, 0, set[str]()

        def write(beside: Path) -> None:
            nonlocal lines, tokens
            with beside.open("w", encoding="utf-8") as file:
                for number in sorted(self.lines):
                    self._file.seek(self.lines[number])
                    for sample in json.loads(self._file.readline())["samples"]:
                        line = json.dumps(sample) + "\n"
                        if distinct and line in seen:
                            continue
                        seen.add(line)
                        lines, tokens = lines + 1, tokens + sum(sample.get("loss_mask", ()))
                        file.write(line)

        replace_file(out, write)  # on the disk before the unfinished file is gone
        self._path.unlink()
        return lines, tokens

    def close(self) -> None:
        """Close the file and keep its content."""
        self._file.close()

    def _read(self, header: bytes) -> None:
        """Find the complete lines and remove an incomplete last one; write the header of a new file."""
        self._file.seek(0)
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            if self._end:
                try:
                    self.lines[int(json.loads(line)["prompt"])] = self._end
                except (ValueError, TypeError, KeyError):
                    raise ValueError(f"unfinished file ({self._path}) is damaged ({line[:40]!r}); remove it") from None
            elif line != header:
                raise ValueError(f"unfinished file ({self._path}) was begun with other prompts or settings; remove it")
            self._end += len(line)
        self._file.truncate(self._end)
        if not self._end:
            self._append(header)

    def _append(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        self._end += len(line)
