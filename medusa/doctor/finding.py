"""What a look at the machine finds."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from medusa.files import CLONE, clones_cache

State = Literal["ok", "slow", "missing", "unknown", "wrong"]
"""As it should be, slower than it could be, an option that is not there, what could not be looked at, or what must be
mended before anything can be decoded."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    """In a word."""
    state: State
    says: str
    """One line."""
    remedy: str = ""
    """A command; "" where no command helps."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """The same as numbers and names, for programs: sizes in bytes, times in seconds."""


def install(*packages: str, extra: str = "", options: str = "") -> str:
    """The command that installs packages, or an extra of this one, for the Python that runs now."""
    if extra:
        packages = (f"-e '{CLONE}[{extra}]'" if clones_cache() else f"'medusa-decoding[{extra}]'",)
    return " ".join([shlex.quote(sys.executable), "-m pip install", *([options] if options else []), *packages])
