"""LoRA adapters (Hu et al. 2021) that train inside the base (Medusa-2), through peft."""

import warnings
from contextlib import AbstractContextManager
from pathlib import Path

from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from torch import nn

from medusa.base.model import BaseModel
from medusa.train.config import LoraRecipe
from medusa.train.recipe_file import RecipeError


class Adapters:
    """Trained adapters on all linear layers of a frozen base except its output layer; at the start they change nothing.

    The base is changed in place, so every reference to it sees the adapted base. Routers of experts get no adapters if
    their class is a special kind of linear layer.

    Args:
        base: the frozen base.
        lora: rank, scale, dropout, and whether activations are kept.

    Raises:
        RecipeError: the base has experts whose adapters cannot have dropout.
        ValueError: the base has no linear layers.
    """

    def __init__(self, base: BaseModel, lora: LoraRecipe) -> None:
        self._config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules="all-linear",
            exclude_modules=_routers(base) or None,
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings():  # about names that transformers 6 will remove
            warnings.simplefilter("ignore", FutureWarning)
            try:
                self._model = get_peft_model(base.model, self._config)
            except ValueError as error:
                if not lora.dropout or "dropout" not in str(error):
                    raise
                raise RecipeError(
                    f"lora.dropout ({lora.dropout}) must be 0 for the experts of this base ({base.name}); set it to 0"
                ) from error
            if lora.checkpoint_layers:
                base.model.gradient_checkpointing_enable({"use_reentrant": False})
        base.model.eval()

    def parameters(self) -> dict[str, nn.Parameter]:
        """The trained parameters by name."""
        return {name: value for name, value in self._model.named_parameters() if value.requires_grad}

    def off(self) -> AbstractContextManager[None]:
        """A context in which the adapters are off: the base is the original."""
        off: AbstractContextManager[None] = self._model.disable_adapter()
        return off

    def save(self, directory: Path) -> None:
        """Write `adapter_model.safetensors` and `adapter_config.json`, as peft reads them."""
        directory.mkdir(parents=True, exist_ok=True)
        state = get_peft_model_state_dict(self._model)
        state = {name: value.detach().cpu().contiguous() for name, value in state.items()}
        save_file(state, directory / SAFETENSORS_WEIGHTS_NAME, metadata={"format": "pt"})
        self._config.save_pretrained(str(directory))


def _routers(base: BaseModel) -> list[str]:
    """Names of the linear layers that choose experts; they return more than a product."""
    layers = ((name, module) for name, module in base.model.named_modules() if isinstance(module, nn.Linear))
    return [name for name, module in layers if "Router" in type(module).__name__]
