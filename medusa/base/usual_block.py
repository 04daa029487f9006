"""The transformer block that many families share, recognised by its modules, for passes with our own kernels.

It is Llama's: norm, attention with rotary positions, residual, norm, gated MLP, residual. Norms may stand behind
attention and the MLP too (Gemma), or only there (OLMo). In place of attention, layers may be recurrent
(``medusa.base.recurrent_block``); in place of the MLP there may be experts (``medusa.base.mixture_block``). Layers may
differ in their heads, keys and inputs (``medusa.base.uneven_block``). A test at load checks that the results are equal
(``medusa.loading.self_test``).
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from medusa.base.mixture_block import BESIDE, BESIDE_NORMS, mixture_of
from medusa.base.recurrent_block import MIXERS, mixer_of
from medusa.base.rotary import Rotary
from medusa.base.uneven_block import (
    DECODER_INPUTS,
    INPUT_NORM,
    LAYER_INPUTS,
    SCALE,
    head_sizes,
    input_linears,
    shares_keys,
)
from medusa.cpu.packed import PackedEmbedding
from medusa.gpu.packed import PackedEmbedding as GpuEmbedding

NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
    ("operator_norm", None, "ffn_norm", None),
    ("input_layernorm", None, "pre_ff_layernorm", None),
)
"""Names of a layer's norms: before and after attention, before and after the MLP."""
QUERY_NORMS, KEY_NORMS = ("q_norm", "q_layernorm"), ("k_norm", "k_layernorm")
VALUE_NORM = "v_norm"
"""A norm without a weight (Gemma 4)."""
OUTPUTS = ("o_proj", "out_proj")
SINKS = "sinks"
"""Attention's scores of a key without a value that every row sees, one for each head."""
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "qkv_proj", *OUTPUTS, *QUERY_NORMS, *KEY_NORMS}
MLPS = ("mlp", "feed_forward", "shared_mlp")
GATE, UP, DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2", "output_linear")
GATE_AND_UP = ("gate_up_proj", "input_linear")
MLP_PARTS = {*GATE_AND_UP, *GATE, *UP, *DOWN}
LAST_NORMS = ("norm", "embedding_norm", "final_layernorm")
ROTARIES = ("rotary_emb", "pos_emb")
DECODER_PARTS = {"embed_tokens", "layers", *ROTARIES, *LAST_NORMS}
GATES = {"SiLU": False, "SiLUActivation": False, "GELUTanh": True}
"""Whether an activation of the MLP's gates is GELU (approximated by tanh); else it is SiLU."""
ROTARY = ("default", "linear", "llama3", "yarn", "proportional")
"""Kinds of rotary positions whose angles depend only on the position."""


class UnusualBlockError(ValueError):
    """A decoder does not consist of the usual block, so transformers runs it."""


class BlockNorms(NamedTuple):
    """Weights of a layer's norms; None = there is no such norm.

    Attributes:
        before: [D], of what attention reads.
        after: [D], of attention's output.
        mlp_before: [D], of what the MLP reads.
        mlp_after: [D], of the MLP's output.
        query: Of queries: [d] head by head, or [H * d] over all heads.
        key: Of keys, in the same way.
        value: Of values head by head: [d] ones, since the norm has no weight.
        inputs: [D], of what a layer lets through of its per-layer embeddings.
    """

    before: Tensor | None
    after: Tensor | None
    mlp_before: Tensor | None
    mlp_after: Tensor | None
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    inputs: Tensor | None


def check_decoder(decoder: Any, on_cpu: bool = False) -> None:
    """Check that a decoder and its layers have no other parts.

    Args:
        decoder: The decoder.
        on_cpu: Layers may also be what only the CPU's kernels know: recurrent in place of attention, attention with
            gates, sinks, normed values or another layer's keys, mixtures of experts, per-layer embeddings, and layers
            whose outputs have a factor.

    Raises:
        UnusualBlockError: They have.
    """
    _know(decoder, DECODER_PARTS | DECODER_INPUTS if on_cpu else DECODER_PARTS, "the decoder")
    norm = last_norm(decoder)
    if not isinstance(getattr(norm, "weight", None), Tensor):
        raise UnusualBlockError(f"its norms are {type(norm).__name__}")
    for layer in decoder.layers:
        mixer = {"self_attn"} if not on_cpu or mixer_of(layer) is None else set(MIXERS)
        others = {*LAYER_INPUTS, INPUT_NORM} if on_cpu else set()
        if on_cpu and (mixture := mixture_of(layer)) is not None and mixture.norms:
            others |= {*BESIDE, *BESIDE_NORMS}
        _know(layer, {*mixer, *MLPS, *others, *filter(None, _norm_names(layer))}, "a layer")
        if part_of(layer, MLPS) is None:
            raise UnusualBlockError(f"a layer ({type(layer).__name__}) has no MLP")
        if (mlp := mlp_of(layer) if on_cpu else part_of(layer, MLPS)) is None:
            continue  # experts alone
        _know(mlp, MLP_PARTS, "its MLP")
        if _activation(layer) not in GATES:
            raise UnusualBlockError(f"its MLP's activation is {_activation(layer)}")
    if not attention_layers(decoder):
        raise UnusualBlockError("none of its layers has attention")
    for layer in attention_layers(decoder):
        _know(layer.self_attn, ATTENTION_PARTS | {SINKS}, "its attention")
        if getattr(layer.self_attn, SINKS, None) is not None and not on_cpu:
            raise UnusualBlockError("its attention has sinks")
        if has_gates(layer.self_attn) and not on_cpu:
            raise UnusualBlockError("its attention has gates")
        if not on_cpu and (hasattr(layer.self_attn, VALUE_NORM) or hasattr(layer, SCALE)):
            raise UnusualBlockError("its attention norms values, or its layers scale their outputs")
        if not on_cpu and shares_keys(layer.self_attn):
            raise UnusualBlockError("its layers share keys and values")


def part_of(module: Any, names: Sequence[str]) -> Any:
    """The part of a module that has one of these names, or None."""
    return next((part for name in names if (part := getattr(module, name, None)) is not None), None)


def last_norm(decoder: Any) -> Any:
    """The norm behind the last layer."""
    return part_of(decoder, LAST_NORMS)


def attention_linears(attention: Any) -> tuple[list[Any], Any]:
    """The projections to queries, keys and values, one for each or one for all; and the last one.

    Where there is none to values, they are the keys before their norm. Layers that share keys have queries alone.
    """
    joined, names = getattr(attention, "qkv_proj", None), "q" if shares_keys(attention) else "qkv"
    heads = [getattr(attention, f"{name}_proj", None) for name in names] if joined is None else [joined]
    return [linear for linear in heads if linear is not None], part_of(attention, OUTPUTS)


def mlp_of(layer: Any) -> Any:
    """A layer's MLP, or the one of its experts that all rows visit; None = it has experts alone."""
    mixture = mixture_of(layer)
    return part_of(layer, MLPS) if mixture is None else mixture.shared


def mlp_linears(layer: Any) -> tuple[list[Any], Any]:
    """The projections to gates and to what they let through, one for each or one for both; and the last one.

    None and no projections of a layer with experts alone.
    """
    if (mlp := mlp_of(layer)) is None:
        return [], None
    joined = part_of(mlp, GATE_AND_UP)
    return [part_of(mlp, GATE), part_of(mlp, UP)] if joined is None else [joined], part_of(mlp, DOWN)


def attention_layers(decoder: Any) -> list[Any]:
    """The decoder's layers that are not recurrent."""
    return [layer for layer in decoder.layers if getattr(layer, "self_attn", None) is not None]


def has_gates(attention: Any) -> bool:
    """Whether a gate of its output follows each head of queries, as in Qwen 3.5."""
    queries = attention.config.num_attention_heads * getattr(attention, "head_dim", 0)
    outputs = getattr(part_of(attention, ("q_proj",)), "out_features", None)
    return bool(queries) and outputs == 2 * queries


def shape_of(decoder: Any) -> dict[str, Any]:
    """The sizes, factors and formulas that all layers share.

    Raises:
        UnusualBlockError: Its norms or heads are of another kind.
    """
    layer, config, norm = attention_layers(decoder)[0], decoder.config, last_norm(decoder)
    epsilon = _epsilon(norm)
    if not getattr(layer.self_attn, "head_dim", 0) or epsilon is None:
        raise UnusualBlockError("its norms or heads are of another kind")
    offset, rounds_once = _formula(norm, epsilon)
    gelu = {GATES.get(_activation(layer)) for layer in decoder.layers if mlp_of(layer) is not None}
    gelu |= {GATES.get(type(layer.act_fn).__name__) for layer in decoder.layers if input_linears(layer)}
    if len(gelu) > 1:
        raise UnusualBlockError("its gates have several activations")
    return {
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "epsilon": epsilon,
        "offset": offset,
        "rounds_once": rounds_once,
        "gelu": True in gelu,
        "scaling": layer.self_attn.scaling,
        "softcap": float(getattr(layer.self_attn, "attn_logit_softcapping", None) or 0),
        "residual": float(getattr(layer, "residual_multiplier", 1.0)),
        "multiplier": float(getattr(decoder, "embedding_multiplier", 1.0)),
    }


def embedding_scale(embeddings: Any) -> float:
    """A factor on the rows of embeddings, in their dtype; 1 in most families.

    Raises:
        UnusualBlockError: They are of another kind.
    """
    if isinstance(embeddings, PackedEmbedding | GpuEmbedding):
        return 1.0 if embeddings.scale is None else float(embeddings.scale)
    scale = getattr(embeddings, "embed_scale", None)
    known = type(embeddings) is nn.Embedding or (isinstance(embeddings, nn.Embedding) and scale is not None)
    if not known or embeddings.max_norm is not None:
        raise UnusualBlockError(f"its embeddings are {type(embeddings).__name__}")
    if isinstance(scale, Tensor):
        scale = scale.to(embeddings.weight.dtype)
    return 1.0 if scale is None else float(scale)


def norms_of(layer: Any, like: Any) -> BlockNorms:
    """The weights of a layer's norms, which must all be of the kind of another norm of the decoder.

    Raises:
        UnusualBlockError: A norm is of another kind.
    """
    attention: Any = getattr(layer, "self_attn", None)
    norms = [None if name is None else getattr(layer, name) for name in _norm_names(layer)]
    norms += [part_of(attention, QUERY_NORMS), part_of(attention, KEY_NORMS)]
    of_values = getattr(attention, VALUE_NORM, None)
    ones = None if of_values is None else bare_norm_weight(of_values, attention.head_dim, like)
    norms.append(getattr(layer, INPUT_NORM, None))
    *found, inputs = [None if norm is None else norm_weight(norm, like) for norm in norms]
    weights = BlockNorms(*[*found, ones, inputs])
    if attention is None:
        return weights
    sizes = [None if weight is None else weight.numel() for weight in (weights.query, weights.key)]
    keys, dim = head_sizes(attention)
    usual = [None, None], [dim] * 2, [attention.config.num_attention_heads * dim, keys * dim]
    if sizes not in (([None, None], [dim, None]) if shares_keys(attention) else usual):
        raise UnusualBlockError("it norms queries and keys in another way")
    return weights


def norm_weight(norm: Any, like: Any) -> Tensor:
    """A norm's weight.

    Raises:
        UnusualBlockError: The norm is of another kind than this one.
    """
    if not _are_alike(norm, like):
        raise UnusualBlockError(f"a norm is {type(norm).__name__}")
    weight: Tensor = norm.weight
    return weight


def bare_norm_weight(norm: Any, size: int, like: Any) -> Tensor:
    """Ones [size], since this norm has no weight.

    Raises:
        UnusualBlockError: It is of another kind than the norm ``like``, or has one.
    """
    if not _are_alike(norm, like) or _parts(norm):
        raise UnusualBlockError("a norm that should have no weight is of another kind")
    return torch.ones(size).to(like.weight)


def rotaries_of(decoder: Any) -> tuple[list[Rotary], list[int]]:
    """The kinds of rotary positions of a decoder, and the kind of each layer (-1: it does not know positions).

    Raises:
        UnusualBlockError: Positions are of a kind whose angles depend on more than the position.
    """
    if not any(hasattr(decoder, name) for name in ROTARIES):
        raise UnusualBlockError("its positions are of another kind")
    if (turns := part_of(decoder, ROTARIES)) is None:
        return [Rotary(lambda rows, like: (like.new_empty(rows, 0),) * 2)], [-1] * len(decoder.layers)
    kinds = getattr(turns, "rope_type", None)
    by_type = kinds if isinstance(kinds, dict) else {None: kinds}
    for kind in by_type.values():
        if kind not in ROTARY:
            raise UnusualBlockError(f"its positions are {kind or 'of another kind'}")

    halves = _are_for_halves(turns)

    def angles(names: Sequence[str], rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = turns(like, torch.arange(rows, device=like.device)[None], *names)
        cosines, sines = (torch.cat([table[0]] * (1 + halves), -1).contiguous() for table in (cosines, sines))
        return cosines, sines

    names = list(by_type)
    rotaries = [Rotary(partial(angles, [] if name is None else [name])) for name in names]
    like = last_norm(decoder).weight
    types = [None] * len(decoder.layers) if None in by_type else decoder.config.layer_types[: len(decoder.layers)]
    turning = attention_layers(decoder)
    of_layer = [
        names.index(kind) if layer in turning and _knows_positions(layer.self_attn) else -1
        for kind, layer in zip(types, decoder.layers, strict=True)
    ]
    for kind, layer in zip(of_layer, decoder.layers, strict=True):
        if kind >= 0 and rotaries[kind].tables(1, like)[0].shape[1] > layer.self_attn.head_dim:
            raise UnusualBlockError("its positions turn more than heads")
    return rotaries, of_layer


@torch.no_grad()
def turns_pairs(decoder: Any, rotaries: Sequence[Rotary], kinds: Sequence[int]) -> bool:
    """Whether positions turn neighbours of a head (GLM, ERNIE) and not a number of each half, found by a quarter turn.

    Args:
        decoder: The decoder.
        rotaries: Its kinds of positions.
        kinds: The kind of each layer.

    Raises:
        UnusualBlockError: They do something else.
    """
    turned_layers = [(rotaries[kind], layer) for kind, layer in zip(kinds, decoder.layers, strict=True) if kind >= 0]
    if not turned_layers:
        return False
    rotary, attention = turned_layers[0][0], turned_layers[0][1].self_attn
    turn = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if turn is None:
        return False
    rotated = rotary.tables(1, last_norm(decoder).weight)[0].shape[1]
    halves = _are_for_halves(part_of(decoder, ROTARIES))
    angles = torch.zeros(1, 1, rotated // (1 + halves))
    head = torch.arange(1.0, attention.head_dim + 1).view(1, 1, 1, -1)
    try:
        if "cos" in list(inspect.signature(turn).parameters)[:2]:  # queries and keys one by one
            turned = turn(head, angles, angles + 1)
        else:
            turned = turn(head, head, angles, angles + 1)[0]
    except (TypeError, RuntimeError, IndexError, AttributeError) as error:  # a model's own code asks for something else
        raise UnusualBlockError(f"its positions cannot be tried: {error}") from error
    first, rest = head.tensor_split([rotated], -1)
    left, right = first.chunk(2, -1)
    if torch.equal(turned, torch.cat([-right, left, rest], -1)):
        return False
    if torch.equal(turned, torch.cat([torch.stack([-first[..., 1::2], first[..., ::2]], -1).flatten(-2), rest], -1)):
        return True
    raise UnusualBlockError("its positions turn heads in another way")


def _are_for_halves(turns: Any) -> bool:
    """Whether a column of angles is for both halves of a head (GPT-OSS), which elsewhere have a column each."""
    frequencies = getattr(turns, "inv_freq", None)
    if frequencies is None:
        return False
    columns: int = turns(frequencies, torch.zeros(1, 1, dtype=torch.int64, device=frequencies.device))[0].shape[-1]
    return columns == len(frequencies)


@torch.no_grad()
def query_scales_of(decoder: Any, positions: int) -> Tensor | None:
    """Factors [positions] on turned queries, in the weights' dtype, as Ministral 3 has them; None = none."""
    module, like = sys.modules[type(decoder).__module__], last_norm(decoder).weight
    find, rope = getattr(module, "get_llama_4_attn_scale", None), getattr(decoder.config, "rope_parameters", None) or {}
    if find is None:
        return None
    places = torch.arange(positions, device=like.device)[None]
    scales: Tensor = find(places, rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"])
    return scales.flatten().to(like.dtype)


def _knows_positions(attention: Any) -> bool:
    """False for layers without positions, as SmolLM3 and EXAONE 4 (where only windows have them) mark theirs."""
    windowed = getattr(attention, "sliding_window", None) is None or getattr(attention, "is_sliding", True)
    return bool(getattr(attention, "use_rope", True)) and windowed


def _know(module: nn.Module, parts: set[str], what: str) -> None:
    """Raise an error if a module has parts or parameters that are not known."""
    strange = _parts(module) - parts
    if strange:
        raise UnusualBlockError(f"{what} ({type(module).__name__}) has {', '.join(sorted(strange))}")


def _parts(module: nn.Module) -> set[str]:
    own = {name for name, child in module.named_children() if any(True for _ in child.parameters())}
    return own | {name for name, _ in module.named_parameters(recurse=False)}


def _norm_names(layer: nn.Module) -> tuple[str | None, ...]:
    """The names of ``NORMS`` that fit the layer's parts; Llama's if none do."""
    norms = _parts(layer) - {"self_attn", *MIXERS, *MLPS, *LAYER_INPUTS, INPUT_NORM, *BESIDE, *BESIDE_NORMS}
    return next((names for names in NORMS if {*filter(None, names)} == norms), NORMS[0])


def _are_alike(norm: Any, other: Any) -> bool:
    return type(norm) is type(other) and _epsilon(norm) == _epsilon(other)


def _activation(layer: Any) -> str:
    mlp = mlp_of(layer)
    found = part_of(mlp, ("act_fn", "activation_fn", "activation"))
    return "SiLU" if found is None and hasattr(mlp, "w1") else type(found).__name__


def _epsilon(norm: Any) -> float | None:
    epsilon: float | None = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return epsilon


@torch.no_grad()
def _formula(norm: Any, epsilon: float) -> tuple[float, bool]:
    """What an RMS norm adds to its weight, and whether it rounds the product alone, found by its results.

    Raises:
        UnusualBlockError: It computes something else.
    """
    weight: Tensor = norm.weight
    x = torch.linspace(-1, 2, 4 * len(weight), device=weight.device).to(weight.dtype).view(4, -1)
    unit = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    formulas: dict[tuple[float, bool], Callable[[], Tensor]] = {
        (0.0, False): lambda: weight * unit.to(x.dtype),
        (0.0, True): lambda: (weight.float() * unit).to(x.dtype),
        (1.0, True): lambda: ((1 + weight.float()) * unit).to(x.dtype),
    }
    theirs = norm(x)
    far = {kind: float((compute() - theirs).abs().max()) for kind, compute in formulas.items()}
    nearest = min(far, key=far.__getitem__)
    if not far[nearest] <= 0.01 * float(theirs.abs().max()):
        raise UnusualBlockError(f"its norms are {type(norm).__name__}")
    return nearest
