"""transformers."""

import torch
from loop import Complete, serve
from transformers import AutoModelForCausalLM


def load(directory: str, mode: str) -> Complete:
    """``plain`` or ``prompt-lookup``; batches are padded on the left."""
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    how = {"prompt_lookup_num_tokens": 10} if mode == "prompt-lookup" else {}

    @torch.inference_mode()
    def complete(prompts: list[list[int]], new: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, **how
        )
        return out[:, width:].tolist()

    return complete


serve(load)
