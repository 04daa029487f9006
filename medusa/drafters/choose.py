"""The drafter of a request, from its name, and its tree size where that is left open."""

import logging
from collections import OrderedDict
from collections.abc import Sequence

from medusa.acceptance import BuiltRule, build_rule
from medusa.acceptance.logits import NO_NOISE, Warper
from medusa.base.model import BaseModel
from medusa.budget.auto import Auto
from medusa.budget.policy import PLAIN, SIZES, Arm
from medusa.drafters.base import Drafter, PlainDrafter
from medusa.drafters.confidence import Confidence
from medusa.drafters.early_exit import EarlyExitDrafter, ExitLayer
from medusa.drafters.heads import HeadsDrafter
from medusa.drafters.hybrid import HybridDrafter
from medusa.drafters.model import WIDTH, ModelDrafter
from medusa.drafters.mtp import MtpWriter
from medusa.drafters.ngram import KEPT, ORDERS, NgramCache, NgramDrafter
from medusa.drafters.prompt_lookup import BELIEFS, LOOKUP_GUESSES, PLACES, PromptLookupDrafter
from medusa.drafters.sampled import SampledHeadsDrafter
from medusa.drafters.writers import SmallModel
from medusa.engine.graph import StepGraphs
from medusa.engine.output import Output
from medusa.engine.steps import EagerSteps, StartSteps
from medusa.heads import DraftHeads
from medusa.sampling import SamplingParams, Speculation, sources
from medusa.tree import Tree

logger = logging.getLogger(__name__)

DRAWN = 8
"""Nodes of drawn drafts where none are given: text depends on them, and a seed must give the same text again."""
GUESSES = 6
"""Nodes for a single sequence on a CPU where all drafters cost nothing: without a guess a step is a plain one."""
KEPT_DRAFTERS = 64
"""Drafters of different names, sizes, trees and draws; the one that was not used for longest goes."""
COSTLY = frozenset({"heads", "heads-sampled", "draft-model", "early-exit", "mtp"})
"""Drafters whose drafts cost time, and which heed the noise of draws."""


class Drafters:
    """The drafters of one base with its heads.

    Args:
        base: Prepared for decoding.
        heads: Its heads, frozen; None = there are none.
        graphs: Runs the steps as CUDA graphs, and shapes are fixed; None = eagerly.
        draft_model: A smaller model of the same tokens, prepared for decoding; None = there is none.

    Attributes:
        start: Runs the steps.
        draft_model: As given.
        ngrams: What followed short contexts in the completions of requests that name "ngram".
    """

    def __init__(
        self,
        base: BaseModel,
        heads: DraftHeads | None,
        graphs: StepGraphs | None,
        draft_model: BaseModel | None = None,
    ) -> None:
        self._base, self._heads, self._graphs, self.draft_model = base, heads, graphs, draft_model
        self.start: StartSteps = EagerSteps if graphs is None else graphs.steps
        self.ngrams = NgramCache()
        self._plain, self._looked_up, self._exit = PlainDrafter(), Confidence(BELIEFS), ExitLayer(base)
        self._auto = Auto(base.device.type)
        self._kept: OrderedDict[tuple[str, int, Tree | None, Warper, bool], Drafter] = OrderedDict()

    def choices(self, name: str | None, batch: int) -> dict[str, Sequence[int]]:
        """Who may draft where nodes are left open, with the sizes that are tried; nobody = plain decoding.

        Args:
            name: Who was asked for; None = whoever is there.
            batch: Sequences that share a pass.
        """
        if self._base.decoding == "plain":
            return {}
        if name is None:
            return self._everyone(batch)
        return {name: (GUESSES,) if self._alone_and_free(name, batch) else SIZES[1:]}

    def _everyone(self, batch: int) -> dict[str, Sequence[int]]:
        found: dict[str, Sequence[int]] = {}
        if self._heads is not None:
            found["hybrid"] = SIZES[1:]
        if self.draft_model is not None:
            found["draft-model+prompt-lookup"] = SIZES[1:]
        if self._base.mtp is not None:
            found["mtp+prompt-lookup"] = SIZES[1:]
        if self._alone_and_free("prompt-lookup", batch):
            found["prompt-lookup"] = (GUESSES,)
        return found

    def check(self, speculation: Speculation, rule: BuiltRule) -> None:
        """Refuse what this model cannot draft.

        Raises:
            ValueError: A drafter that needs heads or a draft model where there are none, or a tree that does not fit.
        """
        name, nodes, tree = speculation.drafter, speculation.nodes, speculation.tree
        if name is not None and not isinstance(name, str):
            return
        takes_tree, names = name in (None, "heads", "heads-sampled"), sources(name) if name else ()
        if tree is not None and (self._heads is None or nodes is not None or not takes_tree):
            raise ValueError(
                "tree needs heads and takes the place of nodes and drafter; give one of them, on a model with heads"
            )
        if self._heads is None and not {"heads", "heads-sampled"}.isdisjoint(names):
            raise ValueError(f"drafter ({name!r}) needs heads and there are none; load heads, or choose prompt-lookup")
        if self.draft_model is None and "draft-model" in names:
            raise ValueError(
                f"drafter ({name!r}) needs a draft model and there is none; load one (draft_model=, --draft-model), or"
                " choose prompt-lookup"
            )
        if self._base.mtp is None and "mtp" in names:
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
        choices = self.choices(name, batch)
        if not choices:
            return self._plain

        def build(arm: Arm) -> Drafter:
            return self._plain if arm == PLAIN else self._sized(*arm, None, rule)

        first, sizes = next(iter(choices.items()))
        if _drawn(first, rule):
            return build(Arm(first, DRAWN))
        if name is not None and len(sizes) == 1:
            return build(Arm(name, *sizes))
        if self._on_host:
            return self._auto.at_each_step(choices, batch, rule, build)
        return self._auto.for_completion(choices, batch, rule, build)

    def observe(
        self, drafter: Drafter, speculation: Speculation, rule: BuiltRule, batch: int, prompt: list[int], output: Output
    ) -> None:
        """Learn from a completion that is over."""
        self._auto.observe(drafter, rule, batch, output)
        name = speculation.drafter
        if isinstance(name, str) and "ngram" in sources(name):
            self.ngrams.learn([*prompt[-max(ORDERS) :], *output.tokens])

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

    def _alone_and_free(self, name: str, batch: int) -> bool:
        """Whether drafts cost nothing to make and say themselves how many of their nodes are worth a row."""
        return self._on_host and batch == 1 and COSTLY.isdisjoint(sources(name))

    @property
    def _on_host(self) -> bool:
        """Whether shapes cost nothing, and asking for a number does not stop a device."""
        return self._graphs is None and self._base.device.type == "cpu"

    def _given(self, speculation: Speculation, rule: BuiltRule) -> Drafter:
        """The drafter of a request that says how much is drafted."""
        name, nodes, tree = speculation.drafter, speculation.nodes, speculation.tree
        name = name or ("heads" if tree is not None else next(iter(self._everyone(1)), None))
        if nodes == 1 or name is None:
            return self._plain
        return self._sized(name, nodes or 2, tree, rule)

    def _sized(self, name: str, nodes: int, tree: Tree | None, rule: BuiltRule) -> Drafter:
        drawn = _drawn(name, rule)
        noise = rule.warper if drawn else NO_NOISE if COSTLY.isdisjoint(sources(name)) else rule.noise
        key = (name, nodes, tree, noise, drawn)
        if key not in self._kept:
            self._kept[key] = self._new(*key)
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT_DRAFTERS:
            self._kept.popitem(last=False)
        return self._kept[key]

    def _new(self, name: str, nodes: int, tree: Tree | None, noise: Warper, drawn: bool) -> Drafter:
        if self._base.decoding == "chain" and tree is not None and tree.depth + 1 < tree.nodes:
            raise ValueError(
                f"tree ({tree.nodes} nodes, depth {tree.depth}) branches and the base ({self._base.name}) verifies"
                f" chains only; give Tree.chain({tree.depth})"
            )
        if self._base.decoding == "plain":
            plain = "drafter (%s, %d nodes) is left out: base (%s) decodes plainly"
            logger.warning(plain, name, nodes, self._base.name)
            return PlainDrafter()
        host_decides, chain, names = self._on_host, self._base.decoding == "chain", sources(name)
        if chain and self._heads is not None:
            tree = tree or Tree.chain(min(nodes - 1, self._heads.config.num_heads))
        if name == "heads-sampled":
            assert self._heads is not None, "checked by the caller"
            return SampledHeadsDrafter(self._heads, self._base, nodes, noise.temperature, tree)
        if not host_decides and nodes == 2 and "heads" in names:
            names = ("heads",)
        # On a CPU the best nodes of all stay; where shapes are fixed, each has its part of them.
        alone, width = len(names) == 1, 1 if chain else WIDTH
        costly = [source for source in names if source in COSTLY]
        share = nodes if alone or host_decides else 1 + min(nodes // 2, LOOKUP_GUESSES) // max(1, len(names) - 1)
        cheap: list[Drafter] = []
        if "prompt-lookup" in names:
            most = share if alone else min(share, LOOKUP_GUESSES + 1)
            cheap.append(PromptLookupDrafter(most, 2, host_decides, self._looked_up, 1 if chain else PLACES))
        if "ngram" in names:
            cheap.append(NgramDrafter(self.ngrams, share, 1 if chain else KEPT))
        kept = nodes if alone or host_decides else max(2, (nodes - (share - 1) * len(cheap)) // max(1, len(costly)))
        dear: list[Drafter] = []
        if "heads" in names:
            assert self._heads is not None, "checked by the caller"
            temperature = noise.temperature
            dear.append(HeadsDrafter(self._heads, self._base, kept, tree, host_decides, temperature=temperature))
        if "draft-model" in names:
            small, base = self.draft_model, self._base
            assert small is not None, "checked by the caller"
            cost, writer = small.weight_bytes / base.weight_bytes, SmallModel(small)
            dear.append(ModelDrafter(writer, base.vocab_size, kept, cost, host_decides, noise, drawn, width))
        if "mtp" in names:
            cost, base = 1 / self._base.num_layers, self._base
            dear.append(ModelDrafter(MtpWriter(base), base.vocab_size, kept, cost, host_decides, noise, drawn, width))
        if "early-exit" in names:
            dear.append(EarlyExitDrafter(self._base, self._exit, kept, host_decides, noise, drawn))
        return [*cheap, *dear][0] if alone else HybridDrafter(cheap, dear, nodes, chain)


def _drawn(name: str, rule: BuiltRule) -> bool:
    """Whether drafts are drawn, and the text depends on them."""
    models = not {"draft-model", "early-exit", "mtp"}.isdisjoint(sources(name))
    return name == "heads-sampled" or (models and rule.name == "speculative")
