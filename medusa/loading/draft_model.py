"""Load a draft model: a smaller model with the base's tokens, prepared for decoding."""

from pathlib import Path

from medusa.base.checkpoint import resolve_base
from medusa.base.model import BaseModel
from medusa.loading.self_test import choose_decoding, fuse


def load_draft_model(name: str | Path, base: BaseModel) -> BaseModel:
    """The draft model in the base's dtype and on its device.

    Raises:
        FileNotFoundError: A directory is missing.
        ValueError: It cannot be loaded or decoded, or does not go with the base, see ``check_draft_model``.
    """
    model = BaseModel.load(resolve_base(str(name)), base.dtype, base.device, pack=True)
    check_draft_model(model, base)
    return fuse(choose_decoding(model))


def check_draft_model(model: BaseModel, base: BaseModel) -> None:
    """Refuse a model that cannot draft for the base.

    Raises:
        ValueError: It has other tokens, or cannot take back what it has drafted.
    """
    if model.tokenizer.get_vocab() != base.tokenizer.get_vocab():
        raise ValueError(
            f"draft model ({model.name}) has another vocabulary than the base ({base.name}), and drafts are token ids;"
            " give a model with the base's tokenizer"
        )
    if model.decoding == "plain":
        raise ValueError(
            f"draft model ({model.name}, {model.config.model_type}) cannot take back what it has drafted; give a model"
            " without recurrent layers"
        )
