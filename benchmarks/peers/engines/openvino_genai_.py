"""OpenVINO GenAI. ``$OPENVINO_PRECISION`` is its hint of the precision of inference; the default is bf16."""

import os

import numpy
import openvino
import openvino_genai
from loop import Complete, serve

CHAIN, NODES, BRANCHING, DEPTH = 4, 16, 4, 4
"""Drafted tokens of a chain; and of a tree: nodes with the root, children per node, and levels below the root."""


def load(directory: str, mode: str, _: str, draft: str = "") -> Complete:
    """Load the engine in mode ``plain``, ``prompt-lookup``, or with a draft ``eagle3-chain`` or ``eagle3-tree``.

    It completes one prompt after another.
    """
    threads, precision = int(os.environ["OMP_NUM_THREADS"]), os.environ.get("OPENVINO_PRECISION", "bf16")
    how = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
    drafting = {"prompt_lookup": True} if mode == "prompt-lookup" else {}
    if draft:
        drafting = {"draft_model": openvino_genai.draft_model(draft, "CPU", **how)}
    pipeline = openvino_genai.LLMPipeline(directory, "CPU", **how, **drafting)

    def complete(prompts: list[list[int]], new: int, eos: list[int]) -> list[list[int]]:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=new, stop_token_ids=set(eos), ignore_eos=not eos, do_sample=False
        )
        if mode == "prompt-lookup":
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        elif mode == "eagle3-chain":
            config.num_assistant_tokens = CHAIN
        elif mode == "eagle3-tree":
            config.num_assistant_tokens, config.branching_factor, config.tree_depth = NODES - 1, BRANCHING, DEPTH
        outputs = []
        for prompt in prompts:
            ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
            mask = openvino.Tensor(numpy.ones((1, len(prompt)), dtype=numpy.int64))
            answer = pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), config)
            outputs.append([int(token) for token in answer.tokens[0]])
        return outputs

    return complete


serve(load, "openvino-genai")
