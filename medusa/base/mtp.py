"""The multi-token-prediction layer that some bases bring along (DeepSeek-V3, GLM-4.5): a drafter trained with them.

Row t reads the base's hidden state at token t and the embedding of token t + 1, sees the rows before it, and gives a
hidden state from which the base's own output layer guesses token t + 2. Fed with its own output, it guesses further.

Source: DeepSeek-V3 (2024), section 2.2.

Legend: B batch, C tokens of a row, D hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from medusa.attention import IMPLEMENTATION, TreeAttention, TreePlan
from medusa.cache import SlotCache
from medusa.state import latest
from medusa.tree import Draft


class MtpLayer:
    """The layer, over rows of a cache of its own.

    Args:
        layers: transformers' module; its attention is ours from now on.
        attention: Computes attention.
        device: Of hidden states.
    """

    def __init__(self, layers: MtpModel, attention: TreeAttention, device: torch.device) -> None:
        layers.set_attn_implementation(IMPLEMENTATION)
        self._model, self._attention, self._device = layers.eval().requires_grad_(False), attention, device

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

    def new_rows(self, slots: int, capacity: int) -> "MtpRows":
        """An empty cache."""
        return MtpRows(self, slots, capacity, self._device)

    @torch.inference_mode()
    def extend(self, rows: "MtpRows", hidden_BCD: Tensor, tokens_BC: Tensor, counts: Sequence[int]) -> None:
        """Compute and commit so many rows of each sequence.

        Args:
            rows: Where they go; ``rows.hidden`` becomes the output of the last of them.
            hidden_BCD: The base's hidden states, or the layer's own.
            tokens_BC: The tokens that follow them.
            counts: Rows of each sequence, from the first on.
        """
        if not any(counts):
            return
        draft = Draft.chain(tokens_BC, counts)
        rows.begin(tokens_BC.shape[1])
        plan = TreePlan(draft, rows.lengths, rows.kv_length, self._attention)
        places_BC = rows.lengths[:, None] + 1 + draft.depths
        embedded_BCD = self._model.embed_tokens(tokens_BC)
        angles = None
        if self._model.rotary_emb is not None:
            angles = self._model.rotary_emb(embedded_BCD, position_ids=places_BC)
        out_BCD = self._model.layers[0](
            embedded_BCD, hidden_BCD, position_embeddings=angles, attention_mask=None, position_ids=places_BC,
            past_key_values=rows, tree_plan=plan,
        )  # fmt: skip
        if self._model.use_shared_post_norm:
            out_BCD = self._model.shared_post_norm(out_BCD)
        counts_B = torch.tensor(counts, device=tokens_BC.device)
        rows.extend(counts_B)
        rows.grow(counts)
        rows.hidden = latest(out_BCD, counts_B, rows.hidden)


class MtpRows(SlotCache):
    """Keys and values of the layer: as many rows as the base has committed.

    Attributes:
        hidden: [slots, D] the layer's output at the last row of each slot.
    """

    observes = True

    def __init__(self, layer: MtpLayer, slots: int, capacity: int, device: torch.device) -> None:
        super().__init__(slots, capacity, 1, device)
        self._layer = layer
        size = layer._model.config.hidden_size
        self.hidden = torch.zeros(slots, size, dtype=layer._model.dtype, device=device)

    def observe(self, hidden_BCF: Tensor, tokens_BC: Tensor, counts: Sequence[int]) -> None:
        """See ``SlotCache.observe``."""
        behind = self.slots - len(counts)  # a prefill leaves out slots that are complete
        if behind:
            pad = (0, 0) * (hidden_BCF.ndim - 1)
            hidden_BCF = torch.nn.functional.pad(hidden_BCF, (*pad, 0, behind))
            tokens_BC, counts = torch.nn.functional.pad(tokens_BC, (0, 0, 0, behind)), [*counts, *[0] * behind]
        self._layer.extend(self, hidden_BCF[..., : self.hidden.shape[1]], tokens_BC, counts)

    def join(self, other: SlotCache) -> None:
        """See ``SlotCache.join``."""
        assert isinstance(other, MtpRows), "of the same layer"
        super().join(other)
        self.hidden = torch.cat([self.hidden, other.hidden])

    def select(self, slots: Sequence[int]) -> None:
        """See ``SlotCache.select``."""
        super().select(slots)
        self.hidden = self.hidden[list(slots)]

    def empty(self, slots: int) -> "MtpRows":
        """See ``SlotCache.empty``."""
        return self._layer.new_rows(slots, self.capacity)
