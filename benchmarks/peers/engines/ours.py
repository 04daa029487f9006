"""This engine."""

import torch
from loop import Complete, serve

from medusa import MedusaModel


def load(heads: str, mode: str) -> Complete:
    """``plain``, ``heads``, ``prompt-lookup``, or ``default``: what ``generate`` does by itself."""
    torch.set_num_threads(2)
    model = MedusaModel.from_pretrained(heads)
    how = {"plain": {"nodes": 1}, "default": {}}.get(mode, {"drafter": mode})

    def complete(prompts: list[list[int]], new: int) -> list[list[int]]:
        return [out.tokens for out in model.generate(prompts, max_new_tokens=new, ignore_eos=True, **how)]

    return complete


serve(load)
