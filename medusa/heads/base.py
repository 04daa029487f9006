"""The interface of head architectures: they read hidden states and drafted tokens, and give logits for each head."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from medusa.attention import TreeAttention
from medusa.base.output import Matrices
from medusa.cache import Cached, Follower
from medusa.cpu.native import native_linear
from medusa.cpu.recurrent import RecurrentWeights
from medusa.heads.assistant_layers import AssistantConfig
from medusa.heads.layer import LayerConfig


class Vocabulary(Protocol):
    """The base's embeddings and output layer, as heads use them; ``BaseModel`` is one."""

    attention: TreeAttention
    """The attention backend, for heads with a KV cache."""

    @property
    def linear(self) -> bool:
        """Whether logits are a linear function of hidden states, apart from a constant."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [..., D] of token ids [...]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of last hidden states [..., D]."""

    def logits_of(self, tokens: Tensor, pack: bool = False) -> Callable[[Tensor], Tensor]:
        """A function that computes the logits of these tokens only; see ``BaseModel.logits_of``."""

    @property
    def key_layers(self) -> dict[str, int]:
        """The layers whose keys and values assistants read; see ``BaseModel.key_layers``."""

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Number of a layer's key heads, and their size; see ``BaseModel.heads_of``."""

    @property
    def matrices(self) -> Matrices | None:
        """Embeddings [V, D], weight [V, D] and bias of the output layer; None if they do more than these products."""


@dataclass(frozen=True)
class HeadsConfig:
    """The shape of a set of heads; written as ``config.json`` beside their weights."""

    hidden_size: int
    """D, the base's hidden size."""
    vocab_size: int
    """V, rows of the base's output layer; 0 = not known, since some formats of shared heads do not store it."""
    num_heads: int = 4
    """K: head k (1-based) reads the hidden state at position t and predicts token t + 1 + k."""
    num_layers: int = 1
    """Residual blocks per head ("block": decoder layers for all heads), each with its own weights."""
    own_lm_heads: bool = False
    """True: every head ("attention", "block": all heads together) has its own vocabulary matrix [V, D]. False: the
    frozen one of the base serves all."""
    base: str = ""
    """Directory or Hub id of the base that the heads were trained on."""
    base_source: str = ""
    """The weights of that base that were used, if its name does not say it (``BaseModel.source``)."""
    architecture: str = "medusa"
    """A name in ``medusa.heads.ARCHITECTURES``."""
    base_adapter: str = ""
    """Directory of the adapter that joint training (Medusa-2) added to the base; "" = the base was frozen."""
    feature_layers: tuple[int, ...] = ()
    """Layers of the base, counted from 1, whose outputs heads read in addition to the last hidden state ("attention",
    "block": instead of it; the last layer may be one of them). 0 = the middle one, -3 = the last but three; see
    ``layers_of``."""
    rank: int = 64
    """Rank of the correction by the previous drafted token; architectures "markov" and "block" only. 0 = none ("block",
    as in DFlash)."""
    draft_vocab_size: int = 0
    """Number of tokens that heads can draft, the most frequent ones; 0 = the whole vocabulary."""
    layer: LayerConfig | None = None
    """Shape of the heads' decoder layers; architectures "attention" and "block" only."""
    mask_token: int | None = None
    """The first row of a block begins as the root's embedding, and all others as the embedding of this token (DSpark);
    None = as ``BlockHeads`` describes."""
    own_correction: bool = False
    """The correction has two matrices of the vocabulary's size (DSpark) instead of using the base's; such block heads
    can draft, but are not trained here."""
    skip_root: bool = False
    """A block has one more row, that of the root, from which nothing is guessed (DFlash); such heads are not trained
    here."""
    layer_windows: tuple[int, ...] = ()
    """Last positions that each decoder layer of a block sees, counted from a row's own (0 = the whole text); () = all
    layers see the whole text. Such heads are not trained here."""
    assistant: AssistantConfig | None = None
    """Shape of the layers; architecture "assistant" only."""

    def __post_init__(self) -> None:
        for name in ("feature_layers", "layer_windows"):  # JSON has lists only
            object.__setattr__(self, name, tuple(getattr(self, name)))
        layer: Any = self.layer
        if isinstance(layer, dict):
            object.__setattr__(self, "layer", LayerConfig(**layer))
        assistant: Any = self.assistant
        if isinstance(assistant, dict):
            object.__setattr__(self, "assistant", AssistantConfig(**assistant))
        elif not isinstance(assistant, AssistantConfig | None):
            raise ValueError(f"assistant ({assistant!r}) must hold its sizes by name; correct the heads' config")
        for name in ("base", "base_source", "architecture", "base_adapter"):
            if not isinstance(value := getattr(self, name), str):
                raise ValueError(f"{name} ({value!r}) must be text; correct the heads' config")
        for name in ("hidden_size", "vocab_size", "num_heads", "num_layers", "rank"):
            may_lack = name == "vocab_size" or (name == "rank" and self.architecture == "block")
            value, least = getattr(self, name), 0 if may_lack else 1
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"{name} ({value!r}) must be a whole number of at least {least}; correct the heads' config"
                )
        if not isinstance(self.skip_root, bool):
            raise ValueError(f"skip_root ({self.skip_root!r}) must be true or false; correct the heads' config")
        windows: Any = self.layer_windows
        if windows and (len(windows) != self.num_layers or any(not isinstance(w, int) or w < 0 for w in windows)):
            raise ValueError(
                f"layer_windows ({list(windows)}) must be a whole number of at least 0 for each of {self.num_layers}"
                " layers; correct the heads' config"
            )
        if (
            self.assistant is not None
            and self.assistant.num_centroids
            and self.vocab_size % self.assistant.num_centroids
        ):
            raise ValueError(
                f"assistant's centroids ({self.assistant.num_centroids}) must divide the vocabulary"
                f" ({self.vocab_size}); correct the heads' config"
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
        """Raise ValueError if heads of this shape do not fit a base of these sizes; ``name`` is the base's."""
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
        """``feature_layers`` for a base of ``num_layers`` layers, all counted from 1."""
        return tuple(layer + num_layers if layer < 0 else layer or num_layers // 2 for layer in self.feature_layers)

    @property
    def is_dflash(self) -> bool:
        """Whether they are blocks as DFlash has them, which differ from those that are trained here."""
        return self.skip_root or bool(self.layer_windows) or not self.rank

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return self.num_heads + self.skip_root

    @property
    def output_size(self) -> int:
        """Columns of the draft logits: tokens that heads can draft."""
        return self.draft_vocab_size or self.vocab_size


class DraftHeads(nn.Module, ABC):
    """K draft heads: the interface between an architecture and training or decoding.

    Training calls ``forward`` for all heads at many positions of a known text. Decoding calls ``begin`` once per step
    and ``level`` once per head: the tree grows by one level, and head k may read the tokens above it.

    Both pass the base's hidden states, followed by the outputs of ``feature_layers``; heads begin with ``fuse``.

    Heads that remember (``remembers``) have a KV cache of their own, through which they see the text before a position.
    They are trained on whole documents, and their ``memory`` reads the hidden states of committed tokens.

    Shapes: M positions, B sequences, m tree nodes that get children (the frontier), K, D, F = D * (1 + number of
    feature layers), and V columns of logits: the vocabulary, or the part of it that heads can draft.

    Attributes:
        config: The shape.
        draft_ids: int64 [V] token ids of the columns, ascending, if heads can draft only a part of the vocabulary;
            None = all of it.
        lm_heads: Own vocabulary matrices [K, V, D], or one for all [1, V, D]; None = the base's frozen output layer.
        fusion: Maps the feature layers' outputs [F - D] to a summand of the last hidden state [D]; None without them.
        reads: int64 [F], the columns of the base's hidden states that these heads read, if the base taps more layers
            for other heads; None = all.
        native: The weights as a C++ kernel drafts with them; None = no kernel supports these heads.
        memory: The KV cache of frozen heads that remember.
    """

    remembers = False
    sees_base = False
    """Whether they read the base's keys and values."""
    one_output = False
    """Whether own vocabulary matrices are one for all heads."""
    draft_ids: Tensor | None

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size) if config.draft_vocab_size else None)
        shape = (1 if self.one_output else config.num_heads, config.output_size, config.hidden_size)
        self.lm_heads = nn.Parameter(torch.zeros(shape)) if config.own_lm_heads else None
        self._joined_output: Callable[[Tensor], Tensor] | None = None  # of frozen heads, see ``join``
        self.fusion: nn.Linear | None = None
        self.reads: Tensor | None = None
        self.native: RecurrentWeights | None = None  # of frozen heads, see ``join``
        self.memory: Follower | None = None  # of frozen heads
        if config.feature_layers:
            self.fusion = nn.Linear(len(config.feature_layers) * config.hidden_size, config.hidden_size, bias=False)
            nn.init.zeros_(self.fusion.weight)

    @property
    def observers(self) -> list[Follower]:
        """The layers that read the hidden states of committed tokens: the memory of frozen heads that remember."""
        return [] if self.memory is None else [self.memory]

    def fuse(self, hidden: Tensor) -> Tensor:
        """The hidden state [..., D] that heads start from, made of the base's [..., F]; fresh heads take its first D.

        Every layer's output is normed separately, because the residual stream grows from layer to layer.

        Raises:
            ValueError: The hidden state has another width, that of other layers.
        """
        last, layers = self.split(hidden)
        if self.fusion is None:
            return last
        fused: Tensor = last + self.fusion(nn.functional.rms_norm(layers, layers.shape[-1:]).flatten(-2))
        return fused

    def split(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Split the base's hidden states [..., F] into the last one [..., D] and those of feature layers [..., n, D].

        Raises:
            ValueError: The hidden state has another width, that of other layers.
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
        """The columns [..., F] that these heads read, of hidden states that may hold more layers."""
        return hidden if self.reads is None else hidden[..., self.reads]

    @abstractmethod
    def forward(
        self,
        hidden_MF: Tensor,
        path_MK: Tensor,
        vocabulary: Vocabulary,
        places_M: Tensor | None = None,
        wanted_M: Tensor | None = None,
        /,
    ) -> Tensor:
        """Features [K, M, D], the input of a vocabulary matrix.

        Args:
            hidden_MF: Hidden states of the base at M positions t, see ``BaseModel.hidden_states``.
            path_MK: Token ids at t + 1 .. t + K; head k may read the first k of them.
            vocabulary: Embeds tokens.
            places_M: int64 positions t, for heads that remember: all positions of whole documents, each counted from
                0; None = of one document.
            wanted_M: bool, the positions whose features are needed; other features are undefined. None = all.
        """

    @abstractmethod
    def begin(self, hidden_BF: Tensor, vocabulary: Vocabulary, cached: Cached = ()) -> Any:
        """The state that the first level starts from.

        Args:
            hidden_BF: The hidden states that predicted the roots.
            vocabulary: The base's embeddings and output layer.
            cached: The cached texts, for heads that remember.
        """

    @abstractmethod
    def level(
        self, head: int, state: Any, parents_Bm: Tensor, tokens_Bm: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Any]:
        """Draft the children of m nodes per sequence.

        Args:
            head: 0-based; also the depth of the m nodes.
            state: The state that ``begin`` or the previous level returned.
            parents_Bm: Index of each node's parent among the nodes of the previous level; 0 for the root.
            tokens_Bm: The nodes' tokens; the roots at level 0.
            vocabulary: Embeds tokens and computes logits.

        Returns:
            Logits of the children [B, m, V], or [B, 1, V] if they are the same for all m nodes; and the new state.
        """

    def check_finite(self, name: str) -> None:
        """Check that all weights are finite numbers.

        Raises:
            ValueError: They are not.
        """
        for key, weight in self.state_dict().items():
            if not weight.isfinite().all():
                raise ValueError(
                    f"heads ({name}) have {key} with numbers that are not finite; train them again, or copy them"
                )

    def with_config(self, **changes: Any) -> Self:
        """Heads with another config that share the memory of these weights; these heads are not changed."""
        with torch.device("meta"):  # nothing is allocated
            same = type(self)(replace(self.config, **changes))
        same.load_state_dict(self.state_dict(), assign=True)
        return same.train(self.training)

    def join(self, vocabulary: Vocabulary) -> None:
        """Precompute products of frozen weights; part of ``freeze``."""
        if self.lm_heads is not None and self.one_output:
            self._joined_output = native_linear(self.lm_heads[0])
        elif self.draft_ids is not None and self.lm_heads is None:
            self._joined_output = vocabulary.logits_of(self.draft_ids, pack=True)

    def init_from_base(self, lm_head_weight: Tensor, last_norm_D: Tensor | None = None) -> None:
        """Initialise own vocabulary matrices, if there are any, with the base's (paper section 2.2.1).

        Args:
            lm_head_weight: [vocabulary, D] weight of the base's output layer.
            last_norm_D: Weight of the base's last norm, for heads with a norm in front of the output layer.
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
        """Columns of the draft logits for token ids; negative for tokens that heads cannot draft."""
        if self.draft_ids is None:
            return tokens
        nearest = torch.searchsorted(self.draft_ids, tokens.contiguous()).clamp(max=len(self.draft_ids) - 1)
        return torch.where(self.draft_ids[nearest] == tokens, nearest, -1)

    def output(self, vocabulary: Vocabulary) -> Callable[[Tensor], Tensor]:
        """The shared output layer of the base: features [..., D] -> logits [..., V]."""
        if self.draft_ids is None:
            return vocabulary.logits
        return vocabulary.logits_of(self.draft_ids)

    def head_logits(self, head: int, features: Tensor, vocabulary: Vocabulary) -> Tensor:
        """Logits [..., V] of one head's features [..., D]."""
        if self._joined_output is not None or self.lm_heads is None:
            return (self._joined_output or self.output(vocabulary))(features)
        return nn.functional.linear(features, self.lm_heads[0 if self.one_output else head])
