"""Decodes prompts with vLLM and counts the draft tokens that it accepts; runs in vLLM's environment.

`python vllm_check.py JOB.json RESULT.json`. The job has `base`, `prompts` (token ids), `max_new_tokens`, and `engines`:
by name, what each of them is built with beyond what all of them are.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engines, one after the other, share one start-up
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores may be shared with other tests
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
COUNTERS = "vllm:spec_decode_num_"


def decode(job: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """One engine's answers; where it drafts, also how often, and how many draft tokens it accepts by position."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        job["base"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,  # a prompt that is cached whole would begin with a padded draft
        disable_log_stats=False,
        **options,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    sampling = SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"])
    outputs = engine.generate(prompts, sampling, use_tqdm=False)
    metrics = {metric.name: metric for metric in engine.get_metrics()}
    result: dict[str, Any] = {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}
    if COUNTERS + "drafts" in metrics:
        result["drafts"] = metrics[COUNTERS + "drafts"].value
        result["accepted"] = metrics[COUNTERS + "accepted_tokens_per_pos"].values
    return result


def main(job_file: str, result_file: str) -> None:
    os.environ.update(SETTINGS)
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    result = {name: decode(job, options) for name, options in job["engines"].items()}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
