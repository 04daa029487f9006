"""Prompts, conversations and corpora."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EMBEDDED = "embedded"
"""The name of the base that ships with this package."""


def resolve_base_name(name: str) -> str:
    """The directory of the embedded base for ``EMBEDDED``, the Hub id for "smollm2"; any other name as it is.

    Raises:
        FileNotFoundError: This installation lacks the embedded base.
    """
    if name != EMBEDDED:
        from medusa.base import smollm2

        return smollm2.full_name(name)
    directory = Path(__file__).parent / "embedded" / "base"
    if not (directory / "config.json").is_file():
        raise FileNotFoundError(
            f"embedded base ({directory}) is missing; clone the repository again or name another base"
        )
    return str(directory)


def shipped_heads(base: str) -> str:
    """The directory of the heads that ship with this package for a base, by its short name or Hub id; "" = none."""
    from medusa.base import smollm2

    directory = Path(__file__).parent / "pretrained" / "smollm2"
    return str(directory) if smollm2.full_name(base) == smollm2.HUB_ID else ""


def load_tokenizer(base: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a base by its name.

    Raises:
        FileNotFoundError: This installation lacks the embedded base.
        ValueError: There is none that can be read.
    """
    from transformers import AutoTokenizer

    from medusa.base import smollm2

    name = resolve_base_name(base)
    try:
        return AutoTokenizer.from_pretrained(smollm2.locate(name))
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"tokenizer of the base ({name}) cannot be loaded: {reason}; give its directory") from error
