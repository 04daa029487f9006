"""The multi-token-prediction layer of some bases (DeepSeek-V3, GLM-4.5, Qwen 3.5): a drafter trained with the base.

The base's output layer drafts tokens from this layer's outputs. The layer reads its own output to draft further tokens.

Source: DeepSeek-V3 (2024), section 2.2.

Legend: R rows of a pass, D hidden size.
"""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from medusa.attention import IMPLEMENTATION, TreeAttention, TreePlan
from medusa.base import gguf
from medusa.base.gguf_reading import MTP
from medusa.cache import BlockPool, Follower
from medusa.cpu.experts import in_own_order
from medusa.files import read_object


class _QwenMtp(MtpModel):
    """The layer under the names of Qwen's checkpoints. It reads states after the base's last norm, as all here do."""

    _NAMES: ClassVar = {
        "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "post_norm",
        r"layers\.0": "mtp_block",
    }  # fmt: skip

    @staticmethod
    def get_mtp_weights_regex(main_model: PreTrainedModel) -> re.Pattern[str]:
        """See ``MtpModel``."""
        return re.compile(r"^mtp\.")

    def get_weight_conversions(self, main_model: PreTrainedModel) -> list[Any]:
        """See ``MtpModel``."""
        ours = [WeightRenaming(rf"^mtp\.{theirs}\.", f"layers.0.{name}.") for theirs, name in self._NAMES.items()]
        return [*ours, *super().get_weight_conversions(main_model)]


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
        config, loader = model.config.get_text_config(), MtpModel
        if config.model_type.startswith(("qwen3_5", "qwen3_next")):
            # transformers knows neither the number of these layers nor what they are.
            config.num_mtp_layers = getattr(config, "mtp_num_hidden_layers", 1)
            config.mtp_layer_types = ["full_attention"]
            loader = _QwenMtp
        count = getattr(config, "num_mtp_layers", None) or 0
        if count != 1:
            raise ValueError(
                f"base ({model.config.name_or_path}, {model.config.model_type}) has {count} multi-token-prediction"
                " layers and one can be used; leave mtp out"
            )
        remedy = "leave mtp out"
        try:
            if next(Path(model.config.name_or_path).glob(gguf.WEIGHTS), None):
                remedy = f"give a checkpoint in safetensors files, or {remedy}"
                return cls(_of_gguf(loader(model, 1), model), attention, device)
            stored, wanted = _stored_names(model.config.name_or_path), loader.get_mtp_weights_regex(model)
            if stored and not any(wanted.search(name) for name in stored):
                remedy = f"copy {'mtp.*' if loader is _QwenMtp else 'them'} from the original checkpoint, or {remedy}"
                raise ValueError(
                    "its checkpoint has no weights of the layer, which tools for fine-tuning often leave out"
                )
            layers = loader.from_pretrained(model, device_map={"": device})
        except (OSError, RuntimeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"multi-token-prediction layer of the base ({model.config.name_or_path}) cannot be loaded: {error};"
                f" {remedy}"
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


def _of_gguf(layers: MtpModel, model: PreTrainedModel) -> MtpModel:
    """The module with the layer that was read from a base's GGUF file."""
    path = Path(model.config.name_or_path) / MTP
    if not path.is_file():
        raise ValueError("its GGUF file has none that can be read")
    layer, state = layers.layers[0], dict[str, Tensor]()
    for name, tensor in load_file(path).items():
        owner, _, own = name.rpartition(".")
        state[name] = in_own_order(layer.get_submodule(owner), own, tensor)
    layer.load_state_dict(state)
    layer.to(dtype=model.dtype)  # not the base's embeddings, which the module holds too
    return layers


def _stored_names(name: str) -> list[str]:
    """Names of the tensors in a base's checkpoint; empty if it is not in safetensors files."""
    with suppress(OSError), safe_open(cached_file(name, SAFE_WEIGHTS_NAME), framework="pt") as tensors:
        return list(tensors.keys())
    with suppress(OSError):
        index = read_object(Path(cached_file(name, SAFE_WEIGHTS_INDEX_NAME)), "index of weights", "download it again")
        return list(index["weight_map"])
    return []
