"""How long a text a base can be used for."""

import logging

from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)

LONGROPE = "longrope rotates all keys of longer texts (up to {limit} tokens) by other factors, cached keys too"
DYNAMIC = "its dynamic rotary positions rotate all keys of a longer text again with each token, cached keys too"


def context_length(config: PreTrainedConfig, name: str = "") -> int:
    """Tokens of prompt and completion together, up to which a key does not depend on the length of its text.

    Where transformers goes on with keys turned otherwise, a warning says so.

    Args:
        config: Of the language model.
        name: Of the base, for the warning.
    """
    length, note = _end(config)
    if note:
        logger.warning("base (%s) is used up to %d tokens of context: %s", name, length, note)
    return length


def context_note(config: PreTrainedConfig) -> str:
    """Why texts end there, where the base is made for longer ones; else ""."""
    return _end(config)[1]


def _end(config: PreTrainedConfig) -> tuple[int, str]:
    names = ("max_position_embeddings", "max_seq_len")
    limit = int(next((value for name in names if (value := getattr(config, name, None))), 2**31 - 1))
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):  # of all layers, or of kinds of layers
        kind = part.get("rope_type") if isinstance(part, dict) else None
        if kind == "dynamic":
            return limit, DYNAMIC
        if kind == "longrope" and (original := int(part.get("original_max_position_embeddings") or limit)) < limit:
            return original, LONGROPE.format(limit=limit)
    return limit, ""
