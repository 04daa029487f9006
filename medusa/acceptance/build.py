"""From the settings of a ``generate`` call to its rule."""

import math
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from medusa.acceptance.logits import adjusted, warper
from medusa.acceptance.path import Rule, Verdict
from medusa.acceptance.rules import greedy, sampling, speculative, typical
from medusa.state import DecodeState
from medusa.tree import Draft

EPSILON = 0.09
DELTA = 0.3
RULES = ("greedy", "sampling", "speculative", "typical")
MAX_BIAS = 100.0
"""Largest logit bias either way; enough to force or forbid a token (the range of OpenAI's API)."""


class BuiltRule:
    """A rule, and what it computes at every node whatever the numbers: "sampling, top_p". Step costs depend on it."""

    def __init__(self, rule: Rule, work: str) -> None:
        self._rule, self.work = rule, work

    def __call__(self, draft: Draft, logits_BNV: Tensor, state: DecodeState) -> Verdict:
        """See ``Rule``."""
        return self._rule(draft, logits_BNV, state)


def build_rule(
    name: str | None,
    device: torch.device | str = "cpu",
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    epsilon: float = EPSILON,
    delta: float = DELTA,
) -> BuiltRule:
    """The rule of one ``generate`` call; equal settings give the same object, so that recorded steps are found.

    Args:
        name: One of ``RULES``; None = greedy at temperature 0 and sampling above. Typical is never chosen by itself.
        device: Of the logits.
        temperature: 0 = greedy decoding.
        top_k: Keep the k most likely tokens; 0 = all.
        top_p: Keep the smallest set of tokens with at least this probability; 1 = all.
        min_p: Keep tokens with at least this fraction of the best token's probability; 0 = all.
        repetition_penalty: See ``adjusted``; 1 = off.
        logit_bias: See ``adjusted``; None = none.
        epsilon: See ``typical``.
        delta: See ``typical``.

    Raises:
        ValueError: An unknown rule, a value out of its range, or a rule that contradicts the temperature.
    """
    name = name or ("sampling" if temperature > 0 else "greedy")
    if name not in RULES:
        raise ValueError(f"acceptance ({name!r}) is not known; choose one of: {', '.join(RULES)}")
    if (name == "greedy") != (temperature == 0):
        raise ValueError(f"acceptance {name!r} does not go with temperature {temperature}; greedy needs 0, others > 0")
    ranges = {
        "temperature": (temperature, 0.0, math.inf),
        "top_k": (top_k, 0, math.inf),
        "top_p": (top_p, 0.0, 1.0),
        "min_p": (min_p, 0.0, 1.0),
        "epsilon": (epsilon, 0.0, 1.0),
        "delta": (delta, 0.0, math.inf),
    }
    ranges |= {f"logit_bias of token {k}": (v, -MAX_BIAS, MAX_BIAS) for k, v in (logit_bias or {}).items()}
    for key, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise ValueError(f"{key} ({value}) must be between {low} and {high}; correct it")
    if top_p == 0:
        raise ValueError("top_p (0) leaves no token; give a value above 0, or 1 to switch it off")
    if not 0 < repetition_penalty < math.inf:
        raise ValueError(f"repetition_penalty ({repetition_penalty}) must be above 0; give 1 to switch it off")
    bias = tuple(sorted((logit_bias or {}).items()))
    warping = (temperature, top_k, top_p, min_p)
    return _rule(name, torch.device(device), warping, repetition_penalty, bias, epsilon, delta)


@lru_cache(maxsize=64)
def _rule(
    name: str,
    device: torch.device,
    warping: tuple[float, int, float, float],
    repetition_penalty: float,
    bias: tuple[tuple[int, float], ...],
    epsilon: float,
    delta: float,
) -> BuiltRule:
    process = warper(*warping)
    rule: Rule = greedy
    if name == "sampling":
        rule = sampling(process)
    elif name == "speculative":
        rule = speculative(process)
    elif name == "typical":
        rule = typical(process, epsilon, delta)
    if repetition_penalty != 1 or bias:
        rule = adjusted(rule, repetition_penalty, dict(bias), device)
    _, top_k, top_p, min_p = warping
    parts = {"top_k": top_k > 0, "top_p": top_p < 1, "min_p": min_p > 0, "penalty": repetition_penalty != 1}
    return BuiltRule(rule, ", ".join([name, *(part for part, used in parts.items() if used)]))
