"""The context length of a base."""

import logging

from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

LONGROPE = "longrope rotates all keys of longer texts (up to {limit} tokens) by other factors, cached keys too"
DYNAMIC = "its dynamic rotary positions rotate all keys of a longer text again with each token, cached keys too"


def context_length(config: PreTrainedConfig, name: str = "") -> int:
    """Largest number of tokens of prompt and completion for which keys do not depend on the length of the text.

    A warning is logged if transformers allows longer texts and rotates their keys by other angles.

    Args:
        config: Config of the language model.
        name: Name of the base, for the warning.
    """
    length, note = _end(config)
    if note:
        logger.warning("base (%s) is used up to %d tokens of context: %s", name, length, note)
    return length


def context_note(config: PreTrainedConfig) -> str:
    """Why ``context_length`` is less than the base was made for; "" if it is not."""
    return _end(config)[1]


def _end(config: PreTrainedConfig) -> tuple[int, str]:
    names = ("max_position_embeddings", "max_seq_len")
    limit = int(next((value for name in names if (value := getattr(config, name, None))), 2**31 - 1))
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # parameters of all layers, or by kind of layer
        kind = part.get("rope_type") if isinstance(part, dict) else None
        if kind == "dynamic":
            return limit, DYNAMIC
        if kind == "longrope" and (original := int(part.get("original_max_position_embeddings") or limit)) < limit:
            return original, LONGROPE.format(limit=limit)
    return limit, ""
