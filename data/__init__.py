"""Prompts, conversations and corpora."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(base: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a base by its name.

    Raises:
        OSError: The base is not on this machine and cannot be downloaded from the Hub.
        ValueError: The tokenizer is missing or cannot be read.
    """
    from transformers import AutoTokenizer

    from medusa.base import smollm2
    from medusa.base.names import full_name

    name = full_name(base)
    path = smollm2.locate(name)
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"tokenizer of the base ({name}) cannot be loaded: {reason}; give its directory") from error


def vocabulary_of(base: str) -> int | None:
    """The number of tokens that a base can write, by its name; None = only its tokenizer is there."""
    from transformers import AutoConfig

    from medusa.base import smollm2
    from medusa.base.names import full_name

    try:
        return int(AutoConfig.from_pretrained(smollm2.locate(full_name(base))).get_text_config().vocab_size)
    except (OSError, ValueError):
        return None
