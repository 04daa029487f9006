"""What can this base verify? Asked once at load, so that no family of models ever writes wrong text silently."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from medusa.base_model import BaseModel
from medusa.step import prefill, verify
from medusa.tree import Draft, Tree

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Largest allowed difference / standard deviation of the logits; coarser dtypes get ``COARSE``."""
COARSE = 0.2
"""For half precision, and for rounded activations: what is nearly equal may be rounded to different numbers."""
LENGTHS = (9, 5)
"""Tokens of the prompts: of different lengths, as in a batch."""
TREE = Tree.full([2, 1])
DRAFTS = {"tree": [0, 1, 2, 3, 4], "chain": [0, 1, 3], "plain": [0]}
"""Nodes of ``TREE`` that are verified, the most demanding way to decode first."""


class UnsupportedBaseError(ValueError):
    """The base computes something else over cached rows than over plain text."""


def choose_decoding(base: BaseModel) -> None:
    """Set ``base.decoding`` and ``base.explicit_mask`` to the first way to decode that is exact.

    A few small passes compare the logits of every node of a small tree, of a chain and of single rows, behind cached
    prompts of different lengths, with the base's own logits over each path as plain text. A family that drops the
    step's plan on its way to the attention gets the whole mask with each call instead, unless it has sliding windows,
    which one mask for all layers cannot express. Trees fail where attention sees rows instead of positions (ALiBi); all
    of it fails where a layer keeps a state of its own (recurrent layers).

    Texts here are shorter than a real base's windows: that those are right is tested per family
    (tests/medusa/test_conformance.py), with small ones.

    Raises:
        UnsupportedBaseError: Not even single rows are exact.
    """
    reasons: dict[str, str] = {}
    for decoding, nodes in DRAFTS.items():
        for explicit_mask in (False,) if _has_windows(base) else (False, True):
            base.decoding, base.explicit_mask = decoding, explicit_mask  # type: ignore[assignment]
            reason = _objection(base, nodes)
            if reason is None:
                _report(base, reasons)
                return
            reasons[decoding] = reason
    base.decoding, base.explicit_mask = "tree", False
    raise UnsupportedBaseError(
        f"base ({base.name}, {base.config.model_type}) cannot be decoded here: {reasons['plain']};"
        " use a base with rotary or learned positions"
    )


def _report(base: BaseModel, reasons: dict[str, str]) -> None:
    if base.explicit_mask:
        logger.info("base (%s): masks travel with each call, its attention does not get the step's plan", base.name)
    if base.decoding != "tree":
        drafts = "drafts are chains" if base.decoding == "chain" else "it decodes plainly, one token per step"
        kind = base.config.model_type
        logger.warning("base (%s, %s) cannot verify trees: %s; %s", base.name, kind, reasons["tree"], drafts)


@torch.inference_mode()
def compile_base(base: BaseModel) -> bool:
    """Compile the base's pass and hold it to the same comparison; where it fails, the plain pass stays, with a warning.

    Returns:
        Whether the compiled pass is used from now on.
    """
    reason = _uncompilable(base)
    if reason is None:
        base.compile()
        # Every kind of shape is a graph of its own: one sequence or several, one row or several.
        shapes = ((lengths, nodes) for lengths in (LENGTHS, LENGTHS[:1]) for nodes in (DRAFTS[base.decoding], [0]))
        reason = next((found for lengths, nodes in shapes if (found := _objection(base, nodes, lengths))), None)
    if reason is not None:
        base.compile(False)
        logger.warning("base (%s) runs without compilation: %s", base.name, reason)
    return reason is None


def _uncompilable(base: BaseModel) -> str | None:
    """What a compiled pass would not see, although short texts come out right."""
    if base.explicit_mask:
        return "the whole mask travels with each call"
    if any(getattr(module, "attn_temperature_tuning", False) for module in base.model.modules()):
        return "its layers scale queries by their indices in the cache"
    return None


def _has_windows(base: BaseModel) -> bool:
    kinds = getattr(base.config, "layer_types", None) or ()
    return bool(getattr(base.config, "sliding_window", None)) or any(kind != "full_attention" for kind in kinds)


@torch.inference_mode()
def _objection(base: BaseModel, nodes: list[int], lengths: Sequence[int] = LENGTHS) -> str | None:
    """Why the base cannot verify these nodes as it is set now, None if it can."""
    prompts = [[(7 * i + 3) % base.vocab_size for i in range(length)] for length in lengths]
    drafted = [(11 * i + 5) % base.vocab_size for i in range(1, TREE.nodes)]
    tokens_BN = torch.tensor([[prompt[-1], *drafted] for prompt in prompts], device=base.device)
    parents_BN = torch.tensor([[nodes.index(int(TREE.parents[node])) for node in nodes]] * len(prompts))
    try:
        cache = base.new_cache(len(prompts), max(lengths) + TREE.nodes)
        prefill(base, cache, prompts, chunk=6)
        draft = Draft.of(tokens_BN[:, nodes], parents_BN, TREE.depth)
        ours_BNV = base.logits(verify(base, cache, draft)).float()
        theirs_BNV = _sequential(base, prompts, drafted)[:, nodes]
    except (TypeError, AttributeError, RuntimeError, ValueError, IndexError, AssertionError) as error:
        return f"its forward pass fails over cached rows: {(str(error).splitlines() or [type(error).__name__])[0]}"
    worst = ((ours_BNV - theirs_BNV).abs().amax(-1) / theirs_BNV.std(-1)).max().item()
    limit = COARSE if base.int8 else TOLERANCE.get(base.dtype, COARSE)
    return None if worst <= limit else f"its logits differ from those over plain text by {worst:.2g} (limit {limit})"


def _sequential(base: BaseModel, prompts: list[list[int]], drafted: list[int]) -> Tensor:
    """Logits [B, N, V] of every node of ``TREE``, its path as plain text, from the whole model as it was loaded."""
    rows = []
    for prompt in prompts:
        left, right, below_left, below_right = drafted
        texts = torch.tensor([[*prompt, left, below_left], [*prompt, right, below_right]], device=base.device)
        logits_PTV = base.model(input_ids=texts, use_cache=False).logits[:, -3:].to(base.device).float()
        rows.append(logits_PTV[[0, 0, 1, 0, 1], [0, 1, 1, 2, 2]])
    return torch.stack(rows)
