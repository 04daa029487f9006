"""Gemma 4's assistants: published drafters whose layers have queries only, and see the text through the base's cache.

The layers attend to keys and values of the base: to those of its last layer of the same kind (windows, or the whole
text) that has keys of its own. All depths of a draft are drafted at the position of the root, so a node sees the cached
text, and of the nodes above it only the state that its parent hands down. Nothing is cached, and nodes of a level do
not depend on each other: a tree costs as many passes as a chain of its depth.

Source: transformers, models/gemma4_assistant, and ``SinglePositionMultiTokenCandidateGenerator``.

Legend: B sequences, m tree nodes of a level, D hidden size of the base, A of the assistant, C best centroids, E their
tokens, V vocabulary.
"""

from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional

from medusa.base.rotary import Rotary
from medusa.base.usual_block import UnusualBlockError
from medusa.cache import Cached, texts_of
from medusa.cpu.fused_queries import FusedQueries
from medusa.cpu.native import native_linear
from medusa.heads.assistant_layers import AssistantLayer, Text
from medusa.heads.base import DraftHeads, HeadsConfig, Vocabulary
from medusa.heads.blocks import of_parents
from medusa.tree import Draft

FEW = 4
"""Most nodes for which the embeddings of their best centroids' tokens are copied, megabytes each; for more, all tokens
are scored."""
NOT_READ = -1e4
"""Logit of tokens whose centroids are not read: their probability is 0 in float32."""


class Level(NamedTuple):
    """The texts, and the states [B, m, D] that the nodes of a level hand down."""

    text: Text
    states: Tensor


class AssistantHeads(DraftHeads):
    """Head k is the assistant's k-th pass: it reads the k-th token's embedding and the state of the pass before.

    The first pass reads the base's last hidden state, which predicted the root. They are published, not trained here.
    """

    sees_base = True
    token_ordering: Tensor

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        if (shape := config.assistant) is None:
            raise ValueError("heads' assistant (None) must be given for the architecture assistant; correct the config")
        self._shape, dim = shape, shape.hidden_size
        self.pre_projection = nn.Linear(2 * config.hidden_size, dim, bias=False)
        self.layers = nn.ModuleList(AssistantLayer(shape, kind) for kind in shape.layer_types)
        self.norm = nn.RMSNorm(dim, shape.rms_norm_eps)
        self.post_projection = nn.Linear(dim, config.hidden_size, bias=False)
        self.tokens = nn.Parameter(torch.zeros(config.vocab_size, dim))
        self.centroids: nn.Linear | None = None
        if shape.num_centroids:
            self.centroids = nn.Linear(dim, shape.num_centroids, bias=False)
            self.register_buffer("token_ordering", torch.arange(config.vocab_size))
        self._rotaries = {kind: Rotary(partial(shape.angles, kind)) for kind in set(shape.layer_types)}
        self._layers_read: dict[str, int] = {}
        self.fused: FusedQueries | None = None

    def join(self, vocabulary: Vocabulary) -> None:
        """See ``DraftHeads.join``; also finds the base's layers to read, and makes the layers one C++ call on a CPU.

        Raises:
            ValueError: The base has no such layers, or with other heads, or holds a part of their keys and values in
                this process.
        """
        super().join(vocabulary)
        self._layers_read = vocabulary.key_layers
        if missing := self._rotaries.keys() - self._layers_read.keys():
            raise ValueError(
                f"base (layers: {', '.join(sorted(self._layers_read)) or 'of one kind'}) has no layers of"
                f" {', '.join(sorted(missing))} whose keys and values this assistant could read, or divides them among"
                " processes; give the Gemma 4 that it was made for, without tp_plan"
            )
        for kind in self._rotaries:
            count, size = vocabulary.heads_of(self._layers_read[kind])
            ours, heads = self._shape.head_dims[kind], self._shape.num_attention_heads
            if size != ours or heads % count:
                raise ValueError(
                    f"base's {kind} ({count} key heads of size {size}) does not fit the assistant's {heads} heads"
                    f" of size {ours}; give the Gemma 4 that it was made for"
                )
        self._joined_output = native_linear(self.tokens.detach())
        if vocabulary.attention.name == "exact":
            with suppress(UnusualBlockError):
                self.fused = FusedQueries(list(self.layers), self.norm, self.tokens, self._shape.num_attention_heads)

    def forward(self, *_: Any) -> NoReturn:
        """Assistants are not trained here."""
        raise ValueError("heads of the architecture assistant are not trained here; train heads of another one")

    def begin(self, hidden_BF: Tensor, vocabulary: Vocabulary, cached: Cached = ()) -> Level:
        """The base's states, and its cached texts.

        Raises:
            ValueError: ``cached`` is empty.
        """
        if not cached:
            raise ValueError("assistants need the base's KV cache; decode with MedusaModel or Batch")
        texts, state_BD = texts_of(cached), self.fuse(hidden_BF)
        roots = Draft.chain(torch.zeros(len(state_BD), 1, dtype=torch.int64, device=state_BD.device))
        plan = texts.plan(roots, vocabulary.attention, ahead=-1)
        return Level(Text(texts.pool, self._layers_read, plan), state_BD[:, None])

    def level(
        self, head: int, state: Level, parents_Bm: Tensor, tokens_Bm: Tensor, vocabulary: Vocabulary
    ) -> tuple[Tensor, Level]:
        """Logits [B, m, V] of the level's nodes, and the states that they hand down."""
        text, above_BmD = state.text, of_parents(state.states, parents_Bm)
        embedded_BmD = vocabulary.embed(tokens_Bm).to(above_BmD.dtype)
        x_BmA = self.pre_projection(torch.cat([embedded_BmD, above_BmD], dim=-1))
        out_BmA = self._through(x_BmA, text)
        return self._logits(out_BmA), Level(text, self.post_projection(out_BmA))

    def _through(self, x_BmA: Tensor, text: Text) -> Tensor:
        """All layers and the last norm, at the position of the roots, one behind the last cached one."""
        reach = text.plan.reach + 1
        if self.fused is not None:
            tables = {kind: rotary.tables(reach, x_BmA) for kind, rotary in self._rotaries.items()}
            behind = {kind: (cosines[1:], sines[1:]) for kind, (cosines, sines) in tables.items()}
            plan, rows_RA = text.rows(x_BmA.shape[1]), x_BmA.flatten(0, 1)
            return self.fused(text.pool, text.layers, plan, behind, rows_RA).view_as(x_BmA)
        roots_B1 = text.plan.positions[:, None] + 1
        angles = {kind: rotary.at(roots_B1, reach, x_BmA) for kind, rotary in self._rotaries.items()}
        for kind, layer in zip(self._shape.layer_types, self.layers, strict=True):
            x_BmA = layer(x_BmA, text, angles[kind])
        out: Tensor = self.norm(x_BmA)
        return out

    def _scores(self, normed_BmA: Tensor) -> Tensor:
        """Scores [B, m, V] of all tokens."""
        return (self._joined_output or (lambda x: functional.linear(x, self.tokens)))(normed_BmA)

    def _logits(self, normed_BmA: Tensor) -> Tensor:
        """Logits [B, m, V]; with centroids only tokens of the best ones are scored."""
        if self.centroids is None:
            return self._scores(normed_BmA)
        best_BmC = self.centroids(normed_BmA).topk(self._shape.centroids_read).indices
        tokens_BmE = self.token_ordering.view(self._shape.num_centroids, -1)[best_BmC].flatten(2)
        if tokens_BmE.shape[:2].numel() > FEW:
            scores_BmE = self._scores(normed_BmA).gather(2, tokens_BmE).float()
        else:
            rows_BmEA = functional.embedding(tokens_BmE, self.tokens)
            scores_BmE = torch.einsum("bmea,bma->bme", rows_BmEA, normed_BmA).float()
        logits_BmV = scores_BmE.new_full((*scores_BmE.shape[:2], self.config.vocab_size), NOT_READ)
        return logits_BmV.scatter_(2, tokens_BmE, scores_BmE)
