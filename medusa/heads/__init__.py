"""Head architectures by name; a module is imported when its architecture is first used."""

from importlib import import_module

from medusa.heads.base import DraftHeads, HeadsConfig, Vocabulary

ARCHITECTURES = {
    "medusa": "medusa.heads.medusa:MedusaHeads",
    "markov": "medusa.heads.markov:MarkovHeads",
    "hydra": "medusa.heads.hydra:HydraHeads",
    "recurrent": "medusa.heads.recurrent:RecurrentHeads",
    "attention": "medusa.heads.attention:AttentionHeads",
    "block": "medusa.heads.block:BlockHeads",
}
PUBLISHED = {"assistant": "medusa.heads.assistant:AssistantHeads"}
"""Architectures of published drafts that are read, and not trained here."""

__all__ = ["ARCHITECTURES", "DraftHeads", "HeadsConfig", "Vocabulary", "build_heads"]


def build_heads(config: HeadsConfig) -> DraftHeads:
    """Fresh heads of the given shape.

    Raises:
        ValueError: The architecture is not known.
    """
    known = ARCHITECTURES | PUBLISHED
    if config.architecture not in known:
        raise ValueError(f"head architecture ({config.architecture!r}) is not known; choose one of: {', '.join(known)}")
    module, _, name = known[config.architecture].partition(":")
    heads: DraftHeads = getattr(import_module(module), name)(config)
    return heads
