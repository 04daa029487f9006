"""Chooses the drafter of a request, and its tree size if the request does not set it."""

import copy
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Protocol

from medusa.acceptance import BuiltRule, build_rule
from medusa.acceptance.logits import NO_NOISE, Warper
from medusa.base.model import BaseModel
from medusa.budget.auto import AutoDrafter
from medusa.budget.policy import PLAIN, SIZES, Arm, Policy
from medusa.cache import Observer
from medusa.cpu import native
from medusa.drafters.base import Drafter, PlainDrafter
from medusa.drafters.build import Context, Parts, build, is_costly, is_drawn, missing, observers
from medusa.drafters.continuations import SEARCH
from medusa.drafters.early_exit import ExitLayer
from medusa.drafters.own import OwnDrafter
from medusa.heads import DraftHeads
from medusa.sampling import DRAFTERS, SamplingParams, Speculation, sources
from medusa.tree import Tree

logger = logging.getLogger(__name__)

UNNAMED = ("hybrid", "draft-model+prompt-lookup", "mtp+prompt-lookup")
"""Drafters to choose from if a request names none, as far as their parts are available."""
DRAWN = 8
"""Default nodes of drawn drafts: the text depends on them, and a seed must give the same text again."""
KEPT_DRAFTERS = 64
"""Most drafters (by name, size, tree and draws) that are kept; the least recently used is dropped."""


class Completed(Protocol):
    """Figures of a completion that its drafter learns from."""

    tokens: list[int]
    """All tokens; the prompt's pass gave the first."""
    steps: int
    seconds: float
    """Seconds from the first token to the last."""


class Drafters:
    """The drafters of one base with its heads.

    Args:
        base: The base, prepared for decoding.
        heads: Its frozen heads; None = there are none.
        fixed_shapes: Steps are recorded, so the host may decide nothing within a step.
        draft_model: A smaller model with the same tokens, prepared for decoding; None = there is none.

    Attributes:
        parts: The available parts.
        named: Drafters with other heads, by the names of the heads.
        remembering: Whether requests that name no drafter learn from each other's completions (``ngram``), on a CPU
            with the kernels.
    """

    def __init__(
        self,
        base: BaseModel,
        heads: DraftHeads | None,
        fixed_shapes: bool = False,
        draft_model: BaseModel | None = None,
    ) -> None:
        host_decides = not fixed_shapes and base.device.type == "cpu"
        self.parts = Parts(base, heads, draft_model, host_decides, ExitLayer(base))
        self.named: dict[str, Parts] = {}
        self.remembering = False
        self._plain = PlainDrafter()
        self._policies: dict[tuple[str | None, tuple[str, ...], str, int], Policy] = {}
        self._kept: OrderedDict[tuple[str | None, str, int, Tree | None, Warper, bool], Drafter] = OrderedDict()

    def with_heads(self, base: BaseModel, own: DraftHeads | None, named: Mapping[str, DraftHeads]) -> "Drafters":
        """The same with these heads, and a base that taps their layers; learned state is shared."""
        drafters = copy.copy(self)
        drafters.parts = self.parts.with_heads(base, own)
        drafters.named = {name: drafters.parts.with_heads(base, heads) for name, heads in named.items()}
        drafters._kept = OrderedDict()
        return drafters

    def choices(
        self, speculation: Speculation | None = None, batch: int = 1, rule: BuiltRule | None = None
    ) -> dict[str, Sequence[int]]:
        """The drafters to choose from if nodes are not set, with the sizes to try; empty = plain decoding.

        Args:
            speculation: The request's settings; None = the defaults.
            batch: Number of sequences that share a pass.
            rule: The request's rule; None = greedy.
        """
        speculation, rule = speculation or Speculation(), rule or build_rule()
        name = speculation.drafter
        if self.parts.base.decoding == "plain":
            return {}
        if name is not None:
            return {name: (self.parts.base.cheap_rows,) if self._alone_and_free(name, batch) else SIZES}
        found = self._everyone(batch, speculation.heads)
        # The text for a seed must not depend on which drafter is fastest.
        return {one: sizes for one, sizes in found.items() if not is_drawn(one, rule.name)}

    def names(self, heads: str | None = None) -> list[str]:
        """Drafters that requests may name; several can be joined by "+"."""
        parts = self._parts(heads)
        return [name for name in DRAFTERS if parts.base.decoding != "plain" and missing(name, parts) is None]

    def check(self, speculation: Speculation, rule: BuiltRule) -> None:
        """Check that this model can draft as asked.

        Raises:
            ValueError: Parts of the drafter (heads, a draft model, an MTP layer) are missing, or the tree does not fit.
        """
        name, nodes, tree = speculation.drafter, speculation.nodes, speculation.tree
        if speculation.heads is not None and speculation.heads not in self.named:
            known = ", ".join(sorted(self.named)) or "none"
            raise ValueError(f"heads ({speculation.heads!r}) are not loaded; choose one of: {known}")
        if name is not None and not isinstance(name, str):
            if not hasattr(name, "observe") or isinstance(name, type):
                raise ValueError(
                    f"drafter ({name!r}) is neither a name nor a Drafter; give a name, or a subclass of Drafter"
                )
            return
        parts = self._parts(speculation.heads)
        takes_tree = parts.heads is not None and nodes is None and name in (None, "heads", "heads-sampled")
        if tree is not None and not takes_tree:
            raise ValueError(
                "tree needs heads, and replaces nodes and drafter; give only one of them, on a model with heads"
            )
        if name is not None and (need := missing(name, parts)) is not None:
            raise ValueError(f"drafter ({name!r}) needs {need.what}; {need.remedy}, or choose prompt-lookup")
        if nodes is not None or tree is not None:
            self._given(speculation, rule)
        elif name is not None and parts.base.decoding != "plain":
            self._sized(speculation.heads, name, DRAWN, None, rule)

    def choose(self, speculation: Speculation, batch: int, rule: BuiltRule) -> Drafter:
        """The drafter of a checked request.

        Args:
            speculation: The request's settings.
            batch: Number of sequences that share a pass.
            rule: The request's rule, whose draws drafts follow.
        """
        name = speculation.drafter
        if name is not None and not isinstance(name, str):
            return name if type(name).__module__.startswith("medusa.") else OwnDrafter(name)
        if speculation.nodes is not None or speculation.tree is not None:
            return self._given(speculation, rule)

        choices = self.choices(speculation, batch, rule)
        if not choices:
            return self._plain

        def drafter_of(arm: Arm) -> Drafter:
            return self._plain if arm == PLAIN else self._sized(speculation.heads, *arm, None, rule)

        first, sizes = next(iter(choices.items()))
        if is_drawn(first, rule.name):
            return drafter_of(Arm(first, DRAWN))
        if name is not None and len(sizes) == 1:
            return drafter_of(Arm(name, *sizes))
        policy = self._policy(choices, speculation.heads, batch, rule)
        logger.info("auto, batch of %d: %s", batch, policy)
        if not self.parts.host_decides:
            return drafter_of(policy.choose())
        return AutoDrafter(policy, drafter_of, [Arm(one, sizes[-1]) for one, sizes in choices.items()])

    def observers(self, speculation: Speculation) -> tuple[Observer, ...]:
        """Layers of a checked request's possible drafters that read the hidden states of committed tokens."""
        name, parts = speculation.drafter, self._parts(speculation.heads)
        if name is not None and not isinstance(name, str):
            return tuple(name.observers)
        if speculation.nodes == 1 or parts.base.decoding == "plain":
            return ()
        names = [name] if name is not None else ["heads"] if speculation.tree else self._everyone(1, speculation.heads)
        return tuple(dict.fromkeys(one for each in names for one in observers(each, parts)))

    def observe(
        self,
        drafter: Drafter,
        speculation: Speculation,
        rule: BuiltRule,
        batch: int,
        prompt: list[int],
        output: Completed,
    ) -> None:
        """Learn from an ended completion."""
        name, steps = speculation.drafter, output.steps - 1  # the prompt's pass gave the first token
        left_open = speculation.nodes is None and speculation.tree is None and not self.parts.host_decides
        if left_open and steps > 0 and (arm := self._arm(drafter)) is not None:
            choices = self.choices(speculation, batch, rule)
            policy = self._policy(choices, speculation.heads, batch, rule)
            policy.observe(arm, len(output.tokens) - 1, output.seconds, steps)
        learns = self._remembers if name is None else isinstance(name, str) and "ngram" in sources(name)
        if learns:
            self.parts.ngrams.learn([*prompt[-SEARCH.longest :], *output.tokens])

    def explain(self, name: str | None) -> str:
        """One line on what drafts for one prompt if nodes are not set, and why."""
        always_drawn = name is not None and is_drawn(name, "greedy")
        speculation, rule = Speculation(drafter=name), build_rule(SamplingParams(temperature=float(always_drawn)))
        self.check(speculation, rule)
        choices = self.choices(speculation, 1, rule)
        if not choices:
            return "auto: plain decoding"
        first, sizes = next(iter(choices.items()))
        if is_drawn(first, rule.name):
            return f"auto: {DRAWN} nodes for {first}, so that a seed gives the same text again"
        if name is not None and len(sizes) == 1:
            return f"auto: at most {sizes[0]} nodes for {name}, fewer where guesses are unlikely"
        return f"auto, batch of 1: {self._policy(choices, None, 1, rule)}"

    def _everyone(self, batch: int, heads: str | None) -> dict[str, Sequence[int]]:
        """The drafters to choose from if a request names none."""
        parts = self._parts(heads)
        more = "+ngram" * self._remembers
        found: dict[str, Sequence[int]] = {name + more: SIZES for name in UNNAMED if missing(name, parts) is None}
        if self._alone_and_free("prompt-lookup", batch):
            found["prompt-lookup" + more] = (self.parts.base.cheap_rows,)
        return found

    @property
    def _remembers(self) -> bool:
        return self.remembering and self.parts.host_decides and native.available()  # Python would search too slowly

    def _policy(self, choices: Mapping[str, Sequence[int]], heads: str | None, batch: int, rule: BuiltRule) -> Policy:
        """The policy for these heads and drafters, this kind of rule, and this batch, rounded up to a power of two."""
        key = (heads, tuple(choices), rule.work, slots := 1 << (batch - 1).bit_length())
        if key not in self._policies:
            self._policies[key] = Policy(choices, self.parts.base.cheap_rows // slots, slots)
        return self._policies[key]

    def _arm(self, drafter: Drafter) -> Arm | None:
        """The arm of this drafter; None = the drafter was not chosen by a policy."""
        arms = (Arm(name, nodes) for (_, name, nodes, *_), kept in self._kept.items() if kept is drafter)
        return PLAIN if drafter is self._plain else next(arms, None)

    def _parts(self, heads: str | None) -> Parts:
        return self.parts if heads is None else self.named[heads]

    def _alone_and_free(self, name: str, batch: int) -> bool:
        """Whether drafts are free and decide themselves how many nodes they use."""
        return self.parts.host_decides and batch == 1 and not is_costly(name)

    def _given(self, speculation: Speculation, rule: BuiltRule) -> Drafter:
        """The drafter of a request that sets the nodes."""
        name, nodes, tree = speculation.drafter, speculation.nodes, speculation.tree
        if nodes == 1:
            return self._plain
        best = "heads" if tree is not None else next(iter(self._everyone(1, speculation.heads)), "prompt-lookup")
        name = name or best
        nodes = min(nodes or 2, self.parts.base.context_length)  # room is made for all of them
        return self._sized(speculation.heads, name, nodes, tree, rule)

    def _sized(self, heads: str | None, name: str, nodes: int, tree: Tree | None, rule: BuiltRule) -> Drafter:
        drawn = is_drawn(name, rule.name)
        noise = rule.warper if drawn else rule.noise if is_costly(name) else NO_NOISE
        key = (heads, name, nodes, tree, noise, drawn)
        if key not in self._kept:
            self._kept[key] = build(name, nodes, Context(self._parts(heads), noise, drawn, tree))
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT_DRAFTERS:
            self._kept.popitem(last=False)
        return self._kept[key]
