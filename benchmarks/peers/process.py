"""Other engines as processes that are asked in turn; they are stopped in between."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch

from benchmarks.peers.copies import CHECKPOINT, GGUF, OPENVINO, copies_of

logger = logging.getLogger(__name__)

SCRIPTS = Path(__file__).parent / "engines"
PLAIN, LOOKUP, MEDUSA = "plain", "prompt-lookup", "medusa"
MODES = {
    "openvino": (PLAIN, LOOKUP),
    "llamacpp": (PLAIN, LOOKUP),
    "vllm": (PLAIN, LOOKUP, MEDUSA),
}
"""What each engine can be measured with."""
BATCHING = ("vllm",)
"""Engines that are given several prompts at once."""


class Place(NamedTuple):
    """Where an engine is: its interpreter, its script, its copy of the model."""

    python: str
    script: str
    model: str


def places(environments: Path, base: str) -> dict[str, Place]:
    """The engines with their copies of a base; one that is not there is left out, and the log says so.

    Args:
        environments: The directory that benchmarks/peers/setup.sh has filled.
        base: Name of a base or shape.

    Raises:
        ValueError: There are no copies of this base, or they are of other weights.
    """
    copies = copies_of(environments, base)
    known = {
        "openvino": Place(str(environments / "openvino/bin/python"), "openvino_genai_.py", str(copies / OPENVINO)),
        "llamacpp": Place(str(environments / "llamacpp/bin/python"), "llamacpp.py", str(copies / GGUF)),
        "vllm": Place(str(environments / "vllm/bin/python"), "vllm_.py", str(copies / CHECKPOINT)),
    }
    for name, place in known.items():
        for path in (place.python, place.model):
            if not Path(path).exists():
                logger.warning("engine %s is left out: %s is missing", name, path)
    return {name: place for name, place in known.items() if Path(place.python).exists() and Path(place.model).exists()}


class Engine:
    """One engine in one mode, loaded.

    Args:
        name: Whose ``place`` it is.
        mode: One of its ``MODES``.
        place: Where it is.
        log: File that gets what it says.
        room: Most tokens of a prompt and its answer.
        heads: Directory of the heads that ``MEDUSA`` drafts with.

    Raises:
        RuntimeError: It ends before it is ready; its last words are in the message.
    """

    def __init__(self, name: str, mode: str, place: Place, log: Path, room: int, heads: Path | None = None) -> None:
        self.name, self.mode, self._log = name, mode, log
        words = [place.python, str(SCRIPTS / place.script), place.model, mode, str(room)]
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [*words, *([str(heads)] if heads else [])],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                env=os.environ | _same_processors() | {"PYTHONPATH": str(Path(__file__).parents[2])},
            )  # fmt: skip
        self.version: str = self._answer()["version"]
        self._signal(signal.SIGSTOP)

    def complete(self, prompts: Sequence[list[int]], new: int, eos: Sequence[int]) -> list[list[int]]:
        """Answers to prompts that share a batch, greedily, of ``new`` tokens at most; those of ``eos`` end them.

        Raises:
            RuntimeError: The engine has ended; its last words are in the message.
        """
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None, "a pipe"
        try:
            self._process.stdin.write(json.dumps({"prompts": list(prompts), "new": new, "eos": list(eos)}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        outputs: list[list[int]] = self._answer()["outputs"]
        self._signal(signal.SIGSTOP)
        return outputs

    def seconds_per_token(self, prompt: list[int], new: int) -> float:
        """Of ``new`` tokens behind a first one: the prompt's own time is left out."""
        clocks = [time.perf_counter()]
        for count in (1, 1 + new):
            (tokens,) = self.complete([prompt], count, [])
            if len(tokens) != count:
                raise RuntimeError(f"engine {self.name} ({self.mode}) wrote {len(tokens)} tokens in place of {count}")
            clocks.append(time.perf_counter())
        return (clocks[2] - 2 * clocks[1] + clocks[0]) / new

    def close(self) -> None:
        """End the process and what it has started."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what was not read
                cast(IO[str], pipe).close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> RuntimeError:
        words = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:]
        return RuntimeError(f"engine {self.name} ({self.mode}) ended; {self._log} says:\n" + "\n".join(words))

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)


@contextmanager
def engines(
    environments: Path, base: str, room: int, modes: Mapping[str, Sequence[str]], heads: Path | None = None
) -> Iterator[list[Engine]]:
    """Engines with copies of a base, each in these modes, until the end of the block.

    Args:
        environments, base: As ``places`` takes them.
        room, heads: As ``Engine`` takes them.
        modes: By name; ``MEDUSA`` only where there are heads.

    Raises:
        ValueError, RuntimeError: As ``places`` and ``Engine`` say.
    """
    with ExitStack() as stack:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or else stopped processes outlive this one
        stack.callback(signal.signal, signal.SIGTERM, before)
        found = []
        for name, place in places(environments, base).items():
            for mode in modes[name]:
                if mode != MEDUSA or heads is not None:
                    log = environments / f"{name}-{mode}.log"
                    found.append(Engine(name, mode, place, log, room, heads if mode == MEDUSA else None))
                    stack.callback(found[-1].close)
        yield found


def _same_processors() -> dict[str, str]:
    """As many threads as torch has here, where this process may run."""
    threads = torch.get_num_threads()
    cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else range(threads)
    bound = ",".join(map(str, cores))
    return {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": bound, "VLLM_CPU_KVCACHE_SPACE": "2"}
