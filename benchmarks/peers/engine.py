"""Other engines with the same weights: processes that complete token ids, used alternately."""

import json
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from medusa.benchmarks.peers.copies import CHECKPOINT, GGUF, OPENVINO, copies_of
from medusa.benchmarks.process import Process
from medusa.files import CLONE

logger = logging.getLogger(__name__)

SCRIPTS = Path(__file__).parent / "engines"
PLAIN, LOOKUP, MEDUSA, EAGLE3_CHAIN, EAGLE3_TREE = "plain", "prompt-lookup", "medusa", "eagle3-chain", "eagle3-tree"
MODES = {
    "openvino": (PLAIN, LOOKUP, EAGLE3_CHAIN, EAGLE3_TREE),
    "llamacpp": (PLAIN, LOOKUP),
    "vllm": (PLAIN, LOOKUP, MEDUSA),
}
"""Modes of each engine."""
WITH_HEADS = (MEDUSA, EAGLE3_CHAIN, EAGLE3_TREE)
"""Modes that draft with heads."""
BATCHING = ("vllm",)
"""Engines that get several prompts at once."""


class Place(NamedTuple):
    """The files of an engine: its interpreter, its script, its copy of the model."""

    python: str
    script: str
    model: str


def places(environments: Path, base: str) -> dict[str, Place]:
    """The engines with their copies of a base; a missing engine is left out, and a message is logged.

    Args:
        environments: The directory that benchmarks/peers/setup.sh has created.
        base: Name of a base or shape.

    Raises:
        ValueError: There are no copies of this base, or they have other weights.
    """
    copies = copies_of(environments, base)
    known = {
        "openvino": Place(str(environments / "openvino/bin/python"), "openvino_genai_.py", str(copies / OPENVINO)),
        "llamacpp": Place(str(environments / "llamacpp/bin/python"), "llamacpp.py", str(copies / GGUF)),
        "vllm": Place(str(environments / "vllm/bin/python"), "vllm_.py", str(copies / CHECKPOINT)),
    }
    for name, place in list(known.items()):
        for path in (place.python, place.model):
            if not Path(path).exists():
                logger.warning("engine %s is left out: %s is missing", name, path)
                known.pop(name, None)
    return known


class Engine:
    """One engine in one mode; loaded, and stopped while it is not used.

    Args:
        name: Name of the engine.
        mode: One of its ``MODES``.
        place: Its files.
        log: File for its messages.
        room: Most tokens of a prompt and its answer.
        heads: Directory of the heads for this mode.

    Raises:
        RuntimeError: The engine ended before it was ready; the message has the last lines of its log.
    """

    def __init__(self, name: str, mode: str, place: Place, log: Path, room: int, heads: Path | None = None) -> None:
        self.name, self.mode = name, mode
        words = [
            place.python,
            str(SCRIPTS / place.script),
            place.model,
            mode,
            str(room),
            *([str(heads)] if heads else []),
        ]
        path = {"PYTHONPATH": str(CLONE)}
        self.process = Process(f"engine {name} ({mode})", words, log, _same_processors() | path, piped=True)
        self.version: str = self._answer()["version"]
        self.process.pause()

    def complete(self, prompts: Sequence[list[int]], new: int, eos: Sequence[int]) -> list[list[int]]:
        """Greedy answers to a batch of prompts, with at most ``new`` tokens each; tokens of ``eos`` end them.

        Raises:
            RuntimeError: The engine has ended; the message has the last lines of its log.
        """
        self.process.resume()
        try:
            self.process.pipes[0].write(json.dumps({"prompts": list(prompts), "new": new, "eos": list(eos)}) + "\n")
            self.process.pipes[0].flush()
        except BrokenPipeError:
            raise self.process.failure() from None
        outputs: list[list[int]] = self._answer()["outputs"]
        self.process.pause()
        return outputs

    def _answer(self) -> dict[str, Any]:
        line = self.process.pipes[1].readline()
        if not line:
            raise self.process.failure()
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def engines(environments: Path, base: str, room: int, heads: Mapping[str, Path]) -> Iterator[list[Engine]]:
    """A context with engines that have copies of a base, each in its ``MODES``.

    Args:
        environments, base: See ``places``.
        room: See ``Engine``.
        heads: Directories of heads by mode; a mode in ``WITH_HEADS`` without heads is left out.

    Raises:
        ValueError, RuntimeError: See ``places`` and ``Engine``.
    """
    with ExitStack() as stack:
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or stopped processes outlive this one
        stack.callback(signal.signal, signal.SIGTERM, before)
        found = []
        for name, place in places(environments, base).items():
            for mode in MODES[name]:
                own = heads.get(mode)
                if own or mode not in WITH_HEADS:
                    log = environments / f"{name}-{mode}.log"
                    found.append(Engine(name, mode, place, log, room, own))
                    stack.callback(found[-1].process.close)
        yield found


def _same_processors() -> dict[str, str]:
    """Environment variables for the same threads and cores as in this process."""
    threads = torch.get_num_threads()
    cores = sorted(os.sched_getaffinity(0))[:threads] if hasattr(os, "sched_getaffinity") else range(threads)
    bound = ",".join(map(str, cores))
    return {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": bound, "VLLM_CPU_KVCACHE_SPACE": "2"}
