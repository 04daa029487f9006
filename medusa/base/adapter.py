"""The change of a base by joint training (Medusa-2): a LoRA adapter, stored with the heads."""

import logging
import re
import warnings
from pathlib import Path

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

WRAPPERS = re.compile(r"^base_model\.model\.|\.base_layer|\.modules_to_save|\.original_module")
"""What peft adds to the names of a model's own parameters."""


def apply_adapter(model: PreTrainedModel, directory: str | Path, merge: bool = True) -> PreTrainedModel:
    """Apply the adapter of joint training to a base.

    Args:
        model: The original base; it is changed in place.
        directory: The directory with peft's ``adapter_config.json`` and ``adapter_model.safetensors``.
        merge: Add the adapter to the weights. False keeps it as separate layers, for quantised weights.

    Returns:
        The model after joint training.

    Raises:
        FileNotFoundError: The directory has no adapter.
        ValueError: peft is missing, or the adapter is damaged or belongs to another model.
    """
    if not (Path(directory) / "adapter_config.json").is_file():
        raise FileNotFoundError(f"adapter ({directory}) does not exist and the heads need it; copy the folder again")
    try:
        from peft import PeftModel, get_peft_model_state_dict
        from peft.utils import SAFETENSORS_WEIGHTS_NAME
    except ImportError as error:
        raise ValueError(f"adapter ({directory}) needs the package peft: {error}; pip install peft") from error
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    try:
        with warnings.catch_warnings():  # peft imports a name that transformers 6 will remove
            warnings.simplefilter("ignore", FutureWarning)
            adapted = PeftModel.from_pretrained(model, str(directory))
        with safe_open(Path(directory) / SAFETENSORS_WEIGHTS_NAME, "pt") as file:
            stored = set(file.keys())
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"adapter ({directory}) does not fit the base: {error}; give its own base") from error
    if merge and not hasattr(adapted, "merge_and_unload"):
        kind = adapted.active_peft_config.peft_type.value
        raise ValueError(f"adapter ({directory}) is {kind}, which is no change of weights; give a LoRA adapter")
    # peft ignores layers that only the model or only the adapter has. Whole embeddings may be stored too.
    odd = stored ^ set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    odd = {name for name in odd if WRAPPERS.sub("", name) not in known}
    if odd:
        raise ValueError(f"adapter ({directory}) is of another base: {min(odd)} is in one only; give its own base")
    logger.info(
        "base (%s) is changed by the adapter %s, which was trained on %s: its answers are not those of the original",
        model.config._name_or_path, directory, adapted.active_peft_config.base_model_name_or_path,
    )  # fmt: skip
    changed: PreTrainedModel = adapted.merge_and_unload() if merge else adapted.base_model.model
    return changed
