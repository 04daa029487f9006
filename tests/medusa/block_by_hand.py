"""The layers of block heads, written out: a text, and the block of rows behind it, seen by itself."""

import torch
from torch.nn.functional import linear, rms_norm, silu

from tests.medusa.layer_by_hand import states, turned, within


def recomputed(heads, base, text, path):
    """Logits of the token behind a path below the last token of a text."""
    config, layer, dim = heads.config, heads.config.layer, heads.config.hidden_size
    end, depths, groups = len(text) - 1, config.block_rows, layer.num_attention_heads // layer.num_key_value_heads
    hidden = state = states(base, config.feature_layers, tuple(text))
    if heads.fusion is not None:
        taps = hidden[:, dim:].unflatten(1, (-1, dim))
        if layer.norm_features:
            taps = rms_norm(taps, (dim,), eps=layer.rms_norm_eps) * heads.feature_norm
        state = linear(taps.flatten(1), heads.fusion.weight)
    if config.mask_token is None:
        root = linear(heads.root_norm(base.embed(torch.tensor(text[-1]))), heads.root_proj.weight)
        rows = torch.stack([state[-1] + root + heads.depths[depth] for depth in range(depths)])
    else:
        rows = base.embed(torch.tensor([text[-1]] + [config.mask_token] * (depths - 1)))
    cosines, sines = (table[: end + depths, None] for table in layer.angles(end + depths, hidden))
    for index, block in enumerate(heads.layers):
        read = torch.cat([heads.text_norm(state), block.input_norm(rows)])
        query, key, value = (
            linear(read, projection.weight, projection.bias).view(len(read), -1, layer.head_dim)
            for projection in (block.q_proj, block.k_proj, block.v_proj)
        )
        if layer.norm_heads:
            query = rms_norm(query, (layer.head_dim,), block.query_norm.weight, layer.rms_norm_eps)
            key = rms_norm(key, (layer.head_dim,), block.key_norm.weight, layer.rms_norm_eps)
        query, key = (turned(x, cosines, sines)[first:] for x, first in ((query, end), (key, 0)))
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(groups, dim=1)) * layer.head_dim**-0.5
        scores = scores.masked_fill(~within(layer.window, torch.tensor(end), end + depths), -torch.inf)
        if config.layer_windows and (window := config.layer_windows[index]):
            apart = torch.arange(end, end + depths)[:, None] - torch.arange(end + depths)
            scores = scores.masked_fill(apart >= window, -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value.repeat_interleave(groups, dim=1)).flatten(1)
        rows = rows + linear(mixed, block.o_proj.weight, block.o_proj.bias)
        normed = block.mlp_norm(rows)
        gated = silu(linear(normed, block.gate_proj.weight)) * linear(normed, block.up_proj.weight)
        rows = rows + linear(gated, block.down_proj.weight)
    feature = heads.output_norm(rows[config.skip_root + len(path)]) * (1 if heads.gain is None else heads.gain)
    output, last = base.lm_head_weight if heads.lm_heads is None else heads.lm_heads[0], [*text, *path][-1]
    if not config.rank:
        return linear(feature, output)
    if config.own_correction:
        return linear(feature, output) + heads.up.weight @ heads.down.weight[last]
    before = rms_norm(base.embed(torch.tensor(last)), (dim,))
    return linear(feature + heads.up.weight @ (heads.down.weight @ before), output)
