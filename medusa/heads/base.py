"""What every head architecture is: hidden state in, one draft distribution per head out."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LmHead = Callable[[Tensor], Tensor]
"""Maps feature vectors [..., D] to logits [..., V]; the base's own output layer."""


@dataclass(frozen=True)
class HeadsConfig:
    """The shape of a set of heads; written as ``config.json`` beside their weights."""

    hidden_size: int
    """D, the base's hidden size."""
    vocab_size: int
    """V, rows of the base's output layer."""
    num_heads: int = 4
    """K: head k (1-based) reads the hidden state at position t and predicts token t + 1 + k."""
    num_layers: int = 1
    """Residual blocks per head, each with its own weights."""
    own_lm_heads: bool = False
    """True: every head owns a vocabulary matrix [V, D]. False: all share the base's frozen one."""
    sees_root: bool = False
    """True: heads also read the embedding of token t + 1, which is known when they draft. False: the paper's heads."""
    base: str = ""
    """Directory or Hub id of the base that the heads were trained on."""
    architecture: str = "medusa"
    """A name in ``medusa.heads.ARCHITECTURES``."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_heads", "num_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} ({value!r}) must be a whole number of at least 1; correct the heads' config")


class DraftHeads(nn.Module, ABC):
    """K draft heads. Training and decoding know nothing else about an architecture.

    Attributes:
        config: The shape.
        lm_heads: Own vocabulary matrices [K, V, D], or None where the base's frozen output layer is shared.
    """

    lm_heads: nn.Parameter | None

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config

    @abstractmethod
    def forward(self, hidden_MD: Tensor, root_MD: Tensor) -> Tensor:
        """Features [K, M, D] that a vocabulary matrix reads.

        Args:
            hidden_MD: Hidden states of the base at M positions t, after its last norm.
            root_MD: The base's input embeddings of the tokens at t + 1; an architecture may ignore them.
        """

    def freeze(self) -> None:
        """Prepare for decoding; the weights do not change any more. Training never calls it."""

    def init_from_base(self, lm_head_weight_VD: Tensor) -> None:
        """Start own vocabulary matrices, where there are any, as copies of the base's (paper section 2.2.1)."""
        if self.lm_heads is not None:
            with torch.no_grad():
                self.lm_heads.copy_(lm_head_weight_VD.expand_as(self.lm_heads))

    def logits(self, hidden_MD: Tensor, root_MD: Tensor, lm_head: LmHead) -> Tensor:
        """Draft logits [K, M, V] of all heads at M positions; ``lm_head`` is used where it is shared."""
        features_KMD = self(hidden_MD, root_MD)
        if self.lm_heads is None:
            return lm_head(features_KMD)
        return torch.bmm(features_KMD, self.lm_heads.transpose(1, 2))
