"""Other engines as processes that are asked in turn; they are stopped in between."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.peers.copies import CHECKPOINT, GGUF, OPENVINO, directory_of

SCRIPTS = Path(__file__).parent / "engines"
PLAIN, MEDUSA = "plain", "medusa"
MODES = {
    "openvino": (PLAIN, "prompt-lookup"),
    "llamacpp": (PLAIN, "prompt-lookup"),
    "vllm": (PLAIN, "prompt-lookup", MEDUSA),
}
"""What each engine is measured with."""
BATCHING = ("vllm",)
"""Engines that are given several prompts at once."""
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": "2"}


class Place(NamedTuple):
    """Where an engine is: its interpreter, its script, its copy of the model."""

    python: str
    script: str
    model: str


def places(environments: Path, base: str) -> dict[str, Place]:
    """The engines with their copies of a base.

    Args:
        environments: The directory that benchmarks/peers/setup.sh has filled.
        base: Name of a base or shape.

    Raises:
        FileNotFoundError: There are no copies of this base.
    """
    copies = directory_of(environments, base)
    if not copies.is_dir():
        raise FileNotFoundError(
            f"peers ({environments}) have no copies of {base}; make them: benchmarks/peers/setup.sh {environments} NAME"
        )
    return {
        "openvino": Place(str(environments / "openvino/bin/python"), "openvino_genai_.py", str(copies / OPENVINO)),
        "llamacpp": Place(str(environments / "llamacpp/bin/python"), "llamacpp.py", str(copies / GGUF)),
        "vllm": Place(str(environments / "vllm/bin/python"), "vllm_.py", str(copies / CHECKPOINT)),
    }


class Engine:
    """One engine in one mode, loaded.

    Args:
        name: Whose ``place`` it is.
        mode: One of its ``MODES``.
        place: Where it is.
        log: File that gets what it says.
        heads: Directory of the heads that ``MEDUSA`` drafts with.

    Raises:
        RuntimeError: It ends before it is ready; its last words are in the message.
    """

    def __init__(self, name: str, mode: str, place: Place, log: Path, heads: Path | None = None) -> None:
        self.name, self.mode, self._log = name, mode, log
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [place.python, str(SCRIPTS / place.script), place.model, mode, *([str(heads)] if heads else [])],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parents[2])},
            )  # fmt: skip
        self.version: str = self._answer()["version"]
        self._signal(signal.SIGSTOP)

    def complete(self, prompts: Sequence[list[int]], new: int, eos: Sequence[int]) -> list[list[int]]:
        """Answers to prompts that share a batch, greedily, of ``new`` tokens at most; those of ``eos`` end them."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.write(json.dumps({"prompts": list(prompts), "new": new, "eos": list(eos)}) + "\n")
        self._process.stdin.flush()
        outputs: list[list[int]] = self._answer()["outputs"]
        self._signal(signal.SIGSTOP)
        return outputs

    def seconds_per_token(self, prompt: list[int], new: int) -> float:
        """Of ``new`` tokens behind a first one: the prompt's own time is left out."""
        clocks = [time.perf_counter()]
        for count in (1, 1 + new):
            self.complete([prompt], count, [])
            clocks.append(time.perf_counter())
        return (clocks[2] - 2 * clocks[1] + clocks[0]) / new

    def close(self) -> None:
        """End the process and what it has started."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "a pipe"
        line = self._process.stdout.readline()
        if not line:
            words = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-8:]
            raise RuntimeError(f"engine {self.name} ({self.mode}) ended; {self._log} says:\n" + "\n".join(words))
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)
