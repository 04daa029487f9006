"""The recipe: everything that a training run depends on, each value with its unit.

This module and `train.recipe_file` never import torch, so that `--help` and a wrong recipe answer at once.
A field's `limits` are checked where a recipe is read; `resume` says whether a run may be resumed after it changed.
"""

from dataclasses import dataclass, field
from typing import Any


def _limits(default: Any, *, low: float | None = None, high: float | None = None, resume: bool = False) -> Any:
    """A field with inclusive bounds; `resume=True`: a run may go on after this value has changed."""
    return field(default=default, metadata={"low": low, "high": high, "resume": resume})


def _choice(default: str, *choices: str, resume: bool = False) -> Any:
    """A field that takes one of the given words."""
    return field(default=default, metadata={"choices": choices, "resume": resume})


@dataclass(frozen=True)
class BaseRecipe:
    """The frozen language model."""

    name: str = "embedded"
    """Directory, Hub id, or "embedded" (the small model shipped in data/embedded)."""
    dtype: str = _choice("auto", "auto", "float32", "bfloat16")
    """Number format of the frozen weights and of the loss's vocabulary products; auto = what suits the machine."""


@dataclass(frozen=True)
class HeadsRecipe:
    """The trained heads."""

    architecture: str = "medusa"
    """Name in medusa.heads.ARCHITECTURES."""
    num_heads: int = _limits(4, low=1, high=16)
    """Number of heads; head k predicts token t+1+k."""
    num_layers: int = _limits(1, low=1, high=8)
    """Residual blocks per head."""
    own_lm_heads: bool = False
    """Train one vocabulary matrix per head instead of sharing the base's frozen one."""


@dataclass(frozen=True)
class DataRecipe:
    """Training and held-out samples: JSON lines with messages, text, prompt + response, or input_ids + loss_mask."""

    train: str = ""
    """File of training samples (required)."""
    heldout: str = _limits("", resume=True)
    """File of held-out samples for the evaluation; empty = no evaluation."""
    row_tokens: int = _limits(1024, low=8)
    """Tokens per packed row; longer samples are cut into pieces."""


@dataclass(frozen=True)
class OptimRecipe:
    """AdamW, linear warm-up, cosine decay."""

    lr: float = _limits(1e-3, low=0.0, high=10.0)
    """Highest learning rate."""
    final_lr_ratio: float = _limits(0.0, low=0.0, high=1.0)
    """Learning rate at the end / highest learning rate."""
    warmup: float = _limits(0.05, low=0.0, high=1.0)
    """Warm-up, as a fraction of all steps."""
    weight_decay: float = _limits(0.0, low=0.0)
    """Decoupled weight decay."""
    clip_norm: float = _limits(1.0, low=0.0)
    """Largest norm of the gradient; 0 = no clipping."""
    head_decay: float = _limits(0.8, low=0.0, high=1.0)
    """Weight of head k in the loss = head_decay ** (k - 1)."""
    epochs: float = _limits(1.0, low=0.0)
    """Passes over the rows; ignored when steps > 0."""
    steps: int = _limits(0, low=0)
    """Optimizer steps; 0 = from epochs."""
    rows_per_step: int = _limits(16, low=1)
    """Packed rows per optimizer step over all processes."""
    micro_rows: int = _limits(2, low=1, resume=True)
    """Packed rows per process and forward pass; lower it when memory runs out (the result does not depend on it)."""
    seed: int = _limits(0, low=0)
    """Seed of the data order and of the initial weights."""


@dataclass(frozen=True)
class EngineRecipe:
    """DeepSpeed."""

    zero_stage: int = _limits(1, low=0, high=3)
    """0 = replicate, 1 = partition the optimizer, 2 = and the gradients, 3 = and the heads."""
    precision: str = _choice("float32", "float32", "bfloat16")
    """Products inside the heads; bfloat16 = autocast over float32 master weights."""
    device: str = _choice("auto", "auto", "cpu", "cuda")
    """Where to train; auto = cuda when there is one."""
    loss_rows: int = _limits(512, low=1, resume=True)
    """Rows of logits that exist at a time in the loss."""


@dataclass(frozen=True)
class EvaluateRecipe:
    """Evaluation on the held-out samples."""

    every_steps: int = _limits(0, low=0, resume=True)
    """Optimizer steps between evaluations; 0 = only at the end."""
    rows: int = _limits(64, low=0, resume=True)
    """Packed held-out rows for the per-head accuracy; 0 = all."""
    prompts: int = _limits(8, low=0, resume=True)
    """Held-out prompts that are decoded for tokens per step; 0 = none."""
    max_new_tokens: int = _limits(64, low=1, resume=True)
    """Tokens decoded per prompt."""
    nodes: int = _limits(16, low=1, resume=True)
    """Tree budget of the decoding, root included."""


@dataclass(frozen=True)
class LogRecipe:
    """Checkpoints and reports."""

    checkpoint_steps: int = _limits(200, low=1, resume=True)
    """Optimizer steps between checkpoints."""
    keep: int = _limits(2, low=1, resume=True)
    """Checkpoints that are kept."""
    wandb: str = _choice("off", "online", "offline", "off", resume=True)
    """Weights & Biases; its files go under the run directory."""
    wandb_project: str = _limits("medusa", resume=True)
    """Weights & Biases project."""


@dataclass(frozen=True)
class Recipe:
    """One training run."""

    run: str = _limits("runs/train", resume=True)
    """Run directory: recipe.yaml, metrics.jsonl, checkpoints/, heads/."""
    base: BaseRecipe = BaseRecipe()
    heads: HeadsRecipe = HeadsRecipe()
    data: DataRecipe = DataRecipe()
    optim: OptimRecipe = OptimRecipe()
    engine: EngineRecipe = EngineRecipe()
    evaluate: EvaluateRecipe = EvaluateRecipe()
    log: LogRecipe = LogRecipe()
