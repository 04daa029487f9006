"""Servers of the same model: processes that are measured alternately, while the others are stopped."""

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from medusa.benchmarks.process import Process
from medusa.benchmarks.serving.client import Asking
from medusa.files import CLONE

START_SECONDS = 600.0
"""Seconds until a starting server counts as failed; vLLM on two cores takes 100 s."""
WAKE_SECONDS = 0.5
"""Seconds between resuming a stopped server and the first request."""
TWO_THREADS = {"OMP_NUM_THREADS": "2"}


class Place(NamedTuple):
    """The command of a server, and the name of its model."""

    command: Sequence[str]
    """The command; ``{port}`` is replaced by the port."""
    model: str
    continuous_usage: bool
    """Whether it can report the tokens of each chunk."""
    environment: Mapping[str, str] = {}
    more: Mapping[str, Any] = {}
    """Additional fields of every request."""


NAMES = ("ours", "ours-plain", "vllm", "transformers")
"""Compared servers. This engine without speculation is a separate server, because servers cache prompts."""


def places(environments: Path, model: str, heads: str | None) -> dict[str, Place]:
    """The servers on two cores, in bfloat16, each configured by its own documentation; vLLM caches prefixes.

    Args:
        environments: The directory that benchmarks/peers/setup.sh has created.
        model: Directory of smollm2.
        heads: Directory of trained heads; None = those in the repository.
    """
    ours = [str(CLONE / "launch.sh"), "serve", "--base", "smollm2", *(["--heads", heads] if heads else [])]
    vllm = [str(environments / "vllm/bin/python"), "-m", "vllm.entrypoints.openai.api_server"]
    transformers = [str(environments / "hfserve/bin/transformers"), "serve", model, "--continuous-batching"]
    transformers += ["--cb-num-blocks", "256", "--cb-max-batch-tokens", "1024"]  # or cache and mask take 13 of 24 GB
    # Prompts come again in later rounds, and drafts from their earlier answers would be right by heart.
    own = Place([*ours, "--dtype", "bfloat16", "--no-ngrams", "--port", "{port}"], "smollm2", True, TWO_THREADS)
    return {
        "ours": own,
        "ours-plain": own._replace(more={"speculation": {"enabled": False}}),
        "vllm": Place(
            [*vllm, "--model", model, "--served-model-name", "smollm2", "--dtype", "bfloat16",
             "--max-model-len", "4096", "--max-num-seqs", "64", "--port", "{port}"],
            "smollm2", True,
            {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "VLLM_CPU_KVCACHE_SPACE": "4",
             "LD_PRELOAD": str(environments / "vllm/lib/libiomp5.so")},
        ),
        "transformers": Place(
            [*transformers, "--device", "cpu", "--dtype", "bfloat16", "--port", "{port}"], model, False, TWO_THREADS
        ),
    }  # fmt: skip


class Server:
    """A server that is ready, and is stopped while it is not used.

    Raises:
        RuntimeError: The server ended or was not ready in time; the message has the last lines of its log.
    """

    def __init__(self, name: str, place: Place, log: Path) -> None:
        self._place = place
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        words = [word.replace("{port}", str(self._port)) for word in place.command]
        self.process = Process(f"server {name}", words, log, {"HF_HUB_OFFLINE": "1"} | dict(place.environment))
        try:
            self._wait()
        except BaseException:
            self.process.close()
            raise
        self.process.pause()

    @contextmanager
    def awake(self, temperature: float) -> Iterator[Asking]:
        """A context in which the server works; gives the parameters of requests."""
        self.process.resume()
        time.sleep(WAKE_SECONDS)
        yield Asking(
            f"http://127.0.0.1:{self._port}/v1", self._place.model, temperature=temperature,
            continuous_usage=self._place.continuous_usage, more=self._place.more,
        )  # fmt: skip
        self.process.pause()

    def _wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        while self.process.runs and time.monotonic() < until:
            with suppress(httpx.HTTPError):
                answer = httpx.get(f"http://127.0.0.1:{self._port}/health", timeout=5, trust_env=False)
                if answer.status_code == HTTPStatus.OK:
                    return
            time.sleep(0.5)
        raise self.process.failure("is not ready" if self.process.runs else "ended")
