"""The frozen base: an unmodified transformers model, run over plain rows (training) or tree rows (decoding)."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from medusa.attention import IMPLEMENTATION, Span, TreePlan, choose, layer_spans, register
from medusa.attention.reference import explicit_mask
from medusa.attention.trial import layer_shapes
from medusa.base.checkpoint import read_checkpoint
from medusa.base.context import context_length
from medusa.base.documents import document_masks, separate_pass
from medusa.base.mtp import MtpLayer
from medusa.base.output import Matrices, OutputLayer, state_size
from medusa.base.packing import packed_weights
from medusa.base.taps import DecoderPass, first_layers
from medusa.base.tensor_parallel import Leader, Nobody
from medusa.base.traits import Decoding, Traits
from medusa.base.uneven_block import head_sizes
from medusa.base.usual_block import UnusualBlockError, attention_layers, embedding_scale
from medusa.cache import BlockPool, CachedSequence, commit, plan_pass
from medusa.cpu import native
from medusa.cpu.fused import FusedPass
from medusa.cpu.packed import PackedEmbedding
from medusa.recurrence import hook
from medusa.sampling import is_whole
from medusa.tree import Draft


class BaseModel:
    """The frozen causal language model that verifies drafts.

    Other traits, other layers that heads read, and a fused pass make another ``BaseModel`` of the same transformers
    model: see ``with_traits``, ``tapped`` and ``with_fused_pass``.

    Args:
        model: The transformers model; it is frozen, and its layers call our attention from now on.
        tokenizer: Its tokenizer.
        name: Path or Hub id that it was loaded from.
        attention: A backend of ``medusa.attention`` or "auto", see ``load``.
        source: The kind of its weights, if it is known and special ("4-bit weights .. expanded to bfloat16").
        int8: Whether it multiplies in 8 bits, so that it differs from the model of this name.
        adapter: Directory of the adapter of joint training (Medusa-2), with which it differs from the model of this
            name; "" = no adapter.

    Attributes:
        model: The transformers model, in evaluation mode, without gradients.
        config: Config of the language model in it.
        hidden_size: D, the width of the last hidden state; see ``state_size``.
        num_layers: Layers of the decoder.
        vocab_size: V, rows of the output layer.
        context_length: Tokens of prompt and completion together, see ``medusa.base.context``.
        decoder: The layers between token ids and the output layer.
        output: The layer from last hidden states to logits.
        attention: The backend that computes attention over tree rows.
        recurrent: Whether it has recurrent layers, whose states a pool keeps beside keys and values.
        device: Where tokens, hidden states and logits are; if the model is spread, the device of the output layer.
        traits: Results of the tests at load.
        mtp: Its multi-token-prediction layer, if that was loaded, see ``with_mtp``.
        feature_layers: Layers, counted from 1, whose outputs follow the last hidden state, see ``tapped``.
        ranks: Number of processes that share the model (tensor parallel); 1 = it is whole.
        others: The other processes, if this one leads, see ``leading``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str = "",
        attention: str = "auto",
        *,
        source: str = "",
        int8: bool = False,
        adapter: str = "",
    ) -> None:
        register()
        self.recurrent = hook(model)
        model.set_attn_implementation(IMPLEMENTATION)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer, self.name, self.source, self.int8, self.adapter = tokenizer, name, source, int8, adapter
        self.config = model.config.get_text_config()
        self.attention, _ = choose(attention, model.device, model.dtype, layer_shapes(model, self.config))
        self.hidden_size, self.num_layers = state_size(self.config), int(self.config.num_hidden_layers)
        self.vocab_size, self.context_length = int(self.config.vocab_size), context_length(self.config, name)
        decoder = model.get_decoder()
        # Llama 4's text model does not name its decoder.
        self.decoder: nn.Module = model.model if decoder is model else decoder
        # Looked up once: a decode step asks for them several times, and transformers' lookups are slow.
        self._embeddings = model.get_input_embeddings()
        self.output = OutputLayer(model.get_output_embeddings(), self.config)
        self.device = self.output.device
        self.traits = Traits()
        self.mtp: MtpLayer | None = None
        self.feature_layers: tuple[int, ...] = ()
        self.ranks = int(model.tp_size or 1)
        if self.recurrent and self.ranks > 1:
            raise ValueError(
                f"base ({name}) has recurrent layers, which are not divided among ranks; leave tp_plan out"
            )
        self.others: Leader | Nobody = Nobody()
        self._pass = DecoderPass(self.decoder)
        self._fused: Callable[[BlockPool, TreePlan], Tensor] | None = None

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
            dtype: Dtype of weights and computation; None = the checkpoint's, or the CPU's choice: ``choose_dtype``.
            device: None = the GPU if there is one, otherwise the CPU.
            pack: Let our kernels compute the linear layers, on a GPU those whose weights stay packed (decoding only,
                without gradients; no effect on layers that transformers quantises, or on a base that is spread).
            int8: LOSSY, for CPUs: multiply in 8 bits. Inputs of linear layers are rounded, and their weights if they
                are not packed; an output layer with plain weights is not rounded.
            attention: A backend of ``medusa.attention``; "auto" = the first of triton and flash that works on a GPU,
                exact on a CPU with the C++ kernels, otherwise the reference.
            load_options: More arguments of transformers' ``from_pretrained``: ``device_map`` spreads the base over
                devices and replaces ``device``, ``quantization_config`` quantises it, ``tp_plan="auto"`` divides it
                among the processes of torchrun, which then all compute the same: see ``leading``.
            adapter: Directory of an adapter of joint training; it is merged into the weights.

        Raises:
            OSError: There is no such base, here or on the Hub, or no such adapter.
            ValueError: There is no usable model or tokenizer, the adapter is of another base, the attention backend
                does not run here, or there is nothing to round to 8 bits or no way to compute with them.
        """
        stored = read_checkpoint(name, dtype, device, pack, int8, load_options, adapter)
        return cls(
            stored.model, stored.tokenizer, stored.name, attention,
            source=stored.source, int8=int8, adapter=str(adapter),
        )  # fmt: skip

    @property
    def decoding(self) -> Decoding:
        """The drafts that it verifies exactly, see ``Traits``."""
        return self.traits.decoding

    @property
    def exact(self) -> bool | None:
        """Whether rows are equal bit by bit in every pass; None = not tested."""
        return self.traits.exact

    @property
    def fused(self) -> bool:
        """Whether passes over tree rows run in our own kernels, see ``with_fused_pass``."""
        return self._fused is not None

    @cached_property
    def packed(self) -> bool:
        """Whether 4 or 8 bit weights stay packed, see ``medusa.base.packing``."""
        return bool(packed_weights(self.model))

    @property
    def cheap_rows(self) -> int:
        """About how many rows of a pass cost little more than one."""
        if self.device.type != "cpu":
            return 32
        return 16 if self.fused and self.dtype == torch.bfloat16 and not self.int8 and native.has_tiles() else 4

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the hidden states."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def feature_size(self) -> int:
        """F = D * (1 + number of feature layers), the width of hidden states."""
        return self.hidden_size * (1 + len(self.feature_layers))

    @property
    def eos_ids(self) -> frozenset[int]:
        """Token ids that end a completion."""
        ids = self.model.generation_config.eos_token_id if self.model.generation_config else None
        ids = self.tokenizer.eos_token_id if ids is None else ids
        return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Token ids that are left out of texts."""
        return frozenset(number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special)

    @property
    def lm_head_weight(self) -> Tensor:
        """[V, D] weight of the output layer."""
        return self.output.weight

    @property
    def key_layers(self) -> dict[str, int]:
        """The last layer that has keys and values of its own, by kind of attention; empty if ranks divide them."""
        kinds = getattr(self.config, "layer_types", None) or []
        own = len(kinds) - (getattr(self.config, "num_kv_shared_layers", None) or 0)
        return {kind: index for index, kind in enumerate(kinds[:own])} if self.ranks == 1 else {}

    def heads_of(self, layer: int) -> tuple[int, int]:
        """Number of a layer's key heads, and the size of its heads; (0, 0) if it has none of the usual kind."""
        attention = getattr(self.decoder.layers[layer], "self_attn", None)  # type: ignore[index]
        return head_sizes(attention) if hasattr(attention, "head_dim") else (0, 0)

    def with_traits(self, **found: Any) -> "BaseModel":
        """The same base with these fields of ``Traits``; both share the model, and this object does not change."""
        known = copy.copy(self)
        known.traits = replace(self.traits, **found)
        return known

    def with_mtp(self, layer: MtpLayer | None = None) -> "BaseModel":
        """The same base with its multi-token-prediction layer, whose cache follows that of each sequence.

        Args:
            layer: None = read it from the base's checkpoint.

        Raises:
            ValueError: There is none that can be used.
        """
        known = copy.copy(self)
        known.mtp = layer or MtpLayer.load(self.model, self.attention, self.device)
        return known

    def with_fused_pass(self) -> "BaseModel":
        """The same base with passes over tree rows in our own kernels; see ``fuse``, which also checks the result.

        Such a pass is one C++ call on a CPU, and a few kernels per layer on a GPU.

        Raises:
            UnusualBlockError: Its layers are not the usual block, or there are no such kernels here.
        """
        if self.traits.explicit_mask or self.traits.gathered:
            raise UnusualBlockError("its attention needs more than the plan of a pass")
        if self.ranks > 1:
            raise UnusualBlockError("its layers are divided among processes")
        fused = copy.copy(self)
        if self.attention.name == "exact":
            fused._fused = FusedPass(self.decoder, self.feature_layers, self.spans, self.context_length)
        elif self.attention.name == "triton":
            from medusa.gpu import fused as on_gpu  # needs Triton

            fused._fused = on_gpu.FusedPass(self.decoder, self.feature_layers, self.context_length)
        else:
            raise UnusualBlockError(f"it has other attention ({self.attention.name})")
        return fused

    def leading(self, leader: Leader) -> "BaseModel":
        """The same base, which announces its passes to the other ranks; these make the same passes."""
        known = copy.copy(self)
        known.others = leader
        return known

    def tapped(self, layers: Sequence[int]) -> "BaseModel":
        """The same base with wider hidden states: the outputs of some layers follow the last one.

        Both share the model and everything else; this object does not change.

        Args:
            layers: Counted from 1; their outputs come in this order, without any norm.

        Raises:
            ValueError: There are no such layers, or they cannot be found.
        """
        if tuple(layers) == self.feature_layers:
            return self
        tapped = copy.copy(self)
        tapped._pass = DecoderPass(self.decoder, layers, self.num_layers)
        tapped.feature_layers = tuple(layers)
        return tapped.with_fused_pass() if self.fused else tapped

    def shallow(self, layers: int) -> "BaseModel":
        """The base's first layers, its last norm and its output layer, as an estimate of its output.

        It shares the weights, and may write to the cache behind the base's cached positions.

        Raises:
            ValueError: The base has no such layers below the last, or they cannot be found.
        """
        if not 0 < layers < self.num_layers:
            raise ValueError(f"exit layer ({layers}) must be from 1 to {self.num_layers - 1}; correct it")
        shallow = copy.copy(self)
        shallow.decoder, shallow.num_layers = first_layers(self.decoder, self.num_layers, layers), layers
        shallow._pass, shallow.feature_layers, shallow.mtp = DecoderPass(shallow.decoder), (), None
        shallow._fused = None
        # The first layers of a hybrid model may all be recurrent, and the kernels take their sizes from attention.
        return shallow.with_fused_pass() if self.fused and attention_layers(shallow.decoder) else shallow

    @cached_property
    def spans(self) -> dict[int | None, Span]:
        """Windows and chunks by layer, without layers that have their own attention code. Computed at the first step.

        Raises:
            UnknownSpanError: A layer sees neither all earlier positions, nor a window, nor a chunk.
        """
        return layer_spans(self.model, self.decoder, self.context_length)

    def new_pool(self, tokens: int | None = None) -> BlockPool:
        """An empty KV cache for sequences of this base, and of this base with other tapped layers.

        Args:
            tokens: Most positions of all sequences together; None = no limit.
        """
        return BlockPool(self.num_layers, self.device, tokens, self.model, recurrent=self.recurrent)

    def plan(
        self,
        parts: Sequence[tuple[Draft, Sequence[CachedSequence]]],
        kv_length: int | None = None,
        lengths_B: Tensor | None = None,
    ) -> TreePlan:
        """Plan a pass over trees behind the cached parts of these sequences; reserves blocks for it.

        Args:
            parts: Trees with the sequences that they continue, all of one pool.
            kv_length: Number of positions that attention reads; None = those of the longest sequence.
            lengths_B: [B] int64 lengths of the first part's sequences, if they are on the device already.

        Raises:
            PoolFullError: There are no blocks left.
            ValueError: The sequences belong to another base.
        """
        if parts[0][1][0].pool.owner is not self.model:
            raise ValueError("KV cache (BlockPool) belongs to another base; make one with this base's new_pool")
        return plan_pass(parts, self.attention, self.spans, kv_length, lengths_B)

    def run(self, pool: BlockPool, plan: TreePlan) -> Tensor:
        """Hidden states [R, F] of a pass's rows; each sees the cached part of its sequence and its own ancestors.

        Their keys and values are written behind the cached part. Positions beyond the context, of drafts that can no
        longer be emitted, are replaced by its last position.
        """
        if self._fused is not None:
            return self._fused(pool, plan)
        with self.others.run(self.num_layers, pool, plan):
            if self.traits.explicit_mask:
                return torch.cat([self._tree_pass(pool, plan.alone(index)) for index in range(len(plan.sizes))])
            return self._tree_pass(pool, plan)

    def commit(self, pool: BlockPool, plan: TreePlan, path_SA: Tensor, counts_S: Tensor) -> None:
        """Move the keys and values of accepted paths, see ``medusa.cache.commit``.

        Args:
            pool: The pool of these keys and values.
            plan: The pool's last plan; the paths belong to its first trees.
            path_SA: int64 nodes of the accepted paths.
            counts_S: int64 number of nodes of each path.
        """
        count = len(path_SA)
        if self.recurrent:
            pool.recurrent.accept(plan.texts[:count], path_SA, counts_S)
        with self.others.commit(pool, path_SA, counts_S):
            commit(pool, plan.table.blocks[:count], plan.lengths[:count], path_SA, counts_S)

    def hidden_states(self, input_ids_BT: Tensor, position_ids_BT: Tensor | None = None) -> Tensor:
        """Hidden states [B, T, F] of a plain causal pass without a cache.

        The first D numbers are the last hidden state, after the last norm; the feature layers' outputs follow.

        Args:
            input_ids_BT: [B, T] int64.
            position_ids_BT: [B, T]; positions that start again at 0 mark packed documents, which do not see each other.
        """
        with self.others.hidden_states(self.num_layers, input_ids_BT, position_ids_BT):
            if position_ids_BT is not None and self.traits.separation == "rows":
                return separate_pass(self._pass, input_ids_BT, position_ids_BT).to(self.device)
            masks = {}
            if position_ids_BT is not None and self.traits.separation == "masks":
                masks = document_masks(self.config, position_ids_BT, self.dtype)
            hidden = self._pass(input_ids=input_ids_BT, position_ids=position_ids_BT, use_cache=False, **masks)
        return hidden.to(self.device)

    @cached_property
    def _no_mask(self) -> Tensor:
        """A placeholder mask for the families: transformers builds no mask if it gets a 4-D one.

        The plan holds the real masks; a family that reads this one instead fails the self-test.
        """
        return torch.full((1, 1, 1, 1), torch.nan, device=self.device)

    def _tree_pass(self, pool: BlockPool, plan: TreePlan) -> Tensor:
        explicit, gathered = self.traits.explicit_mask, self.traits.gathered
        with pool.cache.running(plan, explicit, gathered) as cache:
            hidden = self._pass(
                input_ids=plan.tokens[None],
                position_ids=plan.positions.clamp(max=self.context_length - 1)[None],
                attention_mask=explicit_mask(plan, self.dtype, self.device) if explicit else self._no_mask,
                past_key_values=cache,
                use_cache=True,
                tree_plan=None if explicit else plan.gathering() if gathered else plan,
            )
        return hidden[0].to(self.device)

    @cached_property
    def weight_bytes(self) -> int:
        """About how many bytes a pass reads."""
        read = [*self.model.parameters(), *self.model.buffers(), *packed_weights(self.model)]
        return sum(weight.nbytes for weight in read)

    @property
    def linear(self) -> bool:
        """Whether logits are a linear function of hidden states, apart from a constant: no soft cap bends them."""
        return self.output.linear

    @property
    def matrices(self) -> Matrices | None:
        """The weights of embeddings and output layer; None if these layers compute more."""
        embeddings, output = self._embeddings, self.output.matrices
        try:
            scale = embedding_scale(embeddings)
        except UnusualBlockError:
            return None
        packed = isinstance(embeddings, PackedEmbedding)
        plain = isinstance(embeddings, nn.Embedding) and type(embeddings.weight) is nn.Parameter
        if output is None or not (packed or plain):
            return None
        return Matrices(embeddings.packed if packed else embeddings.weight, scale, *output)

    def check_tokens(self, where: str, tokens: Iterable[object]) -> None:
        """Check that all values are token ids of this base.

        Raises:
            ValueError: A value is not.
        """
        vocab_size = self.vocab_size
        for token in tokens:
            if not is_whole(token) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"{where}: token id ({token!r}) is not a number from 0 to {vocab_size - 1}; encode the text again"
                )

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [..., D] of token ids [...]."""
        embeddings: Tensor = self._embeddings(tokens)
        return embeddings.to(self.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """The base's logits [..., V] for hidden states [..., D] or [..., F] of any dtype."""
        if self.feature_layers:
            hidden = hidden[..., : self.hidden_size]
        return self.output(hidden)

    def logits_of(self, tokens: Tensor, pack: bool = False) -> Callable[[Tensor], Tensor]:
        """A function that computes only the columns ``tokens`` of ``logits``: hidden states [..., D] -> [..., n].

        It reads a copy of the output layer's rows of these tokens; if the layer is offloaded until it is needed, it
        reads the whole layer.

        Args:
            tokens: int64 [n] token ids.
            pack: Use our kernel on a CPU; no gradient passes through.
        """
        return self.output.of(tokens, pack)
