"""Builds the acceptance rule of a request from its parameters."""

from functools import lru_cache

import torch
from torch import Tensor

from medusa.acceptance.logits import NO_NOISE, Adjustment, Warper, adjusted
from medusa.acceptance.path import Rule, Verdict
from medusa.acceptance.rules import greedy, sampling, speculative, typical
from medusa.sampling import SamplingParams, Speculation
from medusa.state import DecodeState
from medusa.tree import Draft


class BuiltRule:
    """The rule of a request.

    Attributes:
        name: One of ``medusa.sampling.RULES``.
        work: The kind of computation at every node, which decides its time: "sampling, top_p".
        warper: The sampling settings; temperature 0 for a greedy rule.
    """

    def __init__(self, rule: Rule, name: str, work: str, warper: Warper) -> None:
        self._rule, self.name, self.work, self.warper = rule, name, work, warper

    @property
    def noise(self) -> Warper:
        """The settings whose noise drafts should follow; greedy and typical rules do not accept by draws, so none."""
        return NO_NOISE if self.name in ("greedy", "typical") else self.warper

    def __call__(self, draft: Draft, logits_BNV: Tensor, state: DecodeState) -> Verdict:
        """The verdict of the rule."""
        return self._rule(draft, logits_BNV, state)


def build_rule(
    params: SamplingParams | None = None, speculation: Speculation | None = None, device: torch.device | str = "cpu"
) -> BuiltRule:
    """Build the rule of one request; equal settings give the same object, so that recorded steps are found again.

    Args:
        params: None = greedy.
        speculation: Names the rule; None, or no name = greedy at temperature 0, sampling above. Typical is never chosen
            automatically.
        device: Device of the logits.

    Raises:
        ValueError: The rule does not fit the temperature.
    """
    params, speculation = params or SamplingParams(), speculation or Speculation()
    name = speculation.acceptance or ("sampling" if params.temperature > 0 else "greedy")
    if (name == "greedy") != (params.temperature == 0):
        raise ValueError(
            f"acceptance {name!r} cannot be combined with temperature {params.temperature}; greedy needs 0, others > 0"
        )
    warper = Warper(params.temperature, params.top_k, params.top_p, params.min_p)
    adjustment = Adjustment(params.biases, params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    return _rule(name, torch.device(device), warper, adjustment, speculation.epsilon, speculation.delta)


@lru_cache(maxsize=256)
def _rule(
    name: str,
    device: torch.device,
    warper: Warper,
    adjustment: Adjustment,
    epsilon: float,
    delta: float,
) -> BuiltRule:
    rule: Rule = greedy
    if name == "sampling":
        rule = sampling(warper)
    elif name == "speculative":
        rule = speculative(warper)
    elif name == "typical":
        rule = typical(warper, epsilon, delta)
    if adjustment != Adjustment():
        rule = adjusted(rule, adjustment, device)
    penalty = adjustment._replace(bias=()) != Adjustment()
    parts = {"top_k": warper.top_k > 0, "top_p": warper.top_p < 1, "min_p": warper.min_p > 0, "penalty": penalty}
    return BuiltRule(rule, name, ", ".join([name, *(part for part, used in parts.items() if used)]), warper)
