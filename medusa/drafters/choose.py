"""The drafter of a request, from its name, and its tree size where that is left open."""

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from medusa.acceptance import BuiltRule, build_rule
from medusa.acceptance.logits import NO_NOISE, Warper
from medusa.base.model import BaseModel
from medusa.budget.auto import Auto
from medusa.budget.policy import PLAIN, SIZES, Arm
from medusa.drafters.base import Drafter, PlainDrafter
from medusa.drafters.build import COSTLY, MODELS, Parts
from medusa.drafters.ngram import ORDERS
from medusa.engine.graph import StepGraphs
from medusa.engine.output import Output
from medusa.engine.steps import EagerSteps, StartSteps
from medusa.heads import DraftHeads
from medusa.sampling import SamplingParams, Speculation, sources
from medusa.tree import Tree

DRAWN = 8
"""Nodes of drawn drafts where none are given: text depends on them, and a seed must give the same text again."""
GUESSES = 6
"""Nodes for a single sequence on a CPU where all drafters cost nothing: without a guess a step is a plain one."""
KEPT_DRAFTERS = 64
"""Drafters of different names, sizes, trees and draws; the one that was not used for longest goes."""


class Drafters:
    """The drafters of one base with its heads.

    Args:
        base: Prepared for decoding.
        heads: Its heads, frozen; None = there are none.
        graphs: Runs the steps as CUDA graphs, and shapes are fixed; None = eagerly.
        draft_model: A smaller model of the same tokens, prepared for decoding; None = there is none.

    Attributes:
        parts: What there is to draft with.
        named: The same with other heads, by their names.
        start: Runs the steps.
    """

    def __init__(
        self,
        base: BaseModel,
        heads: DraftHeads | None,
        graphs: StepGraphs | None,
        draft_model: BaseModel | None = None,
    ) -> None:
        self.parts = Parts(base, heads, draft_model, graphs is None and base.device.type == "cpu")
        self.named: dict[str, Parts] = {}
        self.start: StartSteps = EagerSteps if graphs is None else graphs.steps
        self._plain = PlainDrafter()
        self._auto = Auto(base.cheap_rows)
        self._kept: OrderedDict[tuple[str | None, str, int, Tree | None, Warper, bool], Drafter] = OrderedDict()

    def with_heads(self, own: DraftHeads | None, named: Mapping[str, DraftHeads]) -> "Drafters":
        """The same with these heads; what was learned as it runs is shared."""
        drafters = copy.copy(self)
        drafters.parts = self.parts.with_heads(own)
        drafters.named = {name: self.parts.with_heads(heads) for name, heads in named.items()}
        drafters._kept = OrderedDict()
        return drafters

    def choices(self, name: str | None, batch: int, heads: str | None = None) -> dict[str, Sequence[int]]:
        """Who may draft where nodes are left open, with the sizes that are tried; nobody = plain decoding.

        Args:
            name: Who was asked for; None = whoever is there.
            batch: Sequences that share a pass.
            heads: Name of the heads; None = the model's own.
        """
        if self.parts.base.decoding == "plain":
            return {}
        if name is None:
            return self._everyone(batch, heads)
        return {name: (GUESSES,) if self._alone_and_free(name, batch) else SIZES[1:]}

    def names(self, heads: str | None = None) -> list[str]:
        """Drafters that requests may name, several of them joined by "+"."""
        parts, base = self._parts(heads), self.parts.base
        there = {
            "hybrid": parts.heads is not None,
            "heads": parts.heads is not None,
            "prompt-lookup": True,
            "ngram": True,
            "draft-model": parts.draft_model is not None,
            "early-exit": base.num_layers > 1,
            "mtp": base.mtp is not None,
            "heads-sampled": parts.heads is not None,
        }
        return [name for name, usable in there.items() if usable and base.decoding != "plain"]

    def _everyone(self, batch: int, heads: str | None) -> dict[str, Sequence[int]]:
        found: dict[str, Sequence[int]] = {}
        if self._parts(heads).heads is not None:
            found["hybrid"] = SIZES[1:]
        if self.parts.draft_model is not None:
            found["draft-model+prompt-lookup"] = SIZES[1:]
        if self.parts.base.mtp is not None:
            found["mtp+prompt-lookup"] = SIZES[1:]
        if self._alone_and_free("prompt-lookup", batch):
            found["prompt-lookup"] = (GUESSES,)
        return found

    def check(self, speculation: Speculation, rule: BuiltRule) -> None:
        """Refuse what this model cannot draft.

        Raises:
            ValueError: A drafter whose parts (heads, a draft model, an MTP layer) are not there, or another tree.
        """
        name, nodes, tree = speculation.drafter, speculation.nodes, speculation.tree
        if speculation.heads is not None and speculation.heads not in self.named:
            known = ", ".join(sorted(self.named)) or "none"
            raise ValueError(f"heads ({speculation.heads!r}) are not loaded; choose one of: {known}")
        heads = self._parts(speculation.heads).heads
        if name is not None and not isinstance(name, str):
            return
        takes_tree, names = name in (None, "heads", "heads-sampled"), sources(name) if name else ()
        if tree is not None and (heads is None or nodes is not None or not takes_tree):
            raise ValueError(
                "tree needs heads and takes the place of nodes and drafter; give one of them, on a model with heads"
            )
        if heads is None and not {"heads", "heads-sampled"}.isdisjoint(names):
            raise ValueError(f"drafter ({name!r}) needs heads and there are none; load heads, or choose prompt-lookup")
        if self.parts.draft_model is None and "draft-model" in names:
            raise ValueError(
                f"drafter ({name!r}) needs a draft model and there is none; load one (draft_model=, --draft-model), or"
                " choose prompt-lookup"
            )
        if "early-exit" in names:
            self.parts.build("early-exit", 2, None, NO_NOISE, False)
            self.parts.base.shallow(1)
        if self.parts.base.mtp is None and "mtp" in names:
            raise ValueError(
                f"drafter ({name!r}) needs the base's multi-token-prediction layer and it was not loaded; load it"
                " (mtp=True, --mtp), or choose prompt-lookup"
            )
        if nodes is not None or tree is not None:
            self._given(speculation, rule)

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
        choices = self.choices(name, batch, speculation.heads)
        if name is None:  # the text for a seed must not depend on who is fastest
            choices = {one: sizes for one, sizes in choices.items() if not _drawn(one, rule)}
        if not choices:
            return self._plain

        def build(arm: Arm) -> Drafter:
            return self._plain if arm == PLAIN else self._sized(speculation.heads, *arm, None, rule)

        first, sizes = next(iter(choices.items()))
        if _drawn(first, rule):
            return build(Arm(first, DRAWN))
        if name is not None and len(sizes) == 1:
            return build(Arm(name, *sizes))
        if self.parts.host_decides:
            return self._auto.at_each_step(choices, batch, rule, build, speculation.heads)
        return self._auto.for_completion(choices, batch, rule, build, speculation.heads)

    def observe(
        self, drafter: Drafter, speculation: Speculation, rule: BuiltRule, batch: int, prompt: list[int], output: Output
    ) -> None:
        """Learn from a completion that is over."""
        self._auto.observe(drafter, rule, batch, output)
        name = speculation.drafter
        if isinstance(name, str) and "ngram" in sources(name):
            self.parts.ngrams.learn([*prompt[-max(ORDERS) :], *output.tokens])

    def explain(self, name: str | None) -> str:
        """What drafts for one prompt where nodes are left open and why, in one line."""
        rule = build_rule(SamplingParams())
        self.check(Speculation(drafter=name), rule)
        choices = self.choices(name, 1)
        if not choices:
            return "auto: plain decoding"
        first, sizes = next(iter(choices.items()))
        if _drawn(first, rule):
            return f"auto: {DRAWN} nodes for {first}, so that a seed gives the same text again"
        if name is not None and len(sizes) == 1:
            return f"auto: at most {sizes[0]} nodes for {name}, fewer where guesses are unlikely"
        self.choose(Speculation(drafter=name), 1, rule)
        return self._auto.reason

    def _parts(self, heads: str | None) -> Parts:
        return self.parts if heads is None else self.named[heads]

    def _alone_and_free(self, name: str, batch: int) -> bool:
        """Whether drafts cost nothing to make and say themselves how many of their nodes are worth a row."""
        return self.parts.host_decides and batch == 1 and COSTLY.isdisjoint(sources(name))

    def _given(self, speculation: Speculation, rule: BuiltRule) -> Drafter:
        """The drafter of a request that says how much is drafted."""
        name, nodes, tree = speculation.drafter, speculation.nodes, speculation.tree
        name = name or ("heads" if tree is not None else next(iter(self._everyone(1, speculation.heads)), None))
        if nodes == 1 or name is None:
            return self._plain
        return self._sized(speculation.heads, name, nodes or 2, tree, rule)

    def _sized(self, heads: str | None, name: str, nodes: int, tree: Tree | None, rule: BuiltRule) -> Drafter:
        drawn = _drawn(name, rule)
        noise = rule.warper if drawn else NO_NOISE if COSTLY.isdisjoint(sources(name)) else rule.noise
        key = (heads, name, nodes, tree, noise, drawn)
        if key not in self._kept:
            self._kept[key] = self._parts(heads).build(*key[1:])
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT_DRAFTERS:
            self._kept.popitem(last=False)
        return self._kept[key]


def _drawn(name: str, rule: BuiltRule) -> bool:
    """Whether drafts are drawn, and the text depends on them."""
    models = not MODELS.isdisjoint(sources(name))
    return name == "heads-sampled" or (models and rule.name == "speculative")
