"""A base and its heads at a given cached length, to be stepped from there again and again."""

import torch

from medusa import BaseModel, Draft, DraftHeads, Tree
from medusa.acceptance import Rule, greedy
from medusa.drafters import DecodeState, Drafter, HeadsDrafter, PlainDrafter
from medusa.step import StepResult, decode_step, verify
from medusa.tree_search import typical_tree


def likely_tree(nodes: int, depth: int) -> Tree:
    """The best tree of ``nodes`` nodes for heads that are typical and all alike."""
    return typical_tree(nodes, depth).tree


class Rig:
    """Sequences of ``context`` cached tokens that hold random numbers, since their values decide no time.

    Args:
        base: Prepared for decoding; the layers that the heads read are tapped here.
        heads: On its device and in its dtype, frozen.
        batch: Sequences B.
        context: Cached tokens L of each.
        room: Rows that steps may write behind them.
        seed: Of the random numbers.

    Raises:
        ValueError: Context and room exceed the base's context length.
    """

    @torch.inference_mode()
    def __init__(self, base: BaseModel, heads: DraftHeads, batch: int, context: int, room: int, seed: int = 0) -> None:
        if context + room > base.context_length:
            raise ValueError(
                f"context ({context} tokens) and {room} rows behind it exceed the base's context"
                f" ({base.context_length} tokens); give a smaller --context"
            )
        base = base.tapped(heads.config.feature_layers)
        self.base, self.heads, self.batch, self.context = base, heads, batch, context
        generator = torch.Generator(base.device).manual_seed(seed)
        self.cache = base.new_cache(batch, context + room)
        self.rewind()
        history_BT = torch.randint(
            base.vocab_size, (batch, context + room + 1), device=base.device, generator=generator
        )
        roots_B, positions_B = history_BT[:, context].clone(), self.cache.lengths.clone()
        hidden_BF = torch.randn(batch, base.feature_size, dtype=base.dtype, device=base.device, generator=generator)
        active_B = torch.ones_like(roots_B, dtype=torch.bool)
        self.state = DecodeState(roots_B, hidden_BF, active_B, history_BT, positions_B, torch.zeros_like(roots_B))
        self.verify(Draft.chain(roots_B[:, None]))  # the cache is allocated at its first write
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.keys.normal_(generator=generator)  # memory that was never written is not really there
                layer.values.normal_(generator=generator)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one cached token, all layers."""
        layers = [layer for layer in self.cache.layers if layer.is_initialized]
        buffers = [buffer for layer in layers for buffer in (layer.keys, layer.values)]
        return sum(buffer[0, 0].numel() * buffer.element_size() for buffer in buffers)

    def drafter(self, nodes: int) -> Drafter:
        """A drafter of a fixed tree of ``nodes`` nodes; 1 = plain decoding."""
        if nodes == 1:
            return PlainDrafter()
        tree = likely_tree(nodes, self.heads.config.num_heads)
        return HeadsDrafter(self.heads, self.base, nodes, tree)

    def rewind(self) -> None:
        """Forget what steps have committed."""
        self.cache.lengths.fill_(self.context)
        self.cache.host_lengths = [self.context] * self.batch

    def draft(self, nodes: int) -> Draft:
        """A draft of ``nodes`` nodes."""
        with torch.inference_mode():
            return self.drafter(nodes).propose(self.state)

    @torch.inference_mode()
    def verify(self, draft: Draft) -> torch.Tensor:
        """Verify alone: the pass of the base over a draft, and its logits."""
        return self.base.logits(verify(self.base, self.cache, draft))

    @torch.inference_mode()
    def run(self, drafter: Drafter, rule: Rule = greedy, steps: int = 1) -> list[StepResult]:
        """Whole decode steps, one after the other, from the rig's context on."""
        results, state = [], self.state
        for _ in range(steps):
            results.append(decode_step(self.base, self.cache, drafter, rule, state))
            state = results[-1].state
        self.rewind()
        return results
