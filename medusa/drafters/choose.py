"""The drafter of a request, from its name, and its tree size where that is left open."""

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
from medusa.drafters.base import Drafter, PlainDrafter
from medusa.drafters.build import Context, Parts, build, is_costly, is_drawn, missing, observers
from medusa.drafters.early_exit import ExitLayer
from medusa.drafters.ngram import ORDERS
from medusa.heads import DraftHeads
from medusa.sampling import DRAFTERS, SamplingParams, Speculation, sources
from medusa.tree import Tree

logger = logging.getLogger(__name__)

UNNAMED = ("hybrid", "draft-model+prompt-lookup", "mtp+prompt-lookup")
"""Who may draft where nobody is named, of those whose parts are there."""
DRAWN = 8
"""Nodes of drawn drafts where none are given: text depends on them, and a seed must give the same text again."""
GUESSES = 6
"""Nodes for a single sequence on a CPU where all drafters cost nothing: without a guess a step is a plain one."""
KEPT_DRAFTERS = 64
"""Drafters of different names, sizes, trees and draws; the one that was not used for longest goes."""


class Completed(Protocol):
    """What a completion says about its drafter once it is over."""

    tokens: list[int]
    """All of them; the first was its prompt's."""
    steps: int
    seconds: float
    """From the first token to the last."""


class Drafters:
    """The drafters of one base with its heads.

    Args:
        base: Prepared for decoding.
        heads: Its heads, frozen; None = there are none.
        fixed_shapes: Steps are recorded, so that nothing may be decided within one.
        draft_model: A smaller model of the same tokens, prepared for decoding; None = there is none.

    Attributes:
        parts: What there is to draft with.
        named: The same with other heads, by their names.
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
        self._plain = PlainDrafter()
        self._policies: dict[tuple[str | None, tuple[str, ...], str, int], Policy] = {}
        self._kept: OrderedDict[tuple[str | None, str, int, Tree | None, Warper, bool], Drafter] = OrderedDict()

    def with_heads(self, base: BaseModel, own: DraftHeads | None, named: Mapping[str, DraftHeads]) -> "Drafters":
        """The same with these heads, and the base that gives what they read; what was learned as it runs is shared."""
        drafters = copy.copy(self)
        drafters.parts = self.parts.with_heads(base, own)
        drafters.named = {name: drafters.parts.with_heads(base, heads) for name, heads in named.items()}
        drafters._kept = OrderedDict()
        return drafters

    def choices(
        self, speculation: Speculation | None = None, batch: int = 1, rule: BuiltRule | None = None
    ) -> dict[str, Sequence[int]]:
        """Who may draft where nodes are left open, with the sizes that are tried; nobody = plain decoding.

        Args:
            speculation: What a request asks for; None = nothing special.
            batch: Sequences that share a pass.
            rule: Of the request; None = greedy.
        """
        speculation, rule = speculation or Speculation(), rule or build_rule()
        name = speculation.drafter
        if self.parts.base.decoding == "plain":
            return {}
        if name is not None:
            return {name: (GUESSES,) if self._alone_and_free(name, batch) else SIZES}
        found = self._everyone(batch, speculation.heads)
        # The text for a seed must not depend on who is fastest.
        return {one: sizes for one, sizes in found.items() if not is_drawn(one, rule.name)}

    def names(self, heads: str | None = None) -> list[str]:
        """Drafters that requests may name, several of them joined by "+"."""
        parts = self._parts(heads)
        return [name for name in DRAFTERS if parts.base.decoding != "plain" and missing(name, parts) is None]

    def check(self, speculation: Speculation, rule: BuiltRule) -> None:
        """Refuse what this model cannot draft.

        Raises:
            ValueError: A drafter whose parts (heads, a draft model, an MTP layer) are not there, or another tree.
        """
        name, nodes, tree = speculation.drafter, speculation.nodes, speculation.tree
        if speculation.heads is not None and speculation.heads not in self.named:
            known = ", ".join(sorted(self.named)) or "none"
            raise ValueError(f"heads ({speculation.heads!r}) are not loaded; choose one of: {known}")
        if name is not None and not isinstance(name, str):
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
            speculation: What it asks for.
            batch: Sequences that share a pass.
            rule: Of the request; drafts heed its draws.
        """
        name = speculation.drafter
        if name is not None and not isinstance(name, str):
            drafter: Drafter = name
            return drafter
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
        """Layers among what may draft for a checked request that must see what the base commits."""
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
        """Learn from a completion that is over."""
        name, arm, steps = speculation.drafter, self._arm(drafter), output.steps - 1  # the first was the prompt's
        left_open = speculation.nodes is None and speculation.tree is None
        if left_open and arm is not None and steps > 0 and not self.parts.host_decides:
            choices = self.choices(speculation, batch, rule)
            policy = self._policy(choices, speculation.heads, batch, rule)
            policy.observe(arm, len(output.tokens) - 1, output.seconds, steps)
        if isinstance(name, str) and "ngram" in sources(name):
            self.parts.ngrams.learn([*prompt[-max(ORDERS) :], *output.tokens])

    def explain(self, name: str | None) -> str:
        """What drafts for one prompt where nodes are left open and why, in one line."""
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
        """Who may draft where nobody is named."""
        parts = self._parts(heads)
        found: dict[str, Sequence[int]] = {name: SIZES for name in UNNAMED if missing(name, parts) is None}
        if self._alone_and_free("prompt-lookup", batch):
            found["prompt-lookup"] = (GUESSES,)
        return found

    def _policy(self, choices: Mapping[str, Sequence[int]], heads: str | None, batch: int, rule: BuiltRule) -> Policy:
        """The policy of these heads and drafters, what the rule computes, and such a batch: the next power of two."""
        key = (heads, tuple(choices), rule.work, slots := 1 << (batch - 1).bit_length())
        if key not in self._policies:
            self._policies[key] = Policy(choices, self.parts.base.cheap_rows // slots, slots)
        return self._policies[key]

    def _arm(self, drafter: Drafter) -> Arm | None:
        """What was chosen when this drafter was; None = it is not one of ours."""
        arms = (Arm(name, nodes) for (_, name, nodes, *_), kept in self._kept.items() if kept is drafter)
        return PLAIN if drafter is self._plain else next(arms, None)

    def _parts(self, heads: str | None) -> Parts:
        return self.parts if heads is None else self.named[heads]

    def _alone_and_free(self, name: str, batch: int) -> bool:
        """Whether drafts cost nothing to make and say themselves how many of their nodes are worth a row."""
        return self.parts.host_decides and batch == 1 and not is_costly(name)

    def _given(self, speculation: Speculation, rule: BuiltRule) -> Drafter:
        """The drafter of a request that says how much is drafted."""
        name, nodes, tree = speculation.drafter, speculation.nodes, speculation.tree
        name = name or ("heads" if tree is not None else next(iter(self._everyone(1, speculation.heads)), None))
        if nodes == 1 or name is None:
            return self._plain
        return self._sized(speculation.heads, name, nodes or 2, tree, rule)

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
