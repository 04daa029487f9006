"""Train extra decoding heads for a frozen language model and decode several tokens per step with them."""

from medusa.base.model import BaseModel
from medusa.budget.calibration import Calibration
from medusa.engine.output import Output, Piece
from medusa.engine.prefix import Prefix
from medusa.heads import DraftHeads, HeadsConfig, build_heads
from medusa.io.tree_file import load_tree
from medusa.model import MedusaModel, Stream
from medusa.tree import Draft, Tree

__version__ = "0.1.0"

__all__ = [
    "BaseModel",
    "Calibration",
    "Draft",
    "DraftHeads",
    "HeadsConfig",
    "MedusaModel",
    "Output",
    "Piece",
    "Prefix",
    "Stream",
    "Tree",
    "build_heads",
    "load_tree",
]
