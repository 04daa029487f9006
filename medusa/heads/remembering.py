"""The common part of heads with a KV cache of their own: attention heads and block heads.

Legend: M positions, R of them where heads guess, K heads, D hidden size, F width of the base's hidden states, B
sequences.
"""

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from medusa.base.rotary import Rotary
from medusa.cache import Cached, Texts
from medusa.heads.base import DraftHeads, HeadsConfig, Vocabulary
from medusa.heads.documents import Documents


class RememberingHeads(DraftHeads):
    """Heads that fuse the outputs of the base's feature layers, see the text before a position, and end in a norm.

    Fresh heads use the last of these layers. A vocabulary matrix reads the normed output. The base's matrix reads it
    times ``gain``, a factor for each number, because the base's last norm has such factors, often far from 1.
    """

    remembers = True
    one_output = True

    def __init__(self, config: HeadsConfig) -> None:
        super().__init__(config)
        if config.layer is None:
            name = config.architecture
            raise ValueError(
                f"heads' layer (None) must be given for the architecture {name}; correct the heads' config"
            )
        self._layer = layer = config.layer
        dim, taps = config.hidden_size, len(config.feature_layers)
        self.feature_norm = nn.Parameter(torch.ones(taps, dim)) if taps and layer.norm_features else None
        if self.fusion is not None:
            nn.init.eye_(self.fusion.weight[:, -dim:])
        self.output_norm = nn.RMSNorm(dim, layer.rms_norm_eps)
        self.gain = nn.Parameter(torch.ones(dim)) if self.lm_heads is None else None
        self.rotary = Rotary(layer.angles)

    @abstractmethod
    def drafted(self, state_MD: Tensor, path_MK: Tensor, vocabulary: Vocabulary, documents: Documents) -> Tensor:
        """Features [K, R, D] on the given path, at the positions where heads guess.

        Args:
            state_MD: The output of ``fuse``.
            path_MK: See ``forward``.
            vocabulary: Embeds tokens.
            documents: The documents of the M positions.
        """

    def forward(
        self,
        hidden_MF: Tensor,
        path_MK: Tensor,
        vocabulary: Vocabulary,
        places_M: Tensor | None = None,
        wanted_M: Tensor | None = None,
        /,
    ) -> Tensor:
        """Features [K, M, D] on the given path, at all positions of documents that do not see each other."""
        if places_M is None:
            places_M = torch.arange(len(hidden_MF), device=hidden_MF.device)
        if wanted_M is None:
            wanted_M = torch.ones_like(places_M, dtype=torch.bool)
        documents = Documents(places_M, wanted_M, window=self._layer.window)
        features_KRD = self.drafted(self.fuse(hidden_MF), path_MK, vocabulary, documents)
        shape = (len(features_KRD), len(hidden_MF), features_KRD.shape[2])
        return features_KRD.new_zeros(shape).index_copy(1, documents.wanted, features_KRD)

    def init_from_base(self, lm_head_weight: Tensor, last_norm_D: Tensor | None = None) -> None:
        """See ``DraftHeads``; also scales own matrices, or ``gain``, by the base's last norm."""
        super().init_from_base(lm_head_weight, last_norm_D)
        scaled = self.lm_heads if self.gain is None else self.gain
        if last_norm_D is not None and scaled is not None:
            with torch.no_grad():
                scaled.mul_(last_norm_D.to(scaled.device))

    def fuse(self, hidden: Tensor) -> Tensor:
        """The input [..., D] of the layers, made of the base's hidden states [..., F]."""
        last, layers = self.split(hidden)
        if self.fusion is None:
            return last
        if self.feature_norm is not None:
            normed = layers.shape[-2 if self._layer.norm_jointly else -1 :]
            layers = functional.rms_norm(layers, normed, eps=self._layer.rms_norm_eps) * self.feature_norm
        fused: Tensor = self.fusion(layers.flatten(-2))
        return fused

    def scaled(self, normed: Tensor) -> Tensor:
        """The input of a vocabulary matrix: the normed output, times ``gain`` for the base's matrix."""
        return normed if self.gain is None else normed * self.gain

    def remembered(self, cached: Cached) -> tuple[Texts, Tensor]:
        """The layers' cached texts, and their outputs [B, D] at the last positions.

        Raises:
            ValueError: The heads are not frozen, or ``cached`` is empty.
        """
        if self.memory is None or not cached:
            name = self.config.architecture
            raise ValueError(f"{name} heads need the KV cache of a text; decode with MedusaModel or Batch")
        return self.memory.read(cached)
