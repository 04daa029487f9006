"""The layer of attention heads, written out: over a whole text, then token by token along a path."""

from functools import lru_cache

import torch
from torch.nn.functional import linear, rms_norm, silu

from medusa.cache import BLOCK


def recomputed(heads, base, text, path):
    """Logits of the token behind a path below the last token of a text, by the layer over all of it at once."""
    layer, dim = heads.config.layer, heads.config.hidden_size
    ids = [*text, *path]
    hidden = states(base, heads.config.feature_layers, tuple(text))
    if heads.fusion is None:
        state = hidden
    else:
        state = hidden[:, dim:]
        if layer.norm_features:
            parts = [state] if layer.norm_jointly else state.split(dim, dim=-1)
            normed = [rms_norm(part, part.shape[-1:], eps=layer.rms_norm_eps) for part in parts]
            state = torch.cat(normed, dim=-1) * heads.feature_norm.flatten()
        state = linear(state, heads.fusion.weight)
    groups = layer.num_attention_heads // layer.num_key_value_heads
    cosines, sines = layer.angles(len(ids), hidden)
    keys, values, first = [], [], 0
    for end in range(len(text), len(ids) + 1):  # all of the text, then token by token
        embedded = base.embed(torch.tensor(ids[first + 1 : end]))
        both = torch.cat([heads.token_norm(embedded), heads.state_norm(state)], dim=-1)
        query, key, value = (
            linear(both, projection.weight, projection.bias).view(len(both), -1, layer.head_dim)
            for projection in (heads.q_proj, heads.k_proj, heads.v_proj)
        )
        if layer.norm_heads:
            query = rms_norm(query, query.shape[-1:], heads.query_norm.weight, layer.rms_norm_eps)
            key = rms_norm(key, key.shape[-1:], heads.key_norm.weight, layer.rms_norm_eps)
        places = torch.arange(first, end - 1)
        query, key = (turned(x, cosines[places, None], sines[places, None]) for x in (query, key))
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(value.repeat_interleave(groups, dim=1))
        scores = torch.einsum("lhd,thd->hlt", query, torch.cat(keys)) * layer.head_dim**-0.5
        scores = scores.masked_fill(torch.arange(end - 1) > places[:, None], -torch.inf)
        scores = scores.masked_fill(~within(layer.window, (places + 1).clamp(max=len(text) - 1), end - 1), -torch.inf)
        mixed = torch.einsum("hlt,thd->lhd", scores.softmax(-1), torch.cat(values)).flatten(1)
        state = heads.state_norm(state) if layer.norm_before_residual else state
        state = state + linear(mixed, heads.o_proj.weight, heads.o_proj.bias)
        normed = heads.mlp_norm(state)
        gated = silu(linear(normed, heads.gate_proj.weight)) * linear(normed, heads.up_proj.weight)
        out = (state + linear(gated, heads.down_proj.weight))[-1:]
        state, first = heads.output_norm(out) if layer.norm_output else out, end - 1
    return linear(heads.output_norm(out), heads.lm_heads[0])[0]


@lru_cache(maxsize=32)  # many paths stand below one text
@torch.no_grad()
def states(base, layers, text):
    """[T - 1, F]: what the base says of a text before its last token."""
    return base.tapped(layers).hidden_states(torch.tensor([text]))[0, :-1]


def within(window, ends, length):
    """Bool [.., length]: positions that a layer sees of texts which end there, and those behind these ends."""
    index = torch.arange(length)
    if window is None:
        return torch.ones_like(index, dtype=torch.bool)
    first = (ends - window).clamp(min=0) // BLOCK * BLOCK
    return (index < BLOCK) | (index >= first[..., None])


def turned(x, cosines, sines):
    left, right = x.chunk(2, dim=-1)
    return torch.cat(
        [left * cosines[..., :4] - right * sines[..., :4], right * cosines[..., 4:] + left * sines[..., 4:]], -1
    )
