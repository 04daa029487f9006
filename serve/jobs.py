"""Requests in the engine."""

from dataclasses import dataclass, field

import medusa
from medusa.serve.grammar import Following
from medusa.serve.request import Asked, Ticket


@dataclass(eq=False)
class Job:
    """A request that waits or runs; times are seconds of the monotonic clock."""

    ticket: Ticket
    arrived: float
    deadline: float
    batch: medusa.Batch = field(init=False)
    request: medusa.Request = field(init=False)
    """The request in the batch, from its acceptance on."""
    constraint: Following | None = None
    admitted: bool = False
    """Whether it was admitted before."""
    told: int = 0
    """Number of tokens that were sent to the client."""
    first: float = 0.0
    """Time of the first token; 0 = not yet."""
    latest: float = 0.0
    """Time of the latest token."""
    steps: int = 0
    """Counted steps, and their draft tokens."""
    draft_tokens: int = 0
    accepted: list[int] = field(default_factory=list)
    """``Output.accepted`` at the last count."""

    @property
    def asked(self) -> Asked:
        """The client's request."""
        return self.ticket.asked
