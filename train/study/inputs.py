"""What all designs of a study share: training data and texts, both written by the base."""

from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from data import resolve_base_name
from data.exchange import Prompt, Settings
from data.local import LocalAnswerer
from data.prompts import embedded_prompts, fitting
from data.regenerate import regenerate
from data.sources import read_samples
from data.stdlib import Split
from medusa import MedusaModel
from train.evaluate import held_out_prompts


def load_base(name: str) -> MedusaModel:
    """The base alone.

    Raises:
        ValueError: it cannot be read, or cannot verify trees.
    """
    disable_progress_bar()
    model = MedusaModel.from_pretrained(None, base=resolve_base_name(name))
    if model.base.decoding != "tree":
        raise ValueError(
            f"base ({name}) decodes by {model.base.decoding} steps only, and the study compares trees; give another"
            " base"
        )
    return model


def make_samples(model: MedusaModel, path: Path, split: Split, count: int, max_new_tokens: int) -> None:
    """Let the base answer prompts from the standard library; a file that is there already is kept.

    Raises:
        ValueError: an unfinished file was begun with other settings, or the base refuses the prompts.
    """
    if path.exists():
        return
    settings = Settings(max_new_tokens)
    prompts = [Prompt(ids=tuple(ids)) for ids in embedded_prompts(model, split, count)]
    made_by = {"base": model.base.name, **vars(settings)}
    regenerate(fitting(model, prompts, max_new_tokens), LocalAnswerer(model, settings), path, made_by)


def read_prompts(model: MedusaModel, path: Path, count: int, max_new_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Token ids of held-out prompts that leave room for an answer."""
    longest = max(1, model.base.context_length - max_new_tokens)
    samples = read_samples(path, model.base.tokenizer)
    return tuple(map(tuple, held_out_prompts(samples, count, longest)))
