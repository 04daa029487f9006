"""Engines as processes that are measured in turn; the others are stopped meanwhile."""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from tqdm import tqdm

SCRIPTS = Path(__file__).parent / "engines"
MODES = {
    "ours": ("plain", "heads", "prompt-lookup", "default"),
    "transformers": ("plain", "prompt-lookup"),
    "openvino": ("plain", "prompt-lookup"),
    "llamacpp": ("plain", "prompt-lookup"),
    "vllm": ("plain", "prompt-lookup"),
}
"""What each engine is measured with."""
BATCHING = ("ours", "vllm")
"""Engines that are given several prompts at once."""
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "2", "OMP_NUM_THREADS": "2"}


class Place(NamedTuple):
    """Where an engine is: its interpreter, its script, its copy of the model."""

    python: str
    script: str
    model: str


class Engine:
    """One engine in one mode, loaded.

    Raises:
        RuntimeError: It ends before it is ready; its last words are in the message.
    """

    def __init__(self, name: str, mode: str, place: Place, log: Path) -> None:
        self.name, self.mode, self._log = name, mode, log
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [place.python, str(SCRIPTS / place.script), place.model, mode],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parents[2])},
            )  # fmt: skip
        self._answer()
        self._signal(signal.SIGSTOP)

    def complete(self, prompts: Sequence[list[int]], new: int) -> dict[str, Any]:
        """Seconds and outputs of prompts that share a batch."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None, "a pipe"
        self._process.stdin.write(json.dumps({"prompts": list(prompts), "new": new}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

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


def measure(
    engines: Sequence[Engine], prompts: Sequence[list[int]], batch: int, new: int, rounds: int
) -> list[dict[str, Any]]:
    """Complete all prompts with every engine in turn, after a round that is not counted.

    Returns:
        Per engine: its median tokens per second over all rounds, whole calls, and how many tokens its completions
        begin with in common with those of the first engine, on average.
    """
    groups = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
    seconds: list[list[float]] = [[] for _ in engines]
    outputs: list[list[list[int]]] = [[] for _ in engines]
    for turn in tqdm(range(rounds + 1), desc=f"batch {batch}", unit="round"):
        for index, engine in enumerate(engines):
            answers = [engine.complete(group, new) for group in (groups if turn else groups[:1])]
            if turn:
                seconds[index].append(sum(answer["seconds"] for answer in answers))
                outputs[index] = [tokens for answer in answers for tokens in answer["outputs"]]
    figures = []
    for engine, times, texts in zip(engines, seconds, outputs, strict=True):
        count = sum(map(len, texts))
        common = mean(_common(ours, theirs) for ours, theirs in zip(texts, outputs[0], strict=True))
        figures.append({
            "engine": engine.name, "mode": engine.mode, "batch": batch, "tokens": count,
            "tokens_per_second": count / median(times), "common": common,
            "rounds": [count / time for time in times],
        })  # fmt: skip
    return figures


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next((place for place, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
