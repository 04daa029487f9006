"""OpenVINO GenAI. ``$OPENVINO_PRECISION``: what it computes in, as its own hint names it; bf16 unless said."""

import os

import numpy
import openvino
import openvino_genai
from loop import Complete, serve


def load(directory: str, mode: str, _: str) -> Complete:
    """``plain`` or ``prompt-lookup``; one prompt after the other."""
    how = {"prompt_lookup": True} if mode == "prompt-lookup" else {}
    threads, precision = int(os.environ["OMP_NUM_THREADS"]), os.environ.get("OPENVINO_PRECISION", "bf16")
    pipeline = openvino_genai.LLMPipeline(
        directory, "CPU", INFERENCE_NUM_THREADS=threads, INFERENCE_PRECISION_HINT=precision, **how
    )

    def complete(prompts: list[list[int]], new: int, eos: list[int]) -> list[list[int]]:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=new, stop_token_ids=set(eos), ignore_eos=not eos, do_sample=False
        )
        if how:
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        outputs = []
        for prompt in prompts:
            ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
            mask = openvino.Tensor(numpy.ones((1, len(prompt)), dtype=numpy.int64))
            answer = pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), config)
            outputs.append([int(token) for token in answer.tokens[0]])
        return outputs

    return complete


serve(load, "openvino-genai")
