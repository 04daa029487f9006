"""The multi-token-prediction layer of some bases (DeepSeek-V3, GLM-4.5): a drafter that was trained with the base.

The base's output layer drafts tokens from this layer's outputs. The layer reads its own output to draft further tokens.

Source: DeepSeek-V3 (2024), section 2.2.

Legend: R rows of a pass, D hidden size.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from medusa.attention import IMPLEMENTATION, TreeAttention, TreePlan
from medusa.cache import BlockPool, Follower


class MtpLayer(Follower):
    """The multi-token-prediction layer; its cache follows the base's.

    Args:
        layers: transformers' module; its attention is replaced by ours.
        attention: The attention backend.
        device: Device of hidden states.
    """

    def __init__(self, layers: MtpModel, attention: TreeAttention, device: torch.device) -> None:
        super().__init__(attention, device)
        layers.set_attn_implementation(IMPLEMENTATION)
        self._model = layers.eval().requires_grad_(False)
        self.hidden_size = int(layers.config.hidden_size)

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

    def states(self, hidden: Tensor) -> Tensor:
        """The last hidden state."""
        return hidden[..., : self.hidden_size]

    def run(self, pool: BlockPool, plan: TreePlan, states_RD: Tensor) -> Tensor:
        """See ``Follower``; computed by transformers' module."""
        places_1R = (plan.positions + 1)[None]
        embedded_1RD, angles = self._model.embed_tokens(plan.tokens[None]), None
        if self._model.rotary_emb is not None:
            angles = self._model.rotary_emb(embedded_1RD, position_ids=places_1R)
        with pool.cache.running(plan, gathered=True) as cache:
            out_1RD = self._model.layers[0](
                embedded_1RD, states_RD[None], position_embeddings=angles, attention_mask=None,
                position_ids=places_1R, past_key_values=cache, tree_plan=plan.gathering(),
            )  # fmt: skip
        if self._model.use_shared_post_norm:
            out_1RD = self._model.shared_post_norm(out_1RD)
        out: Tensor = out_1RD[0]
        return out
