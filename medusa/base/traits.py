"""What is found out about a base by trying it out (``medusa.loading``)."""

from dataclasses import dataclass
from typing import Literal

from medusa.base.documents import Separation

Decoding = Literal["tree", "chain", "plain"]
"""What a base verifies exactly: any tree, chains only, or single rows only."""


@dataclass(frozen=True)
class Traits:
    """The defaults are those of most families; nothing has been tried out yet."""

    decoding: Decoding = "tree"
    """See ``medusa.loading.self_test.choose_decoding``."""
    explicit_mask: bool = False
    """The family drops the step's plan on its way to the attention: each call carries the whole mask instead."""
    gathered: bool = False
    """Its layers compute on what is cached before their attention reads it (latent attention): they get a copy."""
    separation: Separation = "positions"
    """How documents of packed rows are kept apart, see ``medusa.loading.separation.choose_separation``."""
    exact: bool | None = None
    """Whether a row is equal bit by bit in passes of any rows, so that texts are plain decoding's in any dtype; None =
    not tried, see ``medusa.loading.exactness.find_out``."""
