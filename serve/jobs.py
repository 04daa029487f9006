"""Requests inside the engine."""

from dataclasses import dataclass, field

import medusa
from medusa.serve.request import Asked, Ticket


@dataclass(eq=False)
class Job:
    """A request that waits or runs; times are those of the monotonic clock, in seconds."""

    ticket: Ticket
    arrived: float
    deadline: float
    batch: medusa.Batch = field(init=False)
    request: medusa.Request = field(init=False)
    """In the batch, once it is taken."""
    admitted: bool = False
    """It had room once."""
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
    def asked(self) -> Asked:
        """What was asked for."""
        return self.ticket.asked
