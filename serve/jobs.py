"""Requests inside the engine, and who of those that wait comes next."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from medusa import Batch, Completion
from serve.request import Request, Ticket


@dataclass(eq=False)
class Job:
    """A request that waits or runs; times are those of the monotonic clock, in seconds."""

    ticket: Ticket
    arrived: float
    deadline: float
    rows: int = 0
    """Rows of the KV cache that it can need at most."""
    batch: Batch | None = None
    completion: Completion | None = None
    told: int = 0
    """Tokens that were handed over."""
    first: float = 0.0
    """When the first of them came; 0 = not yet."""
    latest: float = 0.0
    """When the latest came."""
    steps: int = 0
    """Steps that were counted, and their draft tokens."""
    draft_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    """As ``Output.accepted``, when they were counted."""

    @property
    def request(self) -> Request:
        """What was asked for."""
        return self.ticket.request


class Waiting:
    """Requests that wait for room in the batch, in the order of their arrival."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs))

    def add(self, job: Job) -> None:
        """Let it wait behind the others."""
        self._jobs.append(job)

    def remove(self, job: Job) -> None:
        """Let it wait no more, if it does."""
        if job in self._jobs:
            self._jobs.remove(job)

    def next(self, running: Counter[str]) -> Job | None:
        """Who comes next, and stays until it is removed; None where nobody waits.

        Lower priority numbers come first, then the client with fewest requests running, then who came first.

        Args:
            running: Requests of each client that are under way.
        """
        return min(self._jobs, key=lambda job: (job.request.priority, running[job.request.client]), default=None)
