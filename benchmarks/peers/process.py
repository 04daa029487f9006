"""Other engines as processes that are asked in turn; they are stopped in between."""

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

SCRIPTS = Path(__file__).parent / "engines"
MODES = {
    "openvino": ("plain", "prompt-lookup"),
    "llamacpp": ("plain", "prompt-lookup"),
    "vllm": ("plain", "prompt-lookup"),
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


def places(environments: Path, model: str) -> dict[str, Place]:
    """The engines with their copies of smollm2.

    Args:
        environments: The directory that benchmarks/peers/setup.sh has filled.
        model: Directory of smollm2.
    """
    return {
        "openvino": Place(
            str(environments / "openvino/bin/python"), "openvino_genai_.py", str(environments / "smollm2-openvino")
        ),
        "llamacpp": Place(str(environments / "llamacpp/bin/python"), "llamacpp.py", str(environments / "smollm2.gguf")),
        "vllm": Place(str(environments / "vllm/bin/python"), "vllm_.py", model),
    }


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
