"""``MedusaModel``: a base with its heads; load, save, generate, stream."""

import contextlib
import dataclasses
import logging
import tempfile
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import torch
from jinja2 import TemplateError
from torch import Tensor

from medusa.acceptance import DELTA, EPSILON, BuiltRule, build_rule
from medusa.base.model import BaseModel, resolve_base
from medusa.budget.auto import AutoNodes
from medusa.budget.calibration import Calibration
from medusa.cache import SlotCache
from medusa.drafters import (
    LOOKUP_GUESSES,
    Drafter,
    HeadsDrafter,
    HybridDrafter,
    PlainDrafter,
    PromptLookupDrafter,
    SampledHeadsDrafter,
)
from medusa.engine.generate import StartSteps, cache_rows, decode, new_answers
from medusa.engine.graph import StepGraphs
from medusa.engine.output import Answer, Output, Piece
from medusa.engine.prefix import Prefix
from medusa.engine.step import EagerSteps
from medusa.formats import load_calibration, load_heads, load_provenance, save_heads
from medusa.heads import DraftHeads, HeadsConfig
from medusa.io.card import write_card
from medusa.io.hub import fetch_heads, push
from medusa.loading import exactness
from medusa.loading.self_test import choose_decoding, compile_base
from medusa.tree import Tree

logger = logging.getLogger(__name__)

Prompt = str | list[int] | Tensor
Prompts = list[str] | list[list[int]] | Tensor
DRAFTERS = ("hybrid", "heads", "prompt-lookup", "heads-sampled")
NO_LIMIT = ("max_steps", "nodes")
"""Whole numbers that may be None."""
SURE_MATCH = 4
"""Tokens that must agree for a hybrid draft on a CPU to leave out the heads."""
KEPT_DRAFTERS = 64
"""Drafters of different names, sizes, trees and temperatures; the one that was not used for longest goes."""


class Options(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``stream``; ``MedusaModel.start`` documents them and holds the defaults."""

    max_new_tokens: int
    max_steps: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | Sequence[int]
    acceptance: str | None
    epsilon: float
    delta: float
    nodes: int | None
    tree: Tree | None
    drafter: str | Drafter | None
    stop: str | Sequence[str]
    prefix: Prefix | None


class Stream:
    """An answer as it grows: iterate over its pieces; ``output`` holds what there is at any time."""

    def __init__(self, steps: Generator[list[list[Piece]]], output: Output) -> None:
        self._steps = steps
        self.output = output

    def __iter__(self) -> Iterator[Piece]:
        """Pieces of text; stopping early keeps ``output`` and frees the cache."""
        with contextlib.closing(self._steps) as steps:
            for (pieces,) in steps:
                yield from pieces


class MedusaModel:
    """A frozen base and the heads that draft for it.

    Attributes:
        base: The base; with its feature layers where heads read some.
        heads: The heads, or None: then every step is a plain decode step unless a drafter is given. They are taken
            over: moved to the base's device, cast to its dtype and frozen in place; hand over a copy of heads that go
            on training.
        graphs: Runs the steps as CUDA graphs, for one thread at a time; None = eagerly.
        calibration: How often the heads are right, where that is known; ``medusa.budget.calibrate`` finds it out.
        provenance: Where the heads come from, where that is known; saved with them.
    """

    def __init__(
        self,
        base: BaseModel,
        heads: DraftHeads | None = None,
        graph: bool | None = None,
        calibration: Calibration | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        if heads is not None:
            heads.config.check_fit(base.hidden_size, base.vocab_size, base.name)
            heads.config = dataclasses.replace(heads.config, vocab_size=base.vocab_size)  # not all formats tell it
            base = base.tapped(heads.config.feature_layers)
            heads = heads.to(device=base.device, dtype=base.dtype).eval()
            heads.freeze(base)
        if graph and base.device.type != "cuda":
            raise ValueError(f"graph (True) needs a CUDA device and the base is on {base.device}; leave graph out")
        self.base, self.heads, self.calibration, self.provenance = base, heads, calibration, provenance
        self.graphs = StepGraphs(base) if base.device.type == "cuda" and graph is not False else None
        self._plain = PlainDrafter()
        self._auto = AutoNodes(base, self.heads, calibration)
        self._drafters: OrderedDict[tuple[str, int, Tree | None, float], Drafter] = OrderedDict()

    @classmethod
    def from_pretrained(
        cls,
        heads: str | Path | None,
        base: str | Path | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        attention: str = "auto",
        compiled: bool = False,
        int8: bool = False,
        load_options: Mapping[str, Any] | None = None,
        graph: bool | None = None,
        revision: str | None = None,
    ) -> "MedusaModel":
        """Load heads and the base that they were trained on.

        Heads of joint training (Medusa-2) bring an adapter that becomes part of the base, whichever is named: its
        answers are no longer those of the original, and lossless decoding is exact towards the changed base.

        Args:
            heads: Directory of the heads, in any format of ``medusa.formats``, or their Hub id ("user/heads"); None
                loads a base alone.
            base: Directory or Hub id of the base; None = what the heads' config names.
            dtype: None = the base checkpoint's dtype.
            device: None = the GPU where there is one.
            attention: "exact", "reference", "flash" or "triton"; "auto" = the first of triton and flash that works on
                a GPU, exact on a CPU with a C++ compiler, otherwise the reference.
            compiled: Compile the base's pass (``torch.compile``; needs a C++ compiler): up to half a minute at the
                first load, seconds later, and a small model decodes about 1.6 times faster on a CPU. Same weights, but
                sums are rounded in other places than in a pass that is not compiled.
            int8: LOSSY, for CPUs: round the base's large layers to 8 bits. A base of a billion weights decodes about
                1.2 times faster, but what it says is no longer what the base says.
            load_options: More arguments for loading the base, see ``BaseModel.load``: a quantised base, or one that is
                spread over several devices.
            graph: Run each decode step as one CUDA graph: same tokens, without Python between kernels. None = on a
                GPU, and eagerly where a step cannot be recorded. Memory is kept from call to call, see ``release``.
            revision: Branch, tag or commit of heads on the Hub; None = its main branch.

        Raises:
            FileNotFoundError: A directory is missing.
            OSError: The Hub does not give the heads, or cannot be reached.
            ValueError: Damaged files, heads for another base, no base named, a base that cannot be decoded, or
                an attention backend that does not run here.

        Example:
            >>> model = MedusaModel.from_pretrained("runs/demo/heads")
            >>> print(model.generate("def read_lines(path):").text)
        """
        heads = fetch_heads(heads, revision) if heads is not None else None
        loaded = load_heads(heads, dtype=None) if heads is not None else None
        config = loaded.config if loaded is not None else None
        if base is None and (config is None or not config.base):
            raise ValueError("the heads' config names no base and none is given; give one: a directory or a Hub id")
        name = resolve_base(str(base)) if base is not None else resolve_base(config.base, heads)  # type: ignore[union-attr]
        base_model = BaseModel.load(
            name, dtype, device, pack=True, int8=int8, attention=attention, load_options=load_options,
            adapter=config.base_adapter if config is not None else "",
        )  # fmt: skip
        choose_decoding(base_model)
        if config is not None:
            _warn_of_other_weights(config, base_model)
            base_model = base_model.tapped(config.feature_layers)
        if compiled:
            compile_base(base_model)
        exactness.find_out(base_model)
        if heads is None or loaded is None:
            return cls(base_model, graph=graph)
        loaded.config = dataclasses.replace(loaded.config, base=base_model.name)
        return cls(base_model, loaded, graph, load_calibration(heads, loaded.config), load_provenance(heads))

    def save_pretrained(self, directory: str | Path, provenance: Mapping[str, Any] | None = None) -> Path:
        """Write the heads (never the base, but an adapter of it) in the native format; returns the directory.

        They are written in the dtype that they compute in, which is the base's.

        Args:
            directory: Created if missing.
            provenance: Where the heads come from; None = what was loaded with them.

        Raises:
            ValueError: There are no heads.
        """
        if self.heads is None:
            raise ValueError("this model has no heads to save; train or load heads first")
        origin = self.provenance if provenance is None else provenance
        return save_heads(self.heads, directory, origin, self.calibration)

    def push_to_hub(
        self,
        repo: str,
        private: bool | None = None,
        revision: str | None = None,
        message: str | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> str:
        """Put the heads on the Hub, in the native format with a model card, in one commit; returns the page's address.

        They go in the dtype that they compute in; ``medusa-export`` pushes them as they are stored.

        Args:
            repo: "user/heads"; created where it is missing.
            private: Of a new repository; None = as its owner's settings say, which is public by default.
            revision: Branch to commit to; None = main.
            message: Of the commit.
            provenance: Where the heads come from; None = what was loaded with them. The card tells it too.

        Raises:
            ValueError: There are no heads, or they must be private and the repository is public.
            OSError: The Hub refuses, or cannot be reached.
        """
        with tempfile.TemporaryDirectory() as directory:
            saved = self.save_pretrained(directory, provenance)  # without heads it refuses
            assert self.heads is not None, "saved"
            write_card(saved, self.heads.config, "native", repo, load_provenance(saved))
            return push(saved, repo, private, revision, message)

    @overload
    def generate(self, prompts: str | list[int], **options: Unpack[Options]) -> Output: ...
    @overload
    def generate(self, prompts: list[str] | list[list[int]], **options: Unpack[Options]) -> list[Output]: ...
    @overload
    def generate(self, prompts: Tensor, **options: Unpack[Options]) -> Output | list[Output]: ...
    def generate(self, prompts: Prompt | Prompts, **options: Unpack[Options]) -> Output | list[Output]:
        """Complete one prompt or a batch of them; lossless towards ``base``, as it is after joint training too.

        Args:
            prompts: A string, token ids (a list or a 1-D tensor), or a list (a 2-D tensor) of these.
            **options: See ``start``.

        Returns:
            An ``Output`` for one prompt, a list of them for a batch.
        """
        batch, single = self._encode(prompts)
        answers, steps = self.start(batch, **options)
        for _ in steps:
            pass
        return answers[0].output if single else [answer.output for answer in answers]

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Complete one prompt; the result iterates over pieces of text as they become final."""
        batch, single = self._encode(prompt)
        if not single:
            raise ValueError(f"stream takes one prompt, not {len(batch)}; call generate for a batch")
        (answer,), steps = self.start(batch, incremental=True, **options)
        return Stream(steps, answer.output)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int = 512,
        max_steps: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | Sequence[int] = 0,
        acceptance: str | None = None,
        epsilon: float = EPSILON,
        delta: float = DELTA,
        nodes: int | None = None,
        tree: Tree | None = None,
        drafter: str | Drafter | None = None,
        stop: str | Sequence[str] = (),
        prefix: Prefix | None = None,
        incremental: bool = False,
    ) -> tuple[list[Answer], Generator[list[list[Piece]]]]:
        """Check everything and hand out the answers with the loop that grows them.

        Args:
            prompts: Token ids of every prompt.
            max_new_tokens: Limit on the new tokens of an answer; the base's context limits them too.
            max_steps: Limit on verify passes, None = no limit.
            temperature: 0 = greedy.
            top_k: Keep the k most likely tokens, 0 = all.
            top_p: Keep the smallest set of tokens with at least this probability, 1 = all.
            min_p: Keep tokens with at least this fraction of the best one's probability, 0 = all.
            repetition_penalty: Above 1, tokens of prompt and answer become less likely, below 1 more; 1 = off. It
                holds at temperature 0 too.
            logit_bias: Token id to a number from -100 to 100 that is added to its logit, at temperature 0 too.
            seed: Fixes sampled output, whatever drafts, tree or batch; one number, or one per prompt. Equal prompts
                with equal seeds get equal texts.
            acceptance: None = lossless: "greedy" at temperature 0, "sampling" above. "speculative" (p/q) is lossless in
                distribution, but the text for a seed depends on the draft; made for drawn drafts. "typical" is lossy.
            epsilon: Threshold of typical acceptance.
            delta: Entropy factor of typical acceptance.
            nodes: Tree budget N with the root; 1 = plain decoding. None = what brings most tokens per second here, by
                step costs that the first call of its kind measures (a second or two, or some twenty steps of a slow
                base; later starts read them from ~/.cache/medusa) and by what is accepted; plain decoding is among the
                choices. The text does not depend on it, except under speculative and typical acceptance, where only a
                number makes it repeat for a seed.
            tree: A static tree instead of a dynamic one of ``nodes`` nodes.
            drafter: "heads"; "prompt-lookup", which repeats what followed the last words earlier in the text and needs
                no heads; "hybrid", both in one tree; "heads-sampled", which draws from the heads at the temperature,
                for speculative acceptance; or an object of your own. None = hybrid where there are heads. The text
                does not depend on it, except under speculative and typical acceptance. Where the base verifies chains
                only (``BaseModel.decoding``), every draft is taken as a chain.
            stop: Strings that end an answer; not part of its text.
            prefix: For one prompt: keeps what is computed, so that the next prompt with the same beginning is not
                computed from its first token on. The text does not depend on it.
            incremental: Yield text after every step instead of once at the end.

        Raises:
            ValueError: A value out of its range, an empty or too long prompt, or a tree deeper than the heads.
        """
        _check_whole(max_new_tokens=max_new_tokens, max_steps=max_steps, top_k=top_k, nodes=nodes)
        stop = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if "" in stop:
            raise ValueError("stop ('') is empty and would end every answer at once; leave it out")
        seeds = list(seed) if isinstance(seed, Sequence) else [seed] * len(prompts)
        if len(seeds) != len(prompts) or any(not _is_whole(value) or not 0 <= value < 2**63 for value in seeds):
            raise ValueError(f"seed ({seed}) must be a number from 0 to 2**63 - 1, or one per prompt; correct it")
        self._check_tokens("logit_bias", logit_bias or ())
        rule = build_rule(
            acceptance, self.base.device, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
            repetition_penalty=repetition_penalty, logit_bias=logit_bias, epsilon=epsilon, delta=delta,
        )  # fmt: skip
        answers = new_answers(self.base, prompts, max_new_tokens, stop, incremental)
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps ({max_steps}) must be at least 1; leave it out for no limit")
        if prefix is not None and len(prompts) != 1:
            raise ValueError(f"prefix holds one text and there are {len(prompts)} prompts; give each its own call")
        if drafter is None or isinstance(drafter, str):
            drafter = self._drafter(drafter, nodes, tree, temperature, len(prompts), rule)
        elif tree is not None:
            raise ValueError("tree takes the place of nodes and drafter; give one of them, on a model with heads")
        cache = self._lend_cache(prompts, answers, drafter.nodes, prefix)
        return answers, self._decode(cache, drafter, rule, prompts, answers, max_steps, seeds)

    def explain_nodes(self, drafter: str | None = None) -> str:
        """What ``nodes=None`` means for one prompt and why, in one line; measures step costs that are not known."""
        self._drafter(drafter, None, None, 1.0, batch=1, rule=build_rule(None))
        drafts = self.base.decoding != "plain" and (drafter is not None or self.heads is not None)
        return self._auto.reason if drafts else "nodes auto: 1, plain decoding"

    def release(self) -> None:
        """Free the memory that is kept between calls: idle caches and the graphs over them."""
        if self.graphs is not None:
            self.graphs.clear()

    def _lend_cache(
        self, prompts: Sequence[Sequence[int]], answers: Sequence[Answer], nodes: int, prefix: Prefix | None
    ) -> AbstractContextManager[SlotCache | None]:
        if prefix is not None:
            return prefix.lend(self.base, prompts[0], answers[0])
        if self.graphs is not None:
            return self.graphs.lend(len(prompts), *cache_rows(prompts, answers, nodes))
        return contextlib.nullcontext()

    def _decode(
        self,
        lent: AbstractContextManager[SlotCache | None],
        drafter: Drafter,
        rule: BuiltRule,
        prompts: Sequence[Sequence[int]],
        answers: Sequence[Answer],
        max_steps: int | None,
        seeds: Sequence[int],
    ) -> Generator[list[list[Piece]]]:
        try:
            with lent as cache:
                yield from decode(self.base, drafter, rule, prompts, answers, max_steps, seeds, cache, self._start)
        finally:
            self._auto.observe(drafter, rule, [answer.output for answer in answers])

    @property
    def _start(self) -> StartSteps:
        return self.graphs.steps if self.graphs is not None else EagerSteps

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, rendered with the base's chat template up to where the answer begins.

        Raises:
            ValueError: The base's tokenizer has no chat template, or its template refuses the conversation.
        """
        if not self.base.tokenizer.chat_template:
            raise ValueError(f"base ({self.base.name}) has no chat template; use plain prompts or another base")
        try:
            ids: list[int] = self.base.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, return_dict=False
            )
        except TemplateError as error:
            raise ValueError(f"chat template of the base ({self.base.name}) refuses this: {error}") from error
        return ids

    def _drafter(
        self, name: str | None, nodes: int | None, tree: Tree | None, temperature: float, batch: int, rule: BuiltRule
    ) -> Drafter:
        takes_tree = name in (None, "heads", "heads-sampled")
        if tree is not None and (self.heads is None or nodes is not None or not takes_tree):
            raise ValueError(
                "tree needs heads and takes the place of nodes and drafter; give one of them, on a model with heads"
            )
        if nodes is not None and nodes < 1:
            raise ValueError(f"nodes ({nodes}) must be at least 1 (1 = plain decoding); give a larger tree budget")
        if name is not None and name not in DRAFTERS:
            raise ValueError(f"drafter ({name!r}) is not known; choose one of: {', '.join(DRAFTERS)}")
        if self.heads is None and name not in (None, "prompt-lookup"):
            raise ValueError(f"drafter ({name!r}) needs heads and there are none; load heads, or choose prompt-lookup")
        if nodes == 1 or (name is None and self.heads is None):
            return self._plain
        name = name or ("heads" if tree else "hybrid")
        if nodes is not None or tree is not None or self.base.decoding == "plain":
            return self._sized(name, nodes or 2, tree, temperature)
        on_host = self.graphs is None and self.base.device.type == "cpu" and self.base.decoding == "tree"
        if on_host and name != "heads-sampled":
            return self._auto.priced(name, batch, rule)
        return self._auto.fixed(name, batch, rule, self._start, lambda n: self._sized(name, n, None, temperature))

    def _sized(self, name: str, nodes: int, tree: Tree | None, temperature: float) -> Drafter:
        if nodes == 1 and tree is None and self.base.decoding != "plain":
            return self._plain
        key = (name, nodes, tree, temperature if name == "heads-sampled" else 0.0)
        if key not in self._drafters:
            self._drafters[key] = self._new_drafter(*key)
        self._drafters.move_to_end(key)
        while len(self._drafters) > KEPT_DRAFTERS:
            self._drafters.popitem(last=False)
        return self._drafters[key]

    def _new_drafter(self, name: str, nodes: int, tree: Tree | None, temperature: float) -> Drafter:
        if self.base.decoding == "chain" and tree is not None and tree.depth + 1 < tree.nodes:
            raise ValueError(
                f"tree ({tree.nodes} nodes, depth {tree.depth}) branches and the base ({self.base.name}) verifies"
                f" chains only; give Tree.chain({tree.depth})"
            )
        if self.base.decoding == "plain":
            logger.warning("drafter (%s, %d nodes) is left out: base (%s) decodes plainly", name, nodes, self.base.name)
            return PlainDrafter()
        host_decides = self.graphs is None
        if name == "prompt-lookup":
            return PromptLookupDrafter(nodes, host_decides=host_decides)
        assert self.heads is not None, "checked by the caller"
        if name == "heads-sampled":
            if self.base.decoding == "chain":
                tree = tree or Tree.chain(min(nodes - 1, self.heads.config.num_heads))
            return SampledHeadsDrafter(self.heads, self.base, nodes, temperature, tree)
        guesses = min(nodes // 2, LOOKUP_GUESSES)
        sure = PromptLookupDrafter(min(nodes, LOOKUP_GUESSES + 1), min_match=SURE_MATCH) if host_decides else None
        if self.base.decoding == "chain":
            chain = tree or Tree.chain(min(nodes - 1, self.heads.config.num_heads))
            heads = HeadsDrafter(self.heads, self.base, nodes, chain)
            return heads if name == "heads" else HybridDrafter(heads, PlainDrafter(), shortcut=sure)
        if name == "heads" or nodes == 2:
            return HeadsDrafter(self.heads, self.base, nodes, tree, host_decides)
        heads = HeadsDrafter(self.heads, self.base, nodes - guesses, host_decides=host_decides)
        return HybridDrafter(heads, PromptLookupDrafter(guesses + 1, host_decides=host_decides), shortcut=sure)

    def _encode(self, prompts: Prompt | Prompts) -> tuple[list[list[int]], bool]:
        """Token ids of every prompt, and whether there was one prompt rather than a batch."""
        values: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts
        if not isinstance(values, str | list | tuple):
            raise ValueError(f"prompts ({values!r}) are neither text nor token ids; give a string or a list")
        if isinstance(values, list | tuple):
            values = [value.tolist() if hasattr(value, "tolist") else value for value in values]
        single = isinstance(values, str) or (len(values) > 0 and not isinstance(values[0], str | list | tuple))
        batch = [values] if single else list(values)
        if not batch:
            raise ValueError("prompts (an empty list) hold nothing to complete; give at least one prompt")
        tokenizer = self.base.tokenizer
        encoded = [list(tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt) for prompt in batch]
        self._check_tokens("prompt", (token for ids in encoded for token in ids))
        return encoded, single

    def _check_tokens(self, where: str, tokens: Iterable[object]) -> None:
        vocab_size = self.base.vocab_size
        for token in tokens:
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"{where}: token id ({token!r}) is not a number from 0 to {vocab_size - 1}; encode the text again"
                )


def _warn_of_other_weights(config: HeadsConfig, base: BaseModel) -> None:
    if config.base_source and config.base_source != base.source:
        logger.warning(
            "heads were trained on %s of the base, and this one has %s: drafts may be right less often, the text stays"
            " the base's own",
            config.base_source, base.source or "other ones",
        )  # fmt: skip


def _check_whole(**options: int | None) -> None:
    for name, value in options.items():
        if not _is_whole(value) and (value is not None or name not in NO_LIMIT):
            raise ValueError(f"{name} ({value!r}) must be a whole number; correct it")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
