"""``MedusaModel``: a base with its heads; load, save, generate, stream."""

import contextlib
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Unpack, overload

import torch
from torch import Tensor

from medusa.base.model import BaseModel
from medusa.cache import BlockPool
from medusa.drafters.choose import Drafters
from medusa.drafters.ngram import NgramCache
from medusa.engine.batch import Batch
from medusa.engine.config import EngineConfig
from medusa.engine.generate import start
from medusa.engine.graph import StepGraphs
from medusa.engine.output import Output, Piece
from medusa.engine.prefix import Prefix
from medusa.engine.request import Request
from medusa.formats import load_provenance, save_heads
from medusa.heads import DraftHeads
from medusa.heads.frozen import freeze
from medusa.io.card import write_card
from medusa.io.hub import push
from medusa.loading.load import load_base_and_heads, load_draft_model
from medusa.prompts import Prompt, Prompts, encode, render_messages
from medusa.sampling import Options, from_options
from medusa.torch_defaults import torch_defaults


class Stream:
    """A completion as it grows: iterate over its pieces; ``output`` holds the completion so far."""

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
        base: The frozen base. Its hidden states include the feature layers that the heads read.
        heads: The heads, or None. They are a frozen copy on the base's device and in its dtype. The copy may share
            memory with the heads that were passed in: pass a copy of heads that go on training.
        named: Other heads that requests may choose, see ``with_heads``.
        graphs: Runs the steps as CUDA graphs, for one thread at a time; None = eagerly.
        drafters: Chooses the drafter of each request.
        provenance: The origin of the heads, if it is known; saved with them.
    """

    @torch_defaults()
    def __init__(
        self,
        base: BaseModel,
        heads: DraftHeads | None = None,
        graph: bool | StepGraphs | None = None,
        provenance: Mapping[str, Any] | None = None,
        draft_model: BaseModel | None = None,
    ) -> None:
        if not isinstance(base, BaseModel):
            raise TypeError(
                f"base (of type {type(base).__name__}) is no BaseModel; make one with BaseModel(model, tokenizer), or"
                " use from_pretrained"
            )
        if heads is not None:
            heads = _fitted(heads, base)
            base = base.tapped(heads.config.feature_layers)
            heads = freeze(heads, base)
        self.base, self.heads, self.provenance = base, heads, provenance
        self.named: dict[str, DraftHeads] = {}
        self.graphs = graph if isinstance(graph, StepGraphs) else _graphs(base, graph)
        if draft_model is not None:
            _check_draft_model(draft_model, base)
        self.drafters = Drafters(base, self.heads, self.graphs is not None, draft_model)

    def __repr__(self) -> str:
        base, heads = self.base, self.heads
        shown = f"{heads.config.num_heads} {heads.config.architecture}" if heads else None
        return (
            f"{type(self).__name__}(base={base.name!r}, heads={shown!r}, dtype={base.dtype}, device='{base.device}',"
            f" exact={base.exact})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a MedusaModel cannot be copied or pickled: its memory belongs to kernels of this process; share it, or"
            " load another with from_pretrained"
        )

    @classmethod
    def from_pretrained(
        cls,
        heads: str | Path | None = None,
        base: str | Path | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        attention: str = "auto",
        int8: bool = False,
        load_options: Mapping[str, Any] | None = None,
        graph: bool | None = None,
        revision: str | None = None,
        draft_model: str | Path | None = None,
        mtp: bool = False,
    ) -> "MedusaModel":
        """Load heads and the base that they were trained on, or a base alone.

        Heads of joint training (Medusa-2) have an adapter, which is merged into the base. Answers are then no longer
        those of the original base, and lossless decoding is exact with respect to the changed base.

        Args:
            heads: Directory of the heads, in any format of ``medusa.formats``, or their Hub id ("user/heads"). The
                name of a whole model loads that model without heads, which is logged; "smollm2" has heads. None = no
                heads.
            base: The base: a directory, a GGUF file, a Hub id, "smollm2" or "embedded"; None = the one that the heads'
                config names.
            dtype: None = the base checkpoint's dtype, or on a CPU another one if that is faster, which is logged.
            device: None = the GPU if there is one, otherwise the CPU.
            attention: "exact", "reference", "flash" or "triton"; "auto" = the first of triton and flash that works on
                a GPU, exact on a CPU with the C++ kernels, otherwise the reference.
            int8: LOSSY, for CPUs: round the base's linear layers to 8 bits, all but an output layer that is not
                packed. It takes half the bytes of 16 bits, but the text is no longer the base's.
            load_options: More arguments for loading the base, see ``BaseModel.load``: a quantised base, or one that is
                spread over several devices. ``{"tp_plan": "auto"}`` divides it among the processes that torchrun has
                started (tensor parallel). The call returns in the first process only; the others compute with it until
                it ends, and then end too.
            graph: Run each decode step as one CUDA graph: same tokens, without Python between kernels. None = yes on a
                GPU. Steps that cannot be recorded run eagerly. Memory is kept from call to call, see ``release``.
            revision: Branch, tag or commit of heads on the Hub; None = its main branch.
            draft_model: Name of a smaller model that drafts, as for ``base``; it must have the base's tokenizer
                (``Speculation.drafter="draft-model"``). Heads may be loaded too.
            mtp: Load the multi-token-prediction layer of the base (DeepSeek-V3, GLM-4.5), which drafts too.

        Raises:
            FileNotFoundError: A directory is missing.
            OSError: The Hub does not give the heads or the base, or cannot be reached.
            ValueError: Damaged files, heads for another base, no base named, a base that cannot be decoded, a draft
                model with other tokens, or an attention backend that does not run here.

        Example:
            >>> model = MedusaModel.from_pretrained("runs/demo/heads")
            >>> print(model.generate("def read_lines(path):").text)
        """
        for what, name in {"heads": heads, "base": base, "draft_model": draft_model}.items():
            if not isinstance(name, str | Path | None):
                raise ValueError(
                    f"{what} (of type {type(name).__name__}) is no path and no Hub id; give one, or make a base of a"
                    " model of transformers (docs/python.md)"
                )
        how = {"device": device, "attention": attention, "int8": int8, "load_options": load_options}
        model, own, provenance = load_base_and_heads(heads, base, dtype, revision, **how)
        small = None if draft_model is None else load_draft_model(draft_model, model)
        return cls(model.with_mtp() if mtp else model, own, graph, provenance, small)

    def with_heads(self, named: Mapping[str, DraftHeads]) -> "MedusaModel":
        """The same model with these heads beside its own; requests choose them by name (``Speculation.heads``).

        All heads share the base, and requests with different heads share its passes. The new model keeps what was
        measured so far. This model does not change.

        Args:
            named: Heads by name. They replace those that were named before.

        Raises:
            ValueError: Heads for another base.
        """
        fitted = {name: _fitted(heads, self.base) for name, heads in named.items()}
        sets = [*([self.heads] if self.heads else []), *fitted.values()]
        layers = tuple(dict.fromkeys(layer for heads in sets for layer in heads.config.feature_layers))
        model = object.__new__(type(self))
        model.__dict__.update(self.__dict__)
        model.base = base = self.base.tapped(layers)
        model.heads = freeze(self.heads, base, layers) if self.heads else None
        model.named = {name: freeze(heads, base, layers) for name, heads in fitted.items()}
        model.drafters = self.drafters.with_heads(base, model.heads, model.named)
        return model

    def save_pretrained(self, directory: str | Path, provenance: Mapping[str, Any] | None = None) -> Path:
        """Write the heads in the native format, with their adapter but never the base; returns the directory.

        They are written in the dtype that they compute in, which is the base's.

        Args:
            directory: Created if missing.
            provenance: The origin of the heads; None = what was loaded with them.

        Raises:
            ValueError: There are no heads.
        """
        if self.heads is None:
            raise ValueError("this model has no heads to save; train or load heads first")
        origin = self.provenance if provenance is None else provenance
        return save_heads(self.heads, directory, origin)

    def push_to_hub(
        self,
        repo: str,
        private: bool | None = None,
        revision: str | None = None,
        message: str | None = None,
        provenance: Mapping[str, Any] | None = None,
    ) -> str:
        """Put the heads on the Hub, in the native format with a model card, in one commit; returns the page's address.

        They are written in the dtype that they compute in; ``medusa export`` keeps the stored dtype.

        Args:
            repo: "user/heads"; created if it is missing.
            private: Whether a new repository is private; None = the owner's setting, which is public by default.
            revision: Branch to commit to; None = main.
            message: Message of the commit.
            provenance: The origin of the heads; None = what was loaded with them. The card shows it too.

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
        """Complete one prompt or a batch of prompts; the text is that of ``base`` (after joint training, changed).

        Args:
            prompts: A string, token ids (a list or a 1-D tensor), or a list (a 2-D tensor) of these. The base's
                tokenizer encodes text; an empty string is valid if the tokenizer adds a first token. The text of a
                completion goes on from a string; after token ids, as of a conversation, it is a text of its own.
            **options: The fields of ``SamplingParams`` and ``Speculation``; ``seed`` may be one per prompt. Or
                ``sampling`` (one ``SamplingParams``, or one per prompt) and ``speculation`` (likewise) as objects.
                ``prefix`` (a ``Prefix``) keeps the KV cache for later prompts with the same beginning; the text does
                not depend on it.

        Returns:
            An ``Output`` for one prompt, a list of them for a batch; ``Output.seed`` is the seed that was used.

        Raises:
            TypeError: There is no such option.
            ValueError: A value out of its range, a prompt that is neither text nor token ids, has no token or is too
                long, or a tree deeper than the heads.
        """
        batch, texts, single = encode(self.base.tokenizer, prompts)
        requests, steps = self._start(batch, texts, False, options)
        for _ in steps:
            pass
        return requests[0].output if single else [request.output for request in requests]

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Complete one prompt; the result iterates over pieces of text as they become final."""
        batch, texts, _ = encode(self.base.tokenizer, prompt)
        if len(batch) != 1:
            raise ValueError(f"stream takes one prompt, not {len(batch)}; call generate for a batch")
        (request,), steps = self._start(batch, texts, True, options)
        return Stream(steps, request.output)

    def batch(self, pool: BlockPool | None = None, config: EngineConfig | None = None) -> Batch:
        """An empty batch that requests join and leave while it steps; for one thread.

        Args:
            pool: A KV cache that batches of one base and one thread share (``base.new_pool``); None = its own.
            config: Limits of a pass; None = the defaults.
        """
        if pool is None and self.graphs is not None:
            pool = self.graphs.pool
            pool.forget()  # it outlives the calls, and a prompt is computed in each call, as elsewhere
        return Batch(self.base, self.drafters, self.graphs, pool, config)

    @property
    def ngrams(self) -> NgramCache:
        """The cache that the drafter "ngram" reads and fills; all requests share it."""
        return self.drafters.parts.ngrams

    def explain(self, drafter: str | None = None) -> str:
        """Which drafter and tree size one prompt gets by default, and why, in one line."""
        return self.drafters.explain(drafter)

    def release(self) -> None:
        """Free the memory that is kept between calls: the KV cache and the graphs over it."""
        if self.graphs is not None:
            self.graphs.clear()

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, rendered with the base's chat template up to where the answer begins.

        Raises:
            ValueError: The base's tokenizer has no chat template, or its template refuses the conversation.
        """
        return render_messages(self.base.tokenizer, messages, self.base.name)

    def _start(
        self, prompts: list[list[int]], texts: list[bool], incremental: bool, options: Options
    ) -> tuple[list[Request], Generator[list[list[Piece]]]]:
        prefix = options.pop("prefix", None)
        if not isinstance(prefix, Prefix | None):
            raise ValueError(f"prefix ({prefix!r}) is no Prefix; make one with medusa.Prefix()")
        sampling, speculation = from_options(options, len(prompts))
        batch = self.batch(prefix.pool(self.base) if prefix is not None else None)
        return start(batch, list(zip(prompts, sampling, speculation, texts, strict=True)), incremental)


def _fitted(heads: DraftHeads, base: BaseModel) -> DraftHeads:
    """Heads in the base's dtype and on its device, with its vocabulary and layers, which not all formats store."""
    heads.config.check_fit(base.hidden_size, base.vocab_size, base.name)
    known = heads.with_config(vocab_size=base.vocab_size, feature_layers=heads.config.layers_of(base.num_layers))
    return known.to(device=base.device, dtype=base.dtype)


def _graphs(base: BaseModel, wanted: bool | None) -> StepGraphs | None:
    if wanted and base.device.type != "cuda":
        raise ValueError(f"graph (True) needs a CUDA device and the base is on {base.device}; leave graph out")
    if wanted and base.ranks > 1:
        raise ValueError(f"graph (True) cannot be combined with tensor parallel ({base.ranks} ranks); leave graph out")
    return StepGraphs(base) if base.device.type == "cuda" and base.ranks == 1 and wanted is not False else None


def _check_draft_model(model: BaseModel, base: BaseModel) -> None:
    """Check that a draft model has the base's tokens, and that its drafts can be removed from its cache."""
    if model.tokenizer.get_vocab() != base.tokenizer.get_vocab():
        raise ValueError(
            f"draft model ({model.name}) has another vocabulary than the base ({base.name}), and drafts are token ids;"
            " give a model with the base's tokenizer"
        )
    if model.decoding == "plain":
        raise ValueError(
            f"draft model ({model.name}, {model.config.model_type}) cannot take back what it has drafted; give a model"
            " without recurrent layers"
        )
