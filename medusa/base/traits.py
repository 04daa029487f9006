"""Properties of a base that are found by tests at load (``medusa.loading``)."""

from dataclasses import dataclass
from typing import Literal

from medusa.base.documents import Separation

Decoding = Literal["tree", "chain", "plain"]
"""The drafts that a base verifies exactly: any tree, chains only, or single rows only."""


@dataclass(frozen=True)
class Traits:
    """Properties of a base; the defaults are those of most families, before any test."""

    decoding: Decoding = "tree"
    """See ``medusa.loading.self_test.choose_decoding``."""
    explicit_mask: bool = False
    """The family does not pass the step's plan on to its attention, so each call carries the whole mask instead."""
    gathered: bool = False
    """Its layers compute on cached keys and values before attention reads them (latent attention): they get a copy."""
    separation: Separation = "positions"
    """How documents of packed rows are kept apart, see ``medusa.loading.separation.choose_separation``."""
    exact: bool | None = None
    """Whether a row is equal bit by bit in every pass, so that text equals plain decoding's in any dtype; None = not
    tested, see ``medusa.loading.exactness.find_out``."""
