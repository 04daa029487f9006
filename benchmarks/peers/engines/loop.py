"""What every engine's script does: load, then complete prompts as they come. Standard library only.

One JSON object per line: {"prompts": [[token id]], "new": tokens} in, {"seconds", "outputs": [[token id]]} out.
"""

import json
import os
import sys
import time
from collections.abc import Callable

Complete = Callable[[list[list[int]], int], list[list[int]]]
"""(prompts that share a batch, new tokens of each) -> the new tokens, end-of-sequence ignored."""


def serve(load: Callable[[str, str], Complete]) -> None:
    """Answer until the input ends; arguments are the model and the mode."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print what they like
    complete = load(*sys.argv[1:3])
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        start = time.perf_counter()
        outputs = complete(task["prompts"], task["new"])
        print(json.dumps({"seconds": time.perf_counter() - start, "outputs": outputs}), file=answers, flush=True)
