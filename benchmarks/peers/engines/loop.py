"""The main loop of every engine's script: load, then complete prompts as they arrive. Standard library only.

One JSON object per line: first {"version"} out; then {"prompts": [[token id]], "new": tokens, "eos": [token id]} in and
{"outputs": [[token id]]} out.
"""

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version

Complete = Callable[[list[list[int]], int, list[int]], list[list[int]]]
"""(prompts that share a batch, most new tokens of each, tokens that end an answer) -> the new tokens."""


def serve(load: Callable[..., Complete], package: str) -> None:
    """Answer requests until the input ends.

    Arguments of the script: model, mode, most tokens of a prompt and its answer, and heads if the mode needs them.

    Args:
        load: Makes the function that completes prompts from these arguments.
        package: The package whose version is reported.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines may print anything
    complete = load(*sys.argv[1:])
    print(json.dumps({"version": version(package)}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        outputs = complete(task["prompts"], task["new"], task["eos"])
        print(json.dumps({"outputs": outputs}), file=answers, flush=True)
