"""CPU time of the load test, of the server and of everybody else, as Linux tells it."""

import os
import time
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class Usage(NamedTuple):
    """Seconds, of the wall's clock and of CPU cores; None where it is not known."""

    wall: float
    client: float
    server: float | None
    machine: float | None

    def since(self, before: "Usage") -> "Usage":
        """What was used between two readings."""
        return Usage(*(None if a is None or b is None else a - b for a, b in zip(self, before, strict=True)))  # type: ignore[arg-type]

    def cores(self) -> dict[str, float | None]:
        """Cores that were busy on average: with the client, the server, and others."""
        known = self.machine is not None and self.server is not None
        others = max(0.0, (self.machine or 0) - (self.server or 0) - self.client) if known else None
        values = {"client": self.client, "server": self.server, "others": others, "machine": self.machine}
        return {name: None if value is None else value / self.wall for name, value in values.items()}


def usage(session: int | None = None) -> Usage:
    """A reading; the server is all processes of a session."""
    server = None if session is None or not PROC.is_dir() else _session(session)
    return Usage(time.monotonic(), time.process_time(), server, _machine())


def _machine() -> float | None:
    try:
        first = (PROC / "stat").read_text(encoding="ascii").splitlines()[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, irq, softirq, _stolen = map(int, first)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _session(session: int) -> float:
    """CPU time of the processes of a session that still run."""
    ticks = 0
    for path in PROC.glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
