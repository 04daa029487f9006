"""The recipe: everything that a training run depends on, each value with its unit.

This module and `train.recipe_file` never import torch, so that `--help` and a wrong recipe answer at once.
A field's `limits` are checked where a recipe is read; `resume` says whether a run may be resumed after it changed.
"""

from dataclasses import dataclass, field
from typing import Any


def _limits(default: Any, *, low: float | None = None, high: float | None = None, resume: bool = False) -> Any:
    """A field with inclusive bounds; `resume=True`: a run may be resumed after this value has changed."""
    return field(default=default, metadata={"low": low, "high": high, "resume": resume})


def _choice(default: str, *choices: str, resume: bool = False) -> Any:
    """A field that takes one of the given words."""
    return field(default=default, metadata={"choices": choices, "resume": resume})


@dataclass(frozen=True)
class BaseRecipe:
    """The frozen language model."""

    name: str = "embedded"
    """Directory, GGUF file, Hub id, "embedded" (this repository's small model) or "smollm2" (SmolLM2-135M-Instruct)."""
    dtype: str = _choice("auto", "auto", "float32", "bfloat16")
    """Dtype of the frozen weights and of the products with the vocabulary; auto = the checkpoint's, or float32 on a CPU
    that multiplies faster in it."""
    shard: bool = False
    """Split the frozen weights over the processes (ZeRO-3) when the base does not fit on one device."""
    quantise: str = _choice("none", "none", "4bit")
    """4bit: load the base through bitsandbytes (QLoRA); its answers change, and so do the heads that fit it."""


ARCHITECTURES = ("recurrent", "medusa", "markov", "hydra", "attention", "block")
REMEMBERING = ("attention", "block")
"""Architectures whose heads have decoder layers like the base's, and see the text before a position."""


@dataclass(frozen=True)
class HeadsRecipe:
    """The trained heads."""

    architecture: str = _choice("medusa", *ARCHITECTURES)
    """The design of the heads; docs/heads.md compares them."""
    num_heads: int = _limits(4, low=1, high=16)
    """Number of heads; head k predicts token t+1+k. Architecture attention: passes of its layer, each from the previous
    output. Architecture block: rows of its only pass."""
    num_layers: int = _limits(1, low=1, high=8)
    """Residual blocks per head; block: decoder layers."""
    own_lm_heads: bool = False
    """Train one vocabulary matrix per head (attention, block: for all) instead of sharing the base's frozen one."""
    feature_layers: int = _limits(0, low=0, high=8)
    """Number of further layers of the base, spread evenly below the last, whose outputs heads read too."""
    last_layer: bool = True
    """Read the last layer, so that fresh heads predict what the base predicts. false: layers from the second to the
    fourth from the end instead, as in EAGLE-3, for engines that read no other; architectures attention and block
    only."""
    rank: int = _limits(64, low=1, high=4096)
    """Rank of the correction by the previous token; architectures markov and block only."""
    mask_token: int = _limits(-1, low=-1)
    """Token whose embedding all rows of a block except the first begin with, so that heads can be exported as DSpark
    drafts (best a token that no text has); -1 = our own rows; architecture block only."""
    norm_features: bool = True
    """Normalise the output of each feature layer, with weights of its own (EAGLE 3.1); architectures attention and
    block only."""
    norm_output: bool = True
    """Each pass reads the previous output after its last norm (EAGLE 3.1); architecture attention only."""
    window: int = _limits(0, low=0)
    """Number of last positions of the text that heads see, with the first ones; 0 = all; architectures attention and
    block only."""
    draft_vocab: int = _limits(0, low=0)
    """Number of tokens that heads can draft: the most frequent ones of the training data; 0 = the whole vocabulary."""
    init_from: str = ""
    """Heads whose weights training starts from, of this shape and in any format: a directory or a Hub id; empty = fresh
    ones. The draft vocabulary is chosen again, unless heads own their vocabulary matrices."""
    init_share: float = _limits(0.0, low=0.0, high=1.0)
    """Share of the weights of init_from in the heads that are evaluated and written, the rest is trained: 0.5 = the
    mean, which keeps more of what the first heads guessed right (WiSE-FT, Wortsman et al. 2022)."""


@dataclass(frozen=True)
class DataRecipe:
    """Training and held-out samples, of any shape that data.sources reads."""

    train: str = ""
    """Training samples (required): a .jsonl, .json or .parquet file, a directory of them, or a Hub data set."""
    train_split: str = "train"
    """Split of a Hub data set to train on."""
    heldout: str = _limits("", resume=True)
    """Held-out samples for the evaluation, as for train; empty = no evaluation."""
    heldout_split: str = _limits("test", resume=True)
    """Split of a Hub data set to hold out."""
    subset: str = ""
    """Configuration of a Hub data set; empty = its default."""
    streaming: bool = False
    """Read a Hub data set as it arrives instead of downloading it whole; needs limit."""
    limit: int = _limits(0, low=0)
    """Most training samples, the first ones; 0 = all. Files of `data regenerate` begin with the shortest prompts."""
    supervise: str = _choice("answers", "answers", "all")
    """Tokens that heads learn to predict: answers, or all, which are the prompts too, with or without an answer. Then
    the loss should take the base's distribution for its target (kl and others): ce would teach what people wrote."""
    cache: str = _limits(".cache/rows", resume=True)
    """Directory that keeps tokenised, packed rows; equal data is tokenised once."""
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
    loss: str = _choice("ce", "ce", "kl", "tv", "nla", "lk")
    """Targets: ce = the text; others = the base's own distribution: kl, tv = Kullback-Leibler or total variation
    distance, nla = -log of the acceptance, lk = from kl to tv as acceptance grows."""
    rows_per_step: int = _limits(16, low=1)
    """Packed rows per optimizer step over all processes."""
    mix_steps: int = _limits(1, low=0)
    """Number of steps whose positions are shuffled together, so that each step sees all of their documents; 0 = those
    of a whole pass over the data, which needs a cache of hidden states (cache.mode offline or hybrid) and heads without
    a cache of their own."""
    micro_rows: int = _limits(2, low=1, resume=True)
    """Packed rows per process and pass of the base; lower it when memory runs out (the result is the same)."""
    seed: int = _limits(0, low=0, high=2**32 - 1)
    """Seed of the data order and of the initial weights."""


@dataclass(frozen=True)
class EngineRecipe:
    """DeepSpeed."""

    zero_stage: int = _limits(1, low=0, high=3, resume=True)
    """0 = replicate, 1 = partition the optimizer, 2 = and the gradients, 3 = and the heads."""
    precision: str = _choice("auto", "auto", "float32", "bfloat16")
    """Dtype of products inside the heads; bfloat16 = autocast over float32 master weights; auto = bfloat16 if the base
    is in bfloat16."""
    device: str = _choice("auto", "auto", "cpu", "cuda")
    """Where to train; auto = cuda when there is one."""
    offload: bool = _limits(False, resume=True)
    """Keep the optimizer's state in the memory of the CPU (zero_stage 1 to 3)."""
    loss_rows: int = _limits(1024, low=1, resume=True)
    """Rows of logits, over all heads, that exist at a time; lower it if memory runs out (same result)."""


@dataclass(frozen=True)
class CacheRecipe:
    """The base's hidden states at supervised positions, on disk: later epochs and runs need no pass of the base."""

    mode: str = _choice("online", "online", "offline", "hybrid", resume=True)
    """online = no cache; offline = fill it before the first step; hybrid = fill it during the first epoch."""
    directory: str = _limits("", resume=True)
    """Directory of the cache, for all machines of the run; empty = <run>/hidden. Runs with equal base, data and heads
    may share it."""
    shard_mb: int = _limits(256, low=1, resume=True)
    """Size of one file, 10^6 bytes."""


@dataclass(frozen=True)
class LoraRecipe:
    """Medusa-2: adapters change the base together with the heads. The result is another model, and says so."""

    rank: int = _limits(0, low=0, high=1024)
    """Rank of the adapters; 0 = Medusa-1, the base stays frozen."""
    alpha: float = _limits(16.0, low=0.0)
    """Scale of the adapters = alpha / rank."""
    dropout: float = _limits(0.05, low=0.0, high=0.99)
    """Dropout of the adapters' input."""
    base_loss: str = _choice("kl", "kl", "ce")
    """Loss that keeps the base as it was: kl = distance to itself without adapters; ce = the text."""
    heads_weight: float = _limits(0.2, low=0.0)
    """lambda_0: weight of the heads' loss; that of the base has weight 1."""
    heads_schedule: str = _choice("constant", "constant", "sine")
    """lambda_0 from the first step, or rising to it along a quarter of a sine."""
    heads_only: float = _limits(0.2, low=0.0, high=1.0)
    """Share of the steps, at the start, that train the heads alone (the paper's first stage)."""
    lr_ratio: float = _limits(4.0, low=1.0)
    """Learning rate of the heads / learning rate of the adapters; optim.lr is that of the heads."""
    checkpoint_layers: bool = True
    """Compute the base's layers again in the backward pass instead of keeping their activations."""


@dataclass(frozen=True)
class EvaluateRecipe:
    """Evaluation on the held-out samples."""

    every_steps: int = _limits(0, low=0, resume=True)
    """Optimizer steps between evaluations; 0 = only at the end."""
    patience: int = _limits(0, low=0, resume=True)
    """End the run after so many evaluations without a better held-out accuracy, and write the heads of the best one;
    0 = make all steps, and write the last heads."""
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
    tensorboard: bool = _limits(False, resume=True)
    """Write TensorBoard files to <run>/tensorboard."""


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
    cache: CacheRecipe = CacheRecipe()
    lora: LoraRecipe = LoraRecipe()
    evaluate: EvaluateRecipe = EvaluateRecipe()
    log: LogRecipe = LogRecipe()
