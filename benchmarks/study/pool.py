"""Commands in processes of their own, a few at a time."""

import os
import subprocess
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Lock


@dataclass(frozen=True)
class Job:
    """Commands that follow each other."""

    name: str
    commands: Sequence[Sequence[str]]
    log: Path
    """File that takes what they say."""


class Pool:
    """Runs jobs; the first one that fails, or Ctrl-C, ends them all.

    Args:
        processes: Jobs at a time.
        environment: Variables that they get beside this process's own.
    """

    def __init__(self, processes: int, environment: Mapping[str, str]) -> None:
        self._processes = processes
        self._environment = os.environ | environment
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock, self._ended = Lock(), False

    def run(self, jobs: Sequence[Job]) -> Generator[Job]:
        """Yields each job when it is done.

        Raises:
            ChildProcessError: A command failed; names the job, its last words and its log.
        """
        with ThreadPoolExecutor(self._processes) as threads:
            futures = [threads.submit(self._do, job) for job in jobs]
            try:
                for future in as_completed(futures):
                    yield future.result()
            finally:  # leave no process behind
                with self._lock:
                    self._ended = True
                    for process in self._running:
                        process.terminate()  # a trainer answers with a checkpoint

    def _do(self, job: Job) -> Job:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with job.log.open("ab") as log:
            for command in job.commands:
                if status := self._wait(command, log.fileno()):
                    said = f"{_last_line(job.log)}; all that it said is in {job.log}"
                    raise ChildProcessError(f"{job.name} failed (exit status {status}): {said}")
        return job

    def _wait(self, command: Sequence[str], log: int) -> int:
        with self._lock:
            if self._ended:
                return 1
            # A session of its own: Ctrl-C reaches it once, through us.
            process = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
            self._running.add(process)
        status = process.wait()
        with self._lock:
            self._running.discard(process)
        return status


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
