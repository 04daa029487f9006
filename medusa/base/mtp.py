"""The multi-token-prediction layer that some bases bring along (DeepSeek-V3, GLM-4.5): a drafter trained with them.

At position t it reads the base's hidden state at token t and the embedding of token t + 1, sees the positions before,
and gives a hidden state from which the base's own output layer guesses token t + 2. Fed with its own output, it guesses
further.

Source: DeepSeek-V3 (2024), section 2.2.

Legend: B sequences, C tokens of each, R rows of a pass, D hidden size.
"""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from medusa.attention import IMPLEMENTATION, TreeAttention
from medusa.cache import BlockPool, CachedSequence, plan_pass
from medusa.tree import Draft


class MtpLayer:
    """The layer, with a KV cache of its own that follows the base's.

    Args:
        layers: transformers' module; its attention is ours from now on.
        attention: Computes attention.
        device: Of hidden states.
    """

    def __init__(self, layers: MtpModel, attention: TreeAttention, device: torch.device) -> None:
        layers.set_attn_implementation(IMPLEMENTATION)
        self._model = layers.eval().requires_grad_(False)
        self._attention, self._device = attention, torch.device(device)
        self.hidden_size = int(layers.config.hidden_size)
        self._latest: weakref.WeakKeyDictionary[CachedSequence, Tensor] = weakref.WeakKeyDictionary()

    @classmethod
    def load(cls, model: PreTrainedModel, attention: TreeAttention, device: torch.device) -> "MtpLayer":
        """Read the layer from the base's checkpoint.

        Raises:
            ValueError: The base has none, or more than one, or its checkpoint lacks the weights.
        """
        count = getattr(model.config.get_text_config(), "num_mtp_layers", None) or 0
        if count != 1:
            raise ValueError(
                f"base ({model.config.name_or_path}, {model.config.model_type}) has {count} multi-token-prediction"
                " layers and one can be used; leave mtp out"
            )
        try:
            layers = MtpModel.from_pretrained(model, device_map={"": device})
        except (OSError, RuntimeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"multi-token-prediction layer of the base ({model.config.name_or_path}) cannot be loaded: {error};"
                " leave mtp out"
            ) from error
        return cls(layers, attention, device)

    def follow(self, sequences: Sequence[CachedSequence]) -> list[CachedSequence]:
        """The layer's own sequences beside the base's."""
        return [one.follower(self, lambda: BlockPool(1, self._device, owner=self)) for one in sequences]

    @torch.inference_mode()
    def observe(
        self, sequences: Sequence[CachedSequence], hidden_BCF: Tensor, tokens_BC: Tensor, counts: Sequence[int]
    ) -> None:
        """The base has committed so many positions of these sequences, just now.

        Args:
            sequences: The base's.
            hidden_BCF: Its hidden states there.
            tokens_BC: The tokens that follow them in the texts.
            counts: Positions of each sequence, from the first on.
        """
        own = self.follow(sequences)
        self.extend(own, hidden_BCF[..., : self.hidden_size], tokens_BC, counts)

    def latest(self, own: Sequence[CachedSequence]) -> Tensor:
        """[B, D] the layer's output at the last position of each of its sequences."""
        nothing = torch.zeros(self.hidden_size, dtype=self._model.dtype, device=self._device)
        return torch.stack([self._latest.get(one, nothing) for one in own])

    def keep(self, own: Sequence[CachedSequence], hidden_BD: Tensor) -> None:
        """The outputs at the last position of each sequence are these."""
        for one, hidden_D in zip(own, hidden_BD, strict=True):
            self._latest[one] = hidden_D

    @torch.inference_mode()
    def extend(
        self, own: Sequence[CachedSequence], hidden_BCD: Tensor, tokens_BC: Tensor, counts: Sequence[int]
    ) -> None:
        """Compute and commit so many positions of each sequence; ``latest`` are then the outputs at the last of them.

        Args:
            own: The layer's sequences.
            hidden_BCD: The base's hidden states, or the layer's own.
            tokens_BC: The tokens that follow them.
            counts: Positions of each sequence, from the first on.
        """
        going = [index for index, count in enumerate(counts) if count]
        if not going:
            return
        chosen, sizes = [own[at] for at in going], [counts[at] for at in going]
        longest, index = max(sizes), torch.tensor(going, device=self._device)
        draft = Draft.chain(tokens_BC[index, :longest], sizes)
        plan, pool = plan_pass([(draft, chosen)], self._attention), chosen[0].pool
        places_1R = (plan.positions + 1)[None]
        embedded_1RD = self._model.embed_tokens(plan.tokens[None])
        angles = None
        if self._model.rotary_emb is not None:
            angles = self._model.rotary_emb(embedded_1RD, position_ids=places_1R)
        with pool.cache.running(plan, gathered=True) as cache:
            out_1RD = self._model.layers[0](
                embedded_1RD, draft.flat(hidden_BCD[index, :longest])[None], position_embeddings=angles,
                attention_mask=None, position_ids=places_1R, past_key_values=cache, tree_plan=plan.gathering(),
            )  # fmt: skip
        if self._model.use_shared_post_norm:
            out_1RD = self._model.shared_post_norm(out_1RD)
        ends_B = torch.tensor(plan.firsts[1:], device=self._device) - 1
        self.keep(chosen, out_1RD[0, ends_B])
        for one, size in zip(chosen, plan.sizes, strict=True):
            one.length += size
