"""Train extra decoding heads for a frozen language model and decode several tokens per step with them."""

from medusa.base_model import BaseModel
from medusa.calibrate import Calibration
from medusa.heads import DraftHeads, HeadsConfig, build_heads
from medusa.model import MedusaModel, Stream
from medusa.output import Output, Piece
from medusa.prefix import Prefix
from medusa.tree import Draft, Tree
from medusa.tree_file import load_tree

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
