"""What every head architecture is: hidden state and drafted tokens in, one draft distribution per head out."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from medusa.attention import TreeAttention
from medusa.cache import Cached, Follower
from medusa.cpu.native import native_linear
from medusa.cpu.packed import Packed
from medusa.cpu.recurrent import RecurrentWeights
from medusa.heads.layer import LayerConfig


class Vocabulary(Protocol):
    """Both ends of the base, as heads use them; ``BaseModel`` is one."""

    attention: TreeAttention
    """Who computes attention, for heads that remember."""

    @property
    def linear(self) -> bool:
        """Whether logits are a linear function of hidden states, apart from a constant."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [..., D] of token ids [...]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of last hidden states [..., D]."""

    def logits_of(self, tokens: Tensor, pack: bool = False) -> Callable[[Tensor], Tensor]:
        """What computes the logits of some tokens alone; see ``BaseModel.logits_of``."""

    @property
    def matrices(self) -> tuple[Tensor | Packed, Tensor | Packed, Tensor | None] | None:
        """Embeddings [V, D], weight [V, D] and bias of the output layer, where both ends are these and no more."""


@dataclass(frozen=True)
class HeadsConfig:
    """The shape of a set of heads; written as ``config.json`` beside their weights."""

    hidden_size: int
    """D, the base's hidden size."""
    vocab_size: int
    """V, rows of the base's output layer; 0 = not known: some formats of shared heads do not tell it."""
    num_heads: int = 4
    """K: head k (1-based) reads the hidden state at position t and predicts token t + 1 + k."""
    num_layers: int = 1
    """Residual blocks per head ("block": decoder layers of all), each with its own weights."""
    own_lm_heads: bool = False
    """True: every head (of "attention" and "block": all together) owns a vocabulary matrix [V, D]. False: all share the
    base's frozen one."""
    base: str = ""
    """Directory or Hub id of the base that the heads were trained on."""
    base_source: str = ""
    """Which weights of that base were used, if its name does not say it (``BaseModel.source``)."""
    architecture: str = "medusa"
    """A name in ``medusa.heads.ARCHITECTURES``."""
    base_adapter: str = ""
    """Directory of the adapter that joint training (Medusa-2) added to the base; "" = the base was frozen."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the base, counted from 1, whose outputs heads read beside the last hidden state ("attention", "block":
    in its place). 0 = the middle one, -3 = the last but three; see ``layers_of``."""
    rank: int = 64
    """Rank of the correction by the drafted token before; architectures "markov" and "block" only."""
    draft_vocab_size: int = 0
    """Number of tokens that heads can draft, the most frequent ones; 0 = the whole vocabulary."""
    layer: LayerConfig | None = None
    """Shape of the heads' decoder layer; architectures "attention" and "block" only."""
    mask_token: int | None = None
    """A block's rows begin as the base's embeddings: the root's, and this token's for all that are not known (DSpark);
    None = as ``BlockHeads`` says."""
    own_correction: bool = False
    """The correction is two matrices of the vocabulary's size (DSpark), and not made of the base's; such block heads
    draft and are not trained here."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature_layers", tuple(self.feature_layers))  # JSON knows lists only
        layer: Any = self.layer
        if isinstance(layer, dict):
            object.__setattr__(self, "layer", LayerConfig(**layer))
        for name in ("base", "base_source", "architecture", "base_adapter"):
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f"{name} ({value!r}) must be text; correct the heads' config")
        for name in ("hidden_size", "vocab_size", "num_heads", "num_layers", "rank"):
            value, least = getattr(self, name), 0 if name == "vocab_size" else 1
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{name} ({value!r}) must be a whole number of at least {least}; correct the heads' config"
                )
        if self.mask_token is not None and not 0 <= self.mask_token < self.vocab_size:
            raise ValueError(
                f"mask_token ({self.mask_token}) must be a token of the vocabulary ({self.vocab_size}); correct the"
                " heads' config"
            )
        if not 0 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size ({self.draft_vocab_size}) must be from 0 to the vocabulary's size"
                f" ({self.vocab_size}); correct the heads' config"
            )

    def check_fit(self, hidden_size: int, vocab_size: int, name: str) -> None:
        """Raise ValueError where heads of this shape are not heads of a base of these sizes and this name."""
        for what, ours, theirs in (
            ("hidden size", self.hidden_size, hidden_size),
            ("vocabulary", self.vocab_size, vocab_size),
        ):
            if ours and ours != theirs:
                raise ValueError(
                    f"heads' {what} ({ours}) is not the base's ({theirs}, {name}); these heads belong to"
                    f" {self.base or 'another base'}: give that one as the base"
                )

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """``feature_layers`` of a base of so many layers, all counted from 1: files of others may leave that to it."""
        counted = (layer + num_layers if layer < 0 else layer for layer in self.feature_layers)
        return tuple(layer or num_layers // 2 for layer in counted)

    @property
    def output_size(self) -> int:
        """Columns of the draft logits: tokens that heads can draft."""
        return self.draft_vocab_size or self.vocab_size


class DraftHeads(nn.Module, ABC):
    """K draft heads: all that training and decoding know about an architecture.

    Training calls ``forward``: all heads at many positions of a text that is known. Decoding calls ``begin`` once per
    step and ``level`` once per head: the tree grows by one level, and head k may read the tokens above it.

    Both get the base's hidden states with the outputs of ``feature_layers`` behind them, and begin with ``fuse``.

    Heads that remember (``remembers``) see the text before a position through a cache of their own: they are trained on
    whole documents, and their ``memory`` observes what the base commits.

    Shapes: M positions, B sequences, m tree nodes that get children (the frontier), K, D, F = D * (1 + number of
    feature layers), and V columns of logits: the vocabulary, or the part of it that heads can draft.

    Attributes:
        config: The shape.
        draft_ids: int64 [V] token ids of the columns, ascending, where heads can draft a part of the vocabulary only;
            None = all of it.
        lm_heads: Own vocabulary matrices [K, V, D], or one for all [1, V, D]; None where the base's frozen output layer
            is shared.
        fusion: What is added to the last hidden state [D] for the feature layers' outputs [F - D], or None without
            such layers.
        reads: int64 [F], the columns of the base's hidden states that are these heads', where the base has more layers
            tapped, for others; None = all.
        native: What a kernel drafts with, where one knows these heads; None = there is none.
        memory: What frozen heads that remember have cached.
    """

    remembers = False
    one_output = False
    """One vocabulary matrix of their own serves all heads."""
    draft_ids: Tensor | None

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size) if config.draft_vocab_size else None)
        shape = (1 if self.one_output else config.num_heads, config.output_size, config.hidden_size)
        self.lm_heads = nn.Parameter(torch.zeros(shape)) if config.own_lm_heads else None
        self._joined_output: Callable[[Tensor], Tensor] | None = None  # of heads that are frozen, see ``join``
        self.fusion: nn.Linear | None = None
        self.reads: Tensor | None = None
        self.native: RecurrentWeights | None = None  # of heads that are frozen, see ``join``
        self.memory: Follower | None = None  # likewise
        if config.feature_layers:
            self.fusion = nn.Linear(len(config.feature_layers) * config.hidden_size, config.hidden_size, bias=False)
            nn.init.zeros_(self.fusion.weight)

    @property
    def observers(self) -> list[Follower]:
        """What must see all that the base commits: the memory of frozen heads that remember."""
        return [] if self.memory is None else [self.memory]

    def fuse(self, hidden: Tensor) -> Tensor:
        """The hidden state [..., D] that heads start from, out of the base's [..., F]; fresh heads take its first D.

        Every layer's output is normed by itself: the numbers of a residual stream grow from layer to layer.

        Raises:
            ValueError: The hidden state is that of other layers.
        """
        last, layers = self.split(hidden)
        if self.fusion is None:
            return last
        fused: Tensor = last + self.fusion(nn.functional.rms_norm(layers, layers.shape[-1:]).flatten(-2))
        return fused

    def split(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """The last hidden state [..., D] and what feature layers give [..., n, D], of the base's [..., F].

        Raises:
            ValueError: The hidden state is that of other layers.
        """
        dim, count = self.config.hidden_size, len(self.config.feature_layers)
        hidden = self.own(hidden)
        if hidden.shape[-1] != dim * (1 + count):
            raise ValueError(
                f"hidden state ({hidden.shape[-1]} numbers) must hold {dim} for the last layer and for each of the"
                f" {count} feature layers of these heads; take it from base.tapped(heads.config.feature_layers)"
            )
        last, layers = hidden.tensor_split([dim], dim=-1)
        return last, layers.unflatten(-1, (count, dim))

    def own(self, hidden: Tensor) -> Tensor:
        """What these heads read [..., F] of hidden states that more layers may stand in."""
        return hidden if self.reads is None else hidden[..., self.reads]

    @abstractmethod
    def forward(
        self,
        hidden_MF: Tensor,
        path_MK: Tensor,
        vocabulary: Vocabulary,
        places_M: Tensor | None = None,
        wanted_M: Tensor | None = None,
    ) -> Tensor:
        """Features [K, M, D] that a vocabulary matrix reads.

        Args:
            hidden_MF: Hidden states of the base at M positions t, see ``BaseModel.hidden_states``.
            path_MK: Token ids at t + 1 .. t + K; head k may read the first k of them.
            vocabulary: Embeds tokens.
            places_M: int64 t, for heads that remember: all positions of some documents, each from 0 on; None = of one.
            wanted_M: bool, where they should be computed; other features are anything. None = everywhere.
        """

    @abstractmethod
    def begin(self, hidden_BF: Tensor, vocabulary: Vocabulary, cached: Cached = ()) -> Any:
        """The state that the first level starts from.

        Args:
            hidden_BF: The hidden states that predicted the roots.
            vocabulary: Both ends of the base.
            cached: What is cached of the texts; heads that remember have observed what the base has committed.
        """

    @abstractmethod
    def level(
        self, head: int, state: Any, parents_Bm: Tensor, tokens_Bm: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Any]:
        """Draft the children of m nodes per sequence.

        Args:
            head: 0-based; also the depth of the m nodes.
            state: What ``begin`` or the level before returned.
            parents_Bm: Where each node's parent stood among the nodes of the level before; 0 for the root.
            tokens_Bm: The nodes' tokens; the roots at level 0.
            vocabulary: Embeds tokens and makes logits.

        Returns:
            Logits of the children [B, m, V], or [B, 1, V] where they are the same for all m nodes; the new state.
        """

    def with_config(self, **changes: Any) -> Self:
        """Heads with the same weights, in the same memory, and another config; these stay as they are."""
        with torch.device("meta"):  # nothing is allocated
            same = type(self)(replace(self.config, **changes))
        same.load_state_dict(self.state_dict(), assign=True)
        return same.train(self.training)

    def join(self, vocabulary: Vocabulary) -> None:
        """Compute products of weights that do not change any more once and for all; part of ``freeze``."""
        if self.lm_heads is not None and self.one_output:
            self._joined_output = native_linear(self.lm_heads[0])
        elif self.draft_ids is not None and self.lm_heads is None:
            self._joined_output = vocabulary.logits_of(self.draft_ids, pack=True)

    def init_from_base(self, lm_head_weight: Tensor, last_norm_D: Tensor | None = None) -> None:
        """Start own vocabulary matrices, where there are any, as copies of the base's (paper section 2.2.1).

        Args:
            lm_head_weight: [vocabulary, D] of its output layer.
            last_norm_D: What its last norm multiplies by, for heads with a norm in front of the output layer.
        """
        if self.lm_heads is None:
            return
        if self.draft_ids is not None:
            lm_head_weight = lm_head_weight[self.draft_ids.to(lm_head_weight.device)]
        with torch.no_grad():
            self.lm_heads.copy_(lm_head_weight.expand_as(self.lm_heads))

    def token_ids(self, columns: Tensor) -> Tensor:
        """Token ids of columns of the draft logits."""
        return columns if self.draft_ids is None else self.draft_ids[columns]

    def columns(self, tokens: Tensor) -> Tensor:
        """Columns of the draft logits of token ids; negative for those that heads cannot draft."""
        if self.draft_ids is None:
            return tokens
        nearest = torch.searchsorted(self.draft_ids, tokens.contiguous()).clamp(max=len(self.draft_ids) - 1)
        return torch.where(self.draft_ids[nearest] == tokens, nearest, -1)

    def output(self, vocabulary: Vocabulary) -> Callable[[Tensor], Tensor]:
        """The base's output layer as heads share it: features [..., D] -> logits [..., V]."""
        if self.draft_ids is None:
            return vocabulary.logits
        return vocabulary.logits_of(self.draft_ids)

    def head_logits(self, head: int, features: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Logits [..., V] of one head's features [..., D]."""
        if self._joined_output is not None or self.lm_heads is None:
            return (self._joined_output or self.output(vocabulary))(features)
        return nn.functional.linear(features, self.lm_heads[0 if self.one_output else head])
