"""Train extra decoding heads for a frozen language model and decode several tokens per step with them."""

from medusa.base.model import BaseModel
from medusa.budget.calibration import Calibration
from medusa.engine.batch import Batch
from medusa.engine.output import Completion, Output, Piece
from medusa.engine.prefix import Prefix
from medusa.heads import DraftHeads, HeadsConfig, build_heads
from medusa.io.tree_file import load_tree
from medusa.model import MedusaModel, Stream
from medusa.sampling import SamplingParams, Speculation
from medusa.tree import Draft, Tree

__version__ = "0.1.0"

__all__ = [
    "BaseModel",
    "Batch",
    "Calibration",
    "Completion",
    "Draft",
    "DraftHeads",
    "HeadsConfig",
    "MedusaModel",
    "Output",
    "Piece",
    "Prefix",
    "SamplingParams",
    "Speculation",
    "Stream",
    "Tree",
    "build_heads",
    "load_tree",
]
