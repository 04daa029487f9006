"""Options of a request: how tokens are chosen (`SamplingParams`) and how they are drafted (`Speculation`).

Both are checked when they are made, and nowhere else.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypedDict, TypeGuard

if TYPE_CHECKING:  # command lines import this module without torch
    from medusa.tree import Tree

RULES = ("greedy", "sampling", "speculative", "typical")
"""Names of acceptance rules."""
DRAFTERS = ("hybrid", "heads", "prompt-lookup", "ngram", "draft-model", "early-exit", "mtp", "heads-sampled")
"""Names of drafters; "hybrid" is "heads+prompt-lookup", "hybrid+ngram" has a third."""
SOURCES = DRAFTERS[1:-1]
"""Drafters that can share a tree, joined by "+"."""
EPSILON, DELTA = 0.09, 0.3
"""Thresholds of typical acceptance."""
MAX_BIAS = 100.0
"""Largest logit bias either way; enough to force or forbid a token (the range of OpenAI's API)."""
MAX_PENALTY = 2.0
"""Largest presence and frequency penalty either way (the range of OpenAI's API)."""
MAX_LOGPROBS = 20
"""Most alternatives per token (the range of OpenAI's API)."""
LEAST = 2.0**-126
"""Least temperature and top_p above 0; a float32 holds nothing smaller exactly."""
LARGEST = 2**62
"""Limit of numbers that have no other limit; tensors hold no larger ones."""
NO_LIMIT = ("max_steps", "nodes", "logprobs", "prompt_logprobs")
"""Whole numbers that may be None."""


class Options(TypedDict, total=False):
    """Keyword arguments of ``MedusaModel.generate``, which describes them."""

    max_new_tokens: int
    max_steps: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | Sequence[int | None] | None
    stop: str | Sequence[str]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    acceptance: str | None
    epsilon: float
    delta: float
    nodes: int | None
    tree: "Tree | None"
    drafter: Any
    heads: str | None
    prefix: Any
    sampling: Any
    speculation: Any


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one completion are chosen, and when it ends.

    Attributes:
        max_new_tokens: Limit on new tokens, at least 1, or with ``prompt_logprobs`` 0; the base's context limits them
            too.
        max_steps: Limit on passes that give tokens (``Output.steps``), at least 1; the prompt's last pass is the first.
            None = no limit.
        temperature: 0 = greedy.
        top_k: Keep the k most likely tokens; 0 = all.
        top_p: Keep the smallest set of tokens with at least this probability, above 0 to 1; 1 = all.
        min_p: Keep tokens with at least this fraction of the best one's probability, 0 to 1; 0 = all.
        repetition_penalty: Above 1, tokens of prompt and completion become less likely; below 1, more likely; 1 = off.
            Like the next three options it also applies at temperature 0.
        presence_penalty: Subtracted from the logit of every token that is in the completion, -2 to 2.
        frequency_penalty: Subtracted from a token's logit once for each time it is in the completion, -2 to 2.
        logit_bias: Token id to a number from -100 to 100 that is added to its logit.
        seed: Fixes sampled text for every drafter, tree and batch: 0 to 2**63 - 1. Equal prompts with equal seeds get
            equal texts. None = a new one each time, from torch's global generator; ``Output.seed`` holds it.
        stop: Strings that end the completion; not part of its text.
        ignore_eos: Go on after an end-of-sequence token.
        skip_special_tokens: Leave special tokens out of the text; the one that ends the completion never is in it.
        logprobs: Report the log-probability of every new token and of this number of most likely tokens at each
            position, 0 to 20; None = no report. They are those of the base's own distribution, before temperature,
            filters, penalties and bias.
        prompt_logprobs: The same for every token of the prompt except the first, which has no context. The whole
            prompt is computed for it, even if a part is cached.

    Raises:
        ValueError: A value out of its range.
    """

    max_new_tokens: int = 512
    max_steps: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_steps", "top_k", "logprobs", "prompt_logprobs"):
            check_whole(name, getattr(self, name))
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} ({getattr(self, name)!r}) must be True or False; correct it")
        if self.seed is not None and (not is_whole(self.seed) or not 0 <= self.seed < 2**63):
            raise ValueError(f"seed ({self.seed!r}) must be a number from 0 to 2**63 - 1; correct it")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(stop, list | tuple) or not all(isinstance(text, str) for text in stop):
            raise ValueError(f"stop ({self.stop!r}) must be a string, or a list of strings; correct it")
        if "" in stop:
            raise ValueError("stop ('') is empty and would end every completion at once; leave it out")
        object.__setattr__(self, "stop", tuple(stop))
        if not isinstance(self.logit_bias, Mapping | None):
            raise ValueError(f"logit_bias ({self.logit_bias!r}) must be a mapping of token ids to numbers; correct it")
        if self.max_new_tokens < (least := int(self.prompt_logprobs is None)):
            raise ValueError(f"max_new_tokens ({self.max_new_tokens}) must be at least {least}; raise it")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps ({self.max_steps}) must be at least 1; leave it out for no limit")
        ranges = {
            "temperature": (0.0, math.inf),
            "top_k": (0, math.inf),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
            "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
        }
        for name, (low, high) in ranges.items():
            check_range(name, getattr(self, name), low, high)
        for token, bias in self.biases:
            check_range(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_range(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.top_p == 0:
            raise ValueError(f"top_p ({self.top_p}) must be above 0, it leaves no token; give 1 to switch it off")
        for name in ("temperature", "top_p"):
            if 0 < getattr(self, name) < LEAST:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least {LEAST:.3g}; raise it")
        if not is_number(self.repetition_penalty) or not 0 < self.repetition_penalty <= LARGEST:
            raise ValueError(
                f"repetition_penalty ({self.repetition_penalty!r}) must be a number above 0, up to {LARGEST}; give 1 to"
                " switch it off"
            )

    def seeded(self) -> "SamplingParams":
        """The same parameters with a seed, if tokens are sampled."""
        if self.seed is not None or self.temperature == 0:
            return self
        import torch

        return replace(self, seed=int(torch.randint(2**31, ())))

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """``logit_bias`` as pairs in a fixed order."""
        return tuple(sorted((self.logit_bias or {}).items(), key=lambda pair: str(pair[0])))


@dataclass(frozen=True)
class Speculation:
    """How the tokens of one completion are drafted, and which drafts are accepted.

    Greedy and sampled text does not depend on it. Text under speculative and typical acceptance does.

    Attributes:
        drafter: "heads"; "prompt-lookup", which repeats what followed the last words earlier in the text and needs no
            heads; "ngram", which repeats what followed them in earlier completions that named it
            (``MedusaModel.ngrams``, which a corpus can fill too); "draft-model", a smaller model that was loaded with
            the base; "early-exit", the base's own first layers; "mtp", the multi-token-prediction layer that some bases
            have; several of these in one tree, joined by "+"; "hybrid" = "heads+prompt-lookup"; "heads-sampled", which
            draws from the heads at the temperature, for speculative acceptance; or a ``medusa.drafters.Drafter`` of
            your own. None = the fastest that the model has, measured while it runs: hybrid,
            "draft-model+prompt-lookup", "mtp+prompt-lookup", plain decoding, and for a single sequence on a CPU prompt
            lookup alone; in a server that remembers completions each with "+ngram". If the base verifies chains only
            (``BaseModel.decoding``), every draft becomes a chain.
        acceptance: None = lossless: "greedy" at temperature 0, "sampling" above. "speculative" (p/q) is lossless in
            distribution, but the text for a seed depends on the draft; made for drawn drafts. "typical" is lossy.
        epsilon: Threshold of typical acceptance, 0 to 1.
        delta: Entropy factor of typical acceptance, at least 0.
        nodes: Tree budget N with the root; 1 = plain decoding. None = the size with the most tokens per second,
            measured while it runs; plain decoding is one of the choices, and drawn drafts ("heads-sampled") have 8
            nodes. Under speculative and typical acceptance with other drafters, text repeats for a seed only if
            ``nodes`` is a number.
        tree: A static tree instead of a dynamic one of ``nodes`` nodes.
        heads: Name of the heads that draft, if the model has several (``MedusaModel.with_heads``); None = its own.

    Raises:
        ValueError: A value out of its range.
    """

    drafter: Any = None
    acceptance: str | None = None
    epsilon: float = EPSILON
    delta: float = DELTA
    nodes: int | None = None
    tree: "Tree | None" = None
    heads: str | None = None

    def __post_init__(self) -> None:
        check_whole("nodes", self.nodes)
        if self.acceptance is not None and self.acceptance not in RULES:
            raise ValueError(f"acceptance ({self.acceptance!r}) is not known; choose one of: {', '.join(RULES)}")
        check_range("epsilon", self.epsilon, 0.0, 1.0)
        check_range("delta", self.delta, 0.0, math.inf)
        if isinstance(self.drafter, str):
            sources(self.drafter)
        if not isinstance(self.heads, str | None):
            raise ValueError(f"heads ({self.heads!r}) is no name; give one of MedusaModel.with_heads")
        if self.tree is not None and not hasattr(self.tree, "paths"):
            raise ValueError(f"tree ({self.tree!r}) is not a Tree; make one with medusa.tree.Tree or load_tree")
        if self.tree is not None and self.drafter is not None and not isinstance(self.drafter, str):
            raise ValueError("tree replaces nodes and drafter; give only one of them, on a model with heads")
        if self.nodes is not None and self.nodes < 1:
            raise ValueError(f"nodes ({self.nodes}) must be at least 1 (1 = plain decoding); give a larger tree budget")


SAMPLING, SPECULATION = (frozenset(field.name for field in fields(kind)) for kind in (SamplingParams, Speculation))
"""Names of options."""


def from_options(options: Mapping[str, Any], prompts: int) -> tuple[list[SamplingParams], list[Speculation]]:
    """Convert keyword arguments to the parameters of each prompt.

    Args:
        options: Fields of both classes, ``seed`` as one number or one per prompt; or ``sampling`` and ``speculation``
            as objects, one or one per prompt.
        prompts: Number of prompts.

    Raises:
        TypeError: There is no such option.
        ValueError: A value out of its range, or not as many values as prompts.
    """
    if unknown := options.keys() - SAMPLING - SPECULATION - {"sampling", "speculation"}:
        name = min(unknown)
        meant = get_close_matches(name, sorted(SAMPLING | SPECULATION), n=1, cutoff=0.7)
        hint = f"did you mean {meant[0]}? " if meant else ""
        raise TypeError(f"option {name!r} is not known; {hint}see SamplingParams and Speculation")
    drafting = {name: value for name, value in options.items() if name in SPECULATION}
    chosen = {name: value for name, value in options.items() if name in SAMPLING}
    for name, fields_of in (("sampling", chosen), ("speculation", drafting)):
        if options.get(name) is not None and fields_of:
            raise ValueError(f"{name} is given together with its own fields ({min(fields_of)}); give one of them")
    seeds = _per_prompt("seed", chosen.pop("seed", None), prompts)
    sampling, speculation = options.get("sampling"), options.get("speculation")
    if sampling is None:
        sampling = [SamplingParams(**chosen, seed=seed) for seed in seeds]
    if speculation is None:
        speculation = Speculation(**drafting)
    return (
        _per_prompt("sampling", sampling, prompts, SamplingParams),
        _per_prompt("speculation", speculation, prompts, Speculation),
    )


def _per_prompt(name: str, value: Any, prompts: int, kind: type = object) -> list[Any]:
    """One value of a kind per prompt, from a single value or a list."""
    for one in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(one, kind):
            raise ValueError(f"{name} ({one!r}) must be of type {kind.__name__}; correct it")
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [value] * prompts
    if len(value) != prompts:
        raise ValueError(f"{name} ({value}) must be one, or one per prompt ({prompts}); correct it")
    return list(value)


def sources(drafter: str) -> tuple[str, ...]:
    """The drafters of this name: one or several of ``SOURCES``, or "heads-sampled".

    Raises:
        ValueError: The name is not known.
    """
    if drafter == "heads-sampled":
        return (drafter,)
    parts = (("heads", "prompt-lookup") if name == "hybrid" else (name,) for name in drafter.split("+"))
    names = tuple(name for part in parts for name in part)
    if not set(names) <= set(SOURCES) or len(set(names)) < len(names):
        raise ValueError(
            f"drafter ({drafter!r}) is not known; choose one of: {', '.join(DRAFTERS)}, or several of"
            f" {', '.join(SOURCES)} joined by +"
        )
    return names


def check_whole(name: str, value: object) -> None:
    """Check that a value is a whole number; None is allowed for limits that may be left out."""
    if not is_whole(value) and (value is not None or name not in NO_LIMIT):
        raise ValueError(f"{name} ({value!r}) must be a whole number; correct it")


def check_range(name: str, value: object, low: float, high: float) -> None:
    """Check that a value is a finite number in its range."""
    if not is_number(value) or not low <= value <= high or value > LARGEST:
        kind = "" if is_number(value) else "an int or a float "
        raise ValueError(f"{name} ({value!r}) must be {kind}between {low:g} and {min(high, LARGEST):g}; correct it")


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is a number and not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
