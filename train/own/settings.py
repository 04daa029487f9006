"""Recipe values for any base: functions of its size that give the values of the recipes for bases of that size.

They come from `train/recipes` (embedded, smollm2 and small-cpu on CPUs, llama-3.1-8b on GPUs), which give the reasons.
"""

from dataclasses import dataclass
from typing import Any

from medusa.base.model import BaseModel
from medusa.base.packing import packed_weights
from medusa.heads import HeadsConfig

Values = dict[str, Any]
"""Recipe values by their dotted keys."""

TINY, LARGE = 50e6, 1e9
"""Largest number of parameters of tiny bases (embedded has 9M), and least number for a lower learning rate."""
ANSWER_TOKENS = {"cpu": 160, "cuda": 512}
"""Most tokens of an answer; half of the context at most."""
ROW_TOKENS = {"cpu": 512, "cuda": 2048}
"""Fewest tokens of a row, where the context allows."""
DRAFT_VOCABULARY = {"cpu": 8192, "cuda": 32768}
"""Draft vocabulary if the base's is more than twice as large, so that a level reads less."""
CONTINUED = ("recurrent", "medusa", "markov", "hydra")
"""Architectures without a cache of their own."""
DISK_SHARE = 0.5
"""Largest share of the free disk for hidden states."""


@dataclass(frozen=True)
class Facts:
    """The base and machine on which settings depend."""

    device: str
    """"cpu" or "cuda"."""
    processes: int
    """Number of training processes: one for each GPU, or one."""
    parameters: int
    hidden_size: int
    num_layers: int
    vocab_size: int
    context: int
    """Context length of the base: tokens of prompt and answer together."""

    @staticmethod
    def of(base: BaseModel, processes: int) -> "Facts":
        """The facts of a loaded base."""
        packed = sum(weight.inputs * weight.outputs for weight in packed_weights(base.model))
        parameters = packed + sum(weight.numel() for weight in base.model.parameters())
        shape = base.hidden_size, base.num_layers, base.vocab_size, base.context_length
        return Facts(base.device.type, processes, parameters, *shape)

    @property
    def devices(self) -> int:
        """Number of devices that train in parallel; processes on a CPU share its cores."""
        return self.processes if self.device == "cuda" else 1

    @property
    def answer_tokens(self) -> int:
        """Most tokens of an answer."""
        return min(ANSWER_TOKENS[self.device], self.context // 2)


def shape_values(facts: Facts, longest: int) -> Values:
    """Recipe values that decide the speed of training, independent of the data.

    Args:
        facts: the base and the machine.
        longest: tokens of prompt and answer that few samples exceed, so that rows hold them whole.
    """
    gpu, tiny, large = facts.device == "cuda", facts.parameters < TINY, facts.parameters > LARGE
    vocabulary = DRAFT_VOCABULARY[facts.device]
    return {
        "heads.architecture": "recurrent",
        "heads.num_heads": 8 if tiny else 5 if gpu else 4,
        "heads.feature_layers": min(3 if tiny else 2, facts.num_layers - 1),
        "heads.draft_vocab": vocabulary if facts.vocab_size > 2 * vocabulary else 0,
        "data.row_tokens": min(facts.context, max(ROW_TOKENS[facts.device], 1 << (longest - 1).bit_length())),
        "optim.lr": 1e-3 if large else 2e-3,
        "optim.loss": "kl",  # half of the answers are sampled
        "optim.head_decay": 0.8 if large else 0.9,
        "optim.rows_per_step": max(16 if gpu else 4, facts.processes),
        "optim.micro_rows": 4 if gpu and not large else 2,
        "engine.zero_stage": 1 if facts.processes > 1 else 0,
        "engine.loss_rows": 4096 if gpu else 1024,
    }


def continued_values(path: str, heads: HeadsConfig, shape: Values) -> Values:
    """Recipe values with which the training of these heads continues, in place of those of a new shape.

    Args:
        path: A directory, or a Hub id.
        heads: Their shape.
        shape: `shape_values`.

    Raises:
        ValueError: They remember the text, or cannot be trained here.
    """
    if heads.architecture not in CONTINUED:
        raise ValueError(
            f"heads ({path}) are {heads.architecture} heads, whose training this command cannot continue; give one of "
            f"{', '.join(CONTINUED)}, or train them with a recipe (heads.init_from)"
        )
    kept = ("architecture", "num_heads", "num_layers", "own_lm_heads", "rank")
    values = {f"heads.{name}": getattr(heads, name) for name in kept}
    values |= {"heads.feature_layers": len(heads.feature_layers), "heads.draft_vocab": heads.draft_vocab_size}
    return {**values, "heads.init_from": path, "optim.lr": shape["optim.lr"] / 2}


def state_bytes(facts: Facts, shape: Values, itemsize: int) -> int:
    """Bytes of the kept hidden states of one trained position."""
    layers: int = shape["heads.feature_layers"]
    return facts.hidden_size * (1 + layers) * itemsize


def cache_values(needed: float, free: float, facts: Facts) -> Values:
    """Hidden states on disk, with all positions mixed, if they fit; otherwise a pass of the base for each epoch.

    Args:
        needed: bytes of all hidden states.
        free: free bytes of the disk.
        facts: the base and the machine.
    """
    if needed <= DISK_SHARE * free:
        return {"cache.mode": "offline", "cache.shard_mb": 32, "optim.mix_steps": 0}
    return {"cache.mode": "online", "optim.mix_steps": 4 if facts.parameters > LARGE else 64}
