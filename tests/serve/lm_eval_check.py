"""Run in lm-eval's own environment: what its models say of tasks made from local lines.

Usage: lm_eval_check.py MODEL MODEL_ARGS TASKS
"""

import json
import sys

import lm_eval
from lm_eval.tasks import TaskManager


def main(model: str, arguments: str, tasks: str) -> None:
    """Print log-likelihoods of each request and the figures of each task."""
    found = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=["choice", "perplexity"], task_manager=TaskManager(include_path=tasks),
        bootstrap_iters=0,
    )  # fmt: skip
    said = {task: [sample["resps"] for sample in samples] for task, samples in found["samples"].items()}
    sys.stdout.write(json.dumps({"said": said, "figures": found["results"]}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
