"""What all designs of a study share: training data and texts, both written by the base."""

from collections.abc import Sequence
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from data import resolve_base_name
from data.exchange import Prompt, Settings
from data.local import LocalAnswerer
from data.prompts import embedded_prompts, fitting
from data.regenerate import regenerate
from data.sources import read_samples
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


def make_training_data(model: MedusaModel, directory: Path, count: int, max_new_tokens: int) -> None:
    """Let the base answer prompts from the standard library; files that are there already are kept.

    Designs are measured at temperature 0 and at temperature 1, so one half of the prompts is answered at each.

    Raises:
        ValueError: an unfinished file was begun with other settings, or the base refuses the prompts.
    """
    prompts, half = embedded_prompts(model, "train", count), (count + 1) // 2
    _answer(model, prompts[:half], directory / "greedy.jsonl", Settings(max_new_tokens))
    _answer(model, prompts[half:], directory / "sampled.jsonl", Settings(max_new_tokens, temperature=1.0))


def make_heldout_data(model: MedusaModel, path: Path, count: int, max_new_tokens: int) -> None:
    """The same for held-out prompts, at temperature 0."""
    _answer(model, embedded_prompts(model, "heldout", count), path, Settings(max_new_tokens))


def _answer(model: MedusaModel, ids: Sequence[list[int]], path: Path, settings: Settings) -> None:
    if path.exists() or not ids:
        return
    prompts = fitting(model, [Prompt(ids=tuple(each)) for each in ids], settings.max_new_tokens)
    made_by = {"base": model.base.name, **vars(settings)}
    regenerate(prompts, LocalAnswerer(model, settings), path, made_by)


def read_prompts(model: MedusaModel, path: Path, count: int, max_new_tokens: int) -> tuple[tuple[int, ...], ...]:
    """Token ids of held-out prompts that leave room for an answer."""
    longest = max(1, model.base.context_length - max_new_tokens)
    samples = read_samples(path, model.base.tokenizer)
    return tuple(map(tuple, held_out_prompts(samples, count, longest)))
