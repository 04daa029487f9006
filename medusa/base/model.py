"""The frozen base: an unmodified transformers model, run over plain rows (training) or tree rows (decoding)."""

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from medusa.attention import IMPLEMENTATION, Span, TreePlan, choose, layer_spans, register
from medusa.attention.trial import layer_shapes
from medusa.base import smollm2
from medusa.base.adapter import apply_adapter
from medusa.base.documents import Separation, document_masks, document_rows, separate_pass
from medusa.base.taps import DecoderPass
from medusa.cache import SlotCache
from medusa.cpu import packed
from medusa.cpu.compiled import CompiledPass, RecompileLimitError
from medusa.cpu.int8 import round_linears
from medusa.tree import Draft

logger = logging.getLogger(__name__)

Decoding = Literal["tree", "chain", "plain"]


def resolve_base(name: str, heads_directory: str | Path | None = None) -> str:
    """Where a base is: a path relative to the heads that name it, a path as given, or a Hub id.

    "smollm2" is short for a Hub id.

    Raises:
        FileNotFoundError: It looks like a local path and there is nothing.
    """
    candidates = [Path(name)] if heads_directory is None else [Path(heads_directory) / name, Path(name)]
    for candidate in candidates:
        if candidate.is_dir():
            return str(candidate.resolve())
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"base directory ({name}) does not exist; give another path, or a Hub id")
    return smollm2.full_name(name)


def choose_dtype(config_dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
    """The checkpoint's dtype; float32 where a CPU has no bfloat16 instructions."""
    dtype = config_dtype or torch.float32
    if device.type == "cpu" and dtype == torch.float16:
        logger.info("dtype bfloat16: CPUs compute slowly in float16")
        dtype = torch.bfloat16
    if device.type == "cpu" and dtype == torch.bfloat16 and not _cpu_has_bfloat16():
        logger.info("dtype float32: this CPU has no bfloat16 instructions")
        return torch.float32
    return dtype


def _cpu_has_bfloat16() -> bool:
    """Whether matrix products in bfloat16 run on instructions of this CPU (torch's own probes, where it has them)."""
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(probe() for name in probes if (probe := getattr(torch.cpu, name, None)))


def _device_of(layer: nn.Module) -> torch.device:
    """Where a layer computes; weights that are offloaded until they are needed stand on no device meanwhile."""
    device: torch.device = layer.weight.device  # type: ignore[assignment]
    return torch.device(layer._hf_hook.execution_device) if device.type == "meta" else device  # type: ignore[union-attr, arg-type]


class BaseModel:
    """The frozen causal language model that verifies drafts.

    Attributes:
        model: The transformers model, in evaluation mode, without gradients.
        device: Where tokens, hidden states and logits are: the output layer's, where the model is spread over several.
        tokenizer: Its tokenizer.
        name: Path or Hub id it was loaded from.
        source: What its weights are, where that is known and not plain ("4-bit weights .. expanded to bfloat16").
        int8: Its weights are rounded: this is another model than the one of that name.
        adapter: Where the adapter is that joint training (Medusa-2) changed it by, and that makes it another model than
            the one of that name; "" = there is none.
        attention: The backend that computes attention over tree rows.
        decoding: What it verifies exactly: any tree, chains only, or single rows only ("plain").
        explicit_mask: The family drops the step's plan on its way to the attention: each call carries the whole mask
            instead. ``choose_decoding`` finds out both.
        separation: How documents of packed rows are kept apart, see ``choose_separation``, which finds it out.
        exact: Whether a row is equal bit by bit in passes of any rows, so that texts are plain decoding's in any dtype;
            None = not tried, see ``medusa.loading.exactness``.
        feature_layers: Layers, counted from 1, whose outputs stand behind the last hidden state, see ``tapped``.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str = "", attention: str = "auto"
    ) -> None:
        register()
        model.set_attn_implementation(IMPLEMENTATION)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config.get_text_config()
        self.attention, _ = choose(attention, model.device, model.dtype, layer_shapes(model, self.config))
        decoder = model.get_decoder()
        self._decoder = model.model if decoder is model else decoder  # Llama 4's text model does not name its decoder
        # Looked up once: a decode step asks for them several times, and transformers' lookups are slow.
        self._embeddings, self._lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        self.device = _device_of(self._lm_head)
        self._logit_scale = float(getattr(self.config, "logit_scale", None) or 1.0)
        self._logit_scale /= float(getattr(self.config, "logits_scaling", None) or 1.0)
        self._logit_cap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.decoding: Decoding = "tree"
        self.separation: Separation = "positions"
        self.int8 = self.explicit_mask = False
        self.adapter = self.source = ""
        self.exact: bool | None = None
        self._no_mask: Tensor | None = None
        if self.context_length < (longest := getattr(self.config, "max_position_embeddings", 0) or 0):
            logger.warning(
                "base (%s) is used up to %d of its %d tokens of context: there longrope turns all keys anew",
                name, self.context_length, longest,
            )  # fmt: skip
        self.feature_layers: tuple[int, ...] = ()
        self._pass = DecoderPass(self._decoder)
        self._compiled: CompiledPass | None = None

    @classmethod
    def load(
        cls,
        name: str | Path,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        pack: bool = False,
        int8: bool = False,
        attention: str = "auto",
        load_options: Mapping[str, Any] | None = None,
        adapter: str | Path = "",
    ) -> "BaseModel":
        """Load a base and its tokenizer through transformers.

        Args:
            name: Directory, Hub id or "smollm2".
            dtype: Of weights and computation; None = the checkpoint's, see ``choose_dtype``.
            device: None = the GPU where there is one.
            pack: Reorder the linear layers for a CPU's matrix kernels (decoding only; no effect on a GPU, on quantised
                layers, or on a base that is spread).
            int8: LOSSY, for CPUs: round the weights of large linear layers to 8 bits, but not the output layer's.
            attention: A backend of ``medusa.attention``; "auto" = the first of triton and flash that works on a GPU,
                exact on a CPU with a C++ compiler, otherwise the reference.
            load_options: More arguments of transformers' ``from_pretrained``: ``device_map`` spreads the base over
                devices and takes the place of ``device``, ``quantization_config`` quantises it.
            adapter: Directory of an adapter that joint training made; it becomes part of the weights.

        Raises:
            FileNotFoundError: There is no such adapter.
            ValueError: There is no usable model or tokenizer, the adapter is of another base, the attention backend
                does not run here, or there is nothing to round to 8 bits or no way to compute with them.
        """
        try:
            device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        except RuntimeError as error:
            raise ValueError(f"device ({device}) is not known to torch; pass cpu, cuda or cuda:N") from error
        if device.type == "meta":
            raise ValueError(f"device ({device}) computes nothing; pass cpu, cuda or cuda:N")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device ({device}) is not usable: torch sees no GPU here; pass device=cpu")
        name = smollm2.full_name(str(name))
        path = smollm2.locate(name)
        try:
            config, options = AutoConfig.from_pretrained(path), dict(load_options or {})
            dtype = dtype or choose_dtype(config.dtype, device)
            quantised = "quantization_config" in options or hasattr(config, "quantization_config")
            if quantised and device.type == "cuda":
                options.setdefault("device_map", {"": device})  # quantised weights are not moved once they are loaded
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **options)
            if not quantised and "device_map" not in options:
                model = model.to(device)
            tokenizer = AutoTokenizer.from_pretrained(path)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"base ({name}) cannot be loaded: {error}; give another path, or a Hub id") from error
        spread = "device_map" in options
        if adapter:
            model = apply_adapter(model, adapter, merge=not quantised)
        if int8 and (device.type != "cpu" or spread):
            raise ValueError(f"int8 weights are for one CPU and device is {device}; leave int8 out, or pass device=cpu")
        if int8:
            round_linears(model, keep=model.get_output_embeddings())
        if pack and device.type == "cpu" and not spread:
            packed.pack_linears(model, keep=model.get_output_embeddings())
        base = cls(model, tokenizer, name, attention)
        base.int8, base.adapter, base.source = int8, str(adapter), smollm2.source(path)
        return base

    @property
    def compiled(self) -> bool:
        """Whether passes over tree rows run as a compiled graph."""
        return self._compiled is not None

    @property
    def dtype(self) -> torch.dtype:
        """Of the hidden states."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def hidden_size(self) -> int:
        """D."""
        return int(self.config.hidden_size)

    @property
    def num_layers(self) -> int:
        """Layers of the decoder."""
        return int(self.config.num_hidden_layers)

    @property
    def feature_size(self) -> int:
        """F = D * (1 + number of feature layers), the width of hidden states."""
        return self.hidden_size * (1 + len(self.feature_layers))

    @property
    def vocab_size(self) -> int:
        """V, rows of the output layer."""
        return int(self.config.vocab_size)

    @property
    def context_length(self) -> int:
        """Tokens of prompt and completion together that the base was made for.

        "longrope" turns all keys differently once a text is longer than the original context, cached ones too: such a
        base is used up to there.
        """
        names = ("max_position_embeddings", "max_seq_len")
        limit = int(next((value for name in names if (value := getattr(self.config, name, None))), 2**31 - 1))
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") == "longrope":
            limit = min(limit, int(rope.get("original_max_position_embeddings") or limit))
        return limit

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a completion."""
        ids = self.model.generation_config.eos_token_id if self.model.generation_config else None
        ids = self.tokenizer.eos_token_id if ids is None else ids
        return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)

    @property
    def decoder(self) -> nn.Module:
        """What is between token ids and the output layer."""
        decoder: nn.Module = self._decoder
        return decoder

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, D] weight of the output layer."""
        weight: Tensor = self._lm_head.weight
        return weight

    def tapped(self, layers: Sequence[int]) -> "BaseModel":
        """The same base with wider hidden states: outputs of some layers stand behind the last one.

        Both share the model and all else; this one stays as it is.

        Args:
            layers: Counted from 1, all below the last; their outputs come in this order, without any norm.

        Raises:
            ValueError: There are no such layers, or they cannot be found.
        """
        if tuple(layers) == self.feature_layers:
            return self
        tapped = copy.copy(self)
        tapped._pass = DecoderPass(self._decoder, layers, self.num_layers)
        tapped.feature_layers = tuple(layers)
        tapped.compile(self.compiled)
        return tapped

    @cached_property
    def spans(self) -> dict[int | None, Span]:
        """Windows and chunks by layer; layers with attention code of their own are missing. Asked at the first step.

        Raises:
            UnknownSpanError: A layer sees neither all that stands before, nor a window, nor a chunk.
        """
        return layer_spans(self.model, self._decoder, self.context_length)

    def new_cache(self, slots: int, capacity: int = 256, limit: int | None = None) -> SlotCache:
        """An empty cache for ``slots`` sequences: ``capacity`` rows each at the start, ``limit`` at most."""
        return SlotCache(slots, capacity, self.num_layers, self.device, limit)

    def new_plan(self, draft: Draft, cache: SlotCache) -> TreePlan:
        """The plan of a step that verifies ``draft`` behind the rows of ``cache``, after ``cache.begin``."""
        return TreePlan(draft, cache.lengths, cache.kv_length, self.attention, self.spans)

    def hidden_states(self, input_ids_BT: Tensor, position_ids_BT: Tensor | None = None) -> Tensor:
        """Hidden states [B, T, F] of a plain causal pass without cache.

        The first D numbers are the last hidden state, after the last norm; the feature layers' outputs follow.

        Args:
            input_ids_BT: [B, T] int64.
            position_ids_BT: [B, T]; positions that start again at 0 mark packed documents, which do not see each other.
        """
        if position_ids_BT is not None and self.separation == "rows":
            return separate_pass(self._pass, input_ids_BT, position_ids_BT).to(self.device)
        masks = {}
        if position_ids_BT is not None and self.separation == "masks":
            masks = document_masks(self.config, position_ids_BT, self.dtype)
        hidden = self._pass(input_ids=input_ids_BT, position_ids=position_ids_BT, use_cache=False, **masks)
        return hidden.to(self.device)

    def passes(self, position_ids_BT: Tensor) -> int:
        """How many passes ``hidden_states`` makes for packed rows."""
        return len(document_rows(position_ids_BT)) if self.separation == "rows" else 1

    def tree_hidden_states(self, tokens_BN: Tensor, positions_BN: Tensor, cache: SlotCache, plan: TreePlan) -> Tensor:
        """Hidden states [B, N, F] of tree rows that see their cached prefix and their own ancestors.

        Positions beyond the context (drafts that can no longer be emitted) are clamped to its last one.
        """
        if self._no_mask is None:
            # transformers builds no mask of its own when it is handed a 4-D one; the plan holds the real masks, and
            # a family that reads this one instead fails the self-test.
            self._no_mask = torch.full((1, 1, 1, 1), torch.nan, device=self.device)
        positions_BN = positions_BN.clamp(max=self.context_length - 1)
        if self._compiled is not None:
            try:
                return self._compiled(tokens_BN, positions_BN, self._no_mask, cache, plan)
            except RecompileLimitError as error:
                logger.warning("base (%s) runs without compilation from now on: %s", self.name, error)
                self.compile(False)
        hidden = self._pass(
            input_ids=tokens_BN,
            position_ids=positions_BN,
            attention_mask=plan.bias(1, self.dtype, self.device) if self.explicit_mask else self._no_mask,
            past_key_values=cache,
            use_cache=True,
            tree_plan=plan,
        )
        return hidden.to(self.device)

    def compile(self, on: bool = True) -> None:
        """Compile the pass over tree rows, or go back; see ``compile_base``, which also checks the outcome.

        The first pass of each kind of shape (one sequence or several, one row or several) takes seconds.
        """
        self._compiled = CompiledPass(self._pass) if on else None

    @property
    def linear(self) -> bool:
        """Whether logits are a linear function of hidden states, apart from a constant: no soft cap bends them."""
        return not self._logit_cap

    def check_tokens(self, where: str, tokens: Iterable[object]) -> None:
        """Refuse what is no token id of this base.

        Raises:
            ValueError: It is none.
        """
        vocab_size = self.vocab_size
        for token in tokens:
            if not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"{where}: token id ({token!r}) is not a number from 0 to {vocab_size - 1}; encode the text again"
                )

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [..., D] of token ids [...]."""
        embeddings: Tensor = self._embeddings(tokens)
        return embeddings.to(self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] as the base itself would give for hidden states [..., D] or [..., F] of any dtype."""
        if self.feature_layers:
            hidden = hidden[..., : self.hidden_size]
        return self._as_given(self._lm_head(hidden.to(self.lm_head_weight.dtype)))

    def logits_of(self, tokens: Tensor, pack: bool = False) -> Callable[[Tensor], Tensor]:
        """What computes columns ``tokens`` of ``logits`` alone: hidden states [..., D] -> [..., n].

        It reads a copy of the output layer's rows of these tokens; where the layer is offloaded until it is needed, all
        of it.

        Args:
            tokens: int64 [n] token ids.
            pack: Reorder the copy for a CPU's matrix kernels; no gradient passes through these.
        """
        if self.lm_head_weight.device.type == "meta":
            return lambda hidden: self.logits(hidden)[..., tokens]
        index = tokens.to(self.lm_head_weight.device)
        weight, bias = self.lm_head_weight[index], getattr(self._lm_head, "bias", None)
        bias = None if bias is None else bias[index]
        linear = packed.packed_linear(weight, bias) if pack else lambda x: nn.functional.linear(x, weight, bias)
        return lambda hidden: self._as_given(linear(hidden.to(weight.dtype)))

    def _as_given(self, logits: Tensor) -> Tensor:
        """The output layer's numbers as the family scales and bounds them."""
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        if self._logit_cap:
            logits = self._logit_cap * torch.tanh(logits / self._logit_cap)
        return logits
