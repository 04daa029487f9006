"""Settings and flags of the server, with all their defaults. Imports nothing heavy."""

from collections.abc import Sequence
from dataclasses import dataclass

from medusa.data.arguments import at_least, memory_size, seconds
from medusa.serve.flags import flag


@dataclass(frozen=True)
class EngineSettings:
    """Limits of the engine."""

    max_batch: int = flag(64, "requests that decode together", at_least(1), "N")
    max_waiting: int = flag(256, "requests that may wait; more get status 429", at_least(0), "N")
    cache_tokens: int | None = flag(
        None,
        "positions of the KV cache; if they run out, the newest request waits and goes on later; memory is used when"
        " positions are written (default: 40 %% of the memory)",
        at_least(1),
        "N",
    )
    prefill_rows: int = flag(
        512,
        "prompt tokens that one pass computes between two decode steps: fewer keep streams smooth, more finish prompts"
        " sooner",
        at_least(1),
        "N",
    )


@dataclass(frozen=True)
class ApiSettings:
    """Access, limits of requests, and reports in answers."""

    name: str = flag(
        "", "name of the base in requests (default: --base, or the base of the heads, shortened)", metavar="NAME"
    )
    api_keys: frozenset[str] = frozenset()
    """Clients must send one of these as a bearer token; empty = everyone may send requests."""
    admin_key: str = ""
    """Key for /v1/heads; empty = heads cannot be loaded at run time."""
    origins: Sequence[str] = flag(
        (), "web pages of other hosts that may send requests (CORS), * = all", metavar="URL", nargs="+"
    )
    allow_credentials: bool = flag(False, "these pages may send cookies and keys that the browser keeps")
    max_body: int = flag(4 << 20, "largest body of a request", at_least(1), "BYTES")
    max_n: int = flag(16, "completions of a request, prompts times n", at_least(1), "N")
    timeout: float | None = flag(
        None,
        "seconds that a request may take, waiting included (default: none; a request can set its own)",
        seconds,
        "S",
    )
    spec_metrics: bool = flag(
        False, "answers include metrics.speculative_decoding unless the request says otherwise (default: off)"
    )


@dataclass(frozen=True)
class Network:
    """Address and shutdown of the server."""

    host: str = flag("127.0.0.1", "where to listen", metavar="HOST")
    port: int = flag(8000, "0 = any", at_least(0), "PORT")
    drain: float = flag(30.0, "seconds that running requests may go on for after SIGTERM", seconds, "S")


@dataclass(frozen=True)
class Memory:
    """What a server keeps of completed requests, in memory to draft from and on the disk to learn from."""

    no_ngrams: bool = flag(
        False,
        "requests that name no drafter do not draft from what was completed before (default: on a CPU they do)",
    )

    record: str = flag(
        "",
        "directory where completed requests are recorded as training data, for medusa heads --answers: all that clients"
        " send and get, except with store: false; only this user can read it (default: nothing is recorded)",
        metavar="DIR",
    )
    record_most: int = flag(
        1 << 30, "largest size of all records, as 2GB; the oldest are removed (default: 1GiB)", memory_size, "SIZE"
    )
