"""llama.cpp, through llama-cpp-python."""

import os

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from loop import Complete, serve


def load(file: str, mode: str, room: str) -> Complete:
    """Load the engine in mode ``plain`` or ``prompt-lookup``; it completes one prompt after another."""
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=2) if mode == "prompt-lookup" else None  # its advice for CPUs
    threads = int(os.environ["OMP_NUM_THREADS"])
    model = llama_cpp.Llama(
        file, n_ctx=int(room), n_batch=512, n_threads=threads, n_threads_batch=threads, draft_model=lookup,
        logits_all=lookup is not None, verbose=False,
    )  # fmt: skip

    def complete(prompts: list[list[int]], new: int, eos: list[int]) -> list[list[int]]:
        outputs = []
        for prompt in prompts:
            model.reset()
            tokens: list[int] = []
            for token in model.generate(prompt, temp=0.0, top_k=1):
                tokens.append(token)
                if len(tokens) == new or token in eos:
                    break
            outputs.append(tokens)
        return outputs

    return complete


serve(load, "llama-cpp-python")
