"""How long a text a base can be used for."""

import logging

from transformers import PreTrainedConfig

logger = logging.getLogger(__name__)


def context_length(config: PreTrainedConfig, name: str = "") -> int:
    """Tokens of prompt and completion together that a base was made for.

    "longrope" turns all keys differently once a text is longer than the original context, cached ones too: such a base
    is used up to there, with a warning.

    Args:
        config: Of the language model.
        name: Of the base, for the warning.
    """
    names = ("max_position_embeddings", "max_seq_len")
    limit = int(next((value for name in names if (value := getattr(config, name, None))), 2**31 - 1))
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return limit
    usable = min(limit, int(rope.get("original_max_position_embeddings") or limit))
    if usable < limit:
        logger.warning(
            "base (%s) is used up to %d of its %d tokens of context: there longrope turns all keys anew",
            name, usable, limit,
        )  # fmt: skip
    return usable
