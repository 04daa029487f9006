"""Train extra decoding heads for a frozen language model and decode several tokens per step with them.

Names are imported when they are used: options of a command line need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa.base.model import BaseModel
    from medusa.engine.batch import Batch
    from medusa.engine.config import EngineConfig
    from medusa.engine.output import Completion, Output, Piece
    from medusa.engine.prefix import Prefix
    from medusa.engine.request import Request
    from medusa.heads import DraftHeads, HeadsConfig, build_heads
    from medusa.io.settings_file import load_settings
    from medusa.io.tree_file import load_tree, save_tree
    from medusa.model import MedusaModel, Stream
    from medusa.sampling import SamplingParams, Speculation
    from medusa.tree import Draft, Tree

__version__ = "0.1.0"

__all__ = [
    "BaseModel",
    "Batch",
    "Completion",
    "Draft",
    "DraftHeads",
    "EngineConfig",
    "HeadsConfig",
    "MedusaModel",
    "Output",
    "Piece",
    "Prefix",
    "Request",
    "SamplingParams",
    "Speculation",
    "Stream",
    "Tree",
    "build_heads",
    "load_settings",
    "load_tree",
    "save_tree",
]

_HOMES = {
    "BaseModel": "medusa.base.model",
    "Batch": "medusa.engine.batch",
    "Completion": "medusa.engine.output",
    "Draft": "medusa.tree",
    "DraftHeads": "medusa.heads",
    "EngineConfig": "medusa.engine.config",
    "HeadsConfig": "medusa.heads",
    "MedusaModel": "medusa.model",
    "Output": "medusa.engine.output",
    "Piece": "medusa.engine.output",
    "Prefix": "medusa.engine.prefix",
    "Request": "medusa.engine.request",
    "SamplingParams": "medusa.sampling",
    "Speculation": "medusa.sampling",
    "Stream": "medusa.model",
    "Tree": "medusa.tree",
    "build_heads": "medusa.heads",
    "load_settings": "medusa.io.settings_file",
    "load_tree": "medusa.io.tree_file",
    "save_tree": "medusa.io.tree_file",
}
"""Where each name is defined."""


def __getattr__(name: str) -> Any:
    """A name of this package, imported now."""
    if name not in _HOMES:
        raise AttributeError(f"module 'medusa' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
