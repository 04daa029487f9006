"""Can this base verify trees? Asked once at load, so that no family of models ever writes wrong text silently."""

import logging

import torch

from medusa.base_model import BaseModel
from medusa.step import prefill, verify
from medusa.tree import Draft, Tree

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Largest allowed difference / standard deviation of the logits; coarser dtypes get ``COARSE``."""
COARSE = 0.2


class UnsupportedBaseError(ValueError):
    """The base computes something else over tree rows than over plain rows."""


def check_tree_decoding(base: BaseModel) -> None:
    """Compare the logits of every node of a small tree with the base's own logits for the node's path as plain text.

    A family that drops the step's plan on its way to the attention gets the whole mask with each call instead
    (``base.explicit_mask``), unless it has sliding windows, which one mask for all layers cannot express. It fails
    where attention does not see positions as given (ALiBi) or a layer keeps a state (recurrent layers).

    Raises:
        UnsupportedBaseError: The logits differ.
    """
    reason = _objection(base)
    if reason is not None and not _has_windows(base):
        base.explicit_mask = True
        if _objection(base) is None:
            logger.info("base (%s): masks travel with each call, its attention does not get the step's plan", base.name)
            return
        base.explicit_mask = False
    if reason is not None:
        kind = base.config.model_type
        raise UnsupportedBaseError(
            f"base ({base.name}, {kind}) cannot verify trees: {reason}; use a base with rotary or learned positions"
        )


@torch.inference_mode()
def compile_base(base: BaseModel) -> bool:
    """Compile the base's pass and hold it to the same comparison; where it fails, the plain pass stays, with a warning.

    Returns:
        Whether the compiled pass is used from now on.
    """
    reason: str | None = "the whole mask travels with each call"
    if not base.explicit_mask:
        base.compile()
        reason = _objection(base)
    if reason is not None:
        base.compile(False)
        logger.warning("base (%s) runs without compilation: %s", base.name, reason)
        return False
    cache = base.new_cache(1, 2)
    verify(base, cache, Draft.chain(prefill(base, cache, [[0]]).roots[:, None]))  # one row is a shape of its own
    return True


def _has_windows(base: BaseModel) -> bool:
    kinds = getattr(base.config, "layer_types", None) or ()
    return bool(getattr(base.config, "sliding_window", None)) or any(kind != "full_attention" for kind in kinds)


@torch.inference_mode()
def _objection(base: BaseModel) -> str | None:
    """Why the base cannot verify trees as it is set now, None if it can."""
    tree = Tree.full([2, 1])
    vocab = base.vocab_size
    prompt = [(7 * i + 3) % vocab for i in range(9)]
    tokens_BN = torch.tensor([[prompt[-1], *((11 * i + 5) % vocab for i in range(1, tree.nodes))]], device=base.device)
    prompt_BT = torch.tensor([prompt], device=base.device)
    try:
        cache = base.new_cache(1, len(prompt) + tree.nodes)
        prefill(base, cache, [prompt])
        ours_NV = base.logits(verify(base, cache, Draft.of(tokens_BN, tree.parents[None], tree.depth)))[0].float()
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        return f"its forward pass fails over tree rows: {error}"
    worst = 0.0
    for node in range(tree.nodes):
        path = tokens_BN[0, tree.ancestors[node].to(base.device)][1:]
        plain_BTD = base.hidden_states(torch.cat([prompt_BT, path[None]], dim=1))
        theirs_V = base.logits(plain_BTD[0, -1]).float()
        worst = max(worst, float((ours_NV[node] - theirs_V).abs().max() / theirs_V.std()))
    limit = TOLERANCE.get(base.dtype, COARSE)
    return None if worst <= limit else f"tree logits differ from sequential ones by {worst:.2g} (limit {limit})"
