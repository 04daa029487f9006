"""Train extra decoding heads for a frozen language model and decode several tokens per step with them.

Names are imported when they are used, so that parsing a command line does not import torch.
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
    name: home
    for home, names in {
        "medusa.base.model": ["BaseModel"],
        "medusa.engine.batch": ["Batch"],
        "medusa.engine.config": ["EngineConfig"],
        "medusa.engine.output": ["Completion", "Output", "Piece"],
        "medusa.engine.prefix": ["Prefix"],
        "medusa.engine.request": ["Request"],
        "medusa.heads": ["DraftHeads", "HeadsConfig", "build_heads"],
        "medusa.io.settings_file": ["load_settings"],
        "medusa.io.tree_file": ["load_tree", "save_tree"],
        "medusa.model": ["MedusaModel", "Stream"],
        "medusa.sampling": ["SamplingParams", "Speculation"],
        "medusa.tree": ["Draft", "Tree"],
    }.items()
    for name in names
}
"""The module that defines each name."""


def __getattr__(name: str) -> Any:
    """Import a name of this package."""
    if name not in _HOMES:
        raise AttributeError(f"module 'medusa' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
