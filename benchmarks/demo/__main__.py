"""The demo: heads are trained on what the embedded base writes, then ways of decoding are compared.

Stages, each a command that you can run yourself: the base answers training prompts (``data regenerate``), torchrun and
DeepSpeed train heads on the answers (``train``), held-out prompts are decoded by transformers, plainly by this engine,
with the heads, with prompt lookup, and with both. Then the same comparison on a real chat model with heads that are in
the repository.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa.base.names import EMBEDDED
from medusa.benchmarks.demo.report import publish
from medusa.data.arguments import at_least, exit_status, show_messages
from medusa.data.child import started

MEDUSA = (sys.executable, "-m", "medusa")
CTRL_C = 130
"""Exit status."""
RECIPES = Path(__file__).parents[2] / "train/recipes"
HELDOUT_PROMPTS = 96
"""Number of held-out prompts on whose answers the heads' accuracy is measured."""
MAX_NEW_TOKENS = 128
REAL_NEW_TOKENS = 64
"""Most new tokens of the real model, whose steps take five times as long."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 2 wrong use, 130 Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    show_messages()
    status = exit_status(lambda: _demo(options))
    if status == CTRL_C:
        print("stopped; the same command continues where it stopped", file=sys.stderr)
    return status


def _demo(options: argparse.Namespace) -> None:
    """Run all stages."""
    run, began = Path(options.run).resolve(), time.monotonic()
    if options.fresh:
        _remove(run)
    _make_heads(run, options.train_prompts)
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    report = _compare(run, options.prompts, options.rounds)
    report["smollm2"] = _compare_real(options.real_prompts, options.real_rounds)
    report["demo_seconds"] = round(time.monotonic() - began, 1)
    publish(run, report)


def _remove(run: Path) -> None:
    """Remove the files of the demo from the directory, and no other files."""
    for name in ("data", "checkpoints", "heads"):
        shutil.rmtree(run / name, ignore_errors=True)
    for name in ("recipe.yaml", "metrics.jsonl", "report.json", "report.png"):
        (run / name).unlink(missing_ok=True)


def _make_heads(run: Path, train_prompts: int) -> None:
    """Run the first two stages; existing results are kept."""
    data = run / "data"
    how = ("--base", EMBEDDED, "--max-new-tokens", str(MAX_NEW_TOKENS))
    regenerate = [*MEDUSA, "data", "regenerate", *how, "--prompts"]
    _say("1/4  the embedded base answers training prompts: heads learn from what it really says")
    _run(*regenerate, "train", "--count", str(train_prompts), "--out", str(data / "train.jsonl"))
    _run(*regenerate, "heldout", "--count", str(HELDOUT_PROMPTS), "--out", str(data / "heldout.jsonl"))
    _say("2/4  torchrun + DeepSpeed train the heads; the base stays frozen")
    # The paths of the recipe itself, so that `medusa train` can continue the demo's run and vice versa.
    run = run.relative_to(Path.cwd()) if run.is_relative_to(Path.cwd()) else run
    data = run / "data"
    paths = {"run": run, "data.train": data / "train.jsonl", "data.heldout": data / "heldout.jsonl"}
    overrides = [word for key, path in paths.items() for word in (f"--recipe.{key}", str(path))]
    import torch

    from medusa.clock import cores

    # Two processes are faster than two threads on two cores; with GPUs `medusa train` starts one process for each.
    processes = {} if torch.cuda.is_available() or cores() != 2 else {"NPROC": os.environ.get("NPROC", "2")}
    recipe = ("--recipe", str(RECIPES / "embedded.yaml"))
    _run(*MEDUSA, "train", *recipe, *overrides, **processes)


def _compare(run: Path, count: int, rounds: int) -> dict[str, Any]:
    """Run the third stage: the embedded base with the heads from the first two stages."""
    _say("3/4  held-out prompts, decoded by transformers, plainly, and with each drafter; compiling takes a while")
    from medusa import MedusaModel
    from medusa.benchmarks.demo.figures import measured
    from medusa.data.prompts import embedded_prompts
    from medusa.train.provenance import software

    model = MedusaModel.from_pretrained(run / "heads")
    prompts = embedded_prompts(model, "heldout", count)
    kinds = {"code": range(0, len(prompts), 2), "chat": range(1, len(prompts), 2)}
    training = json.loads((run / "heads" / "provenance.json").read_text(encoding="utf-8"))["figures"]
    return measured(model, prompts, kinds, rounds, MAX_NEW_TOKENS) | {
        **{f"head_top{rank}": training[f"heldout_top{rank}"] for rank in (1, 5, 10)},
        "steps": training["steps"],
        "train_seconds": round(training["train_seconds"], 1),
        **software(),
    }


def _compare_real(count: int, rounds: int) -> dict[str, Any] | None:
    """Run the fourth stage: a real chat model with heads of the repository; None if the model cannot be loaded."""
    _say("4/4  a real chat model, SmolLM2-135M-Instruct, with heads of the repository; loading takes a minute")
    from medusa import MedusaModel
    from medusa.base.names import shipped_heads
    from medusa.benchmarks.demo.figures import measured
    from medusa.benchmarks.questions import chat_questions

    try:
        model = MedusaModel.from_pretrained(shipped_heads("smollm2"))
    except OSError as error:
        print(f"left out: {error}", flush=True)
        return None
    prompts, kinds = chat_questions(model, count)
    return measured(model, prompts, kinds, rounds, REAL_NEW_TOKENS)


def _run(*words: str, **environment: str) -> None:
    """Run a stage to its end; where a signal ends it, it saves what there is first."""
    with started(words, env=os.environ | environment) as (child, received):
        status = child.wait()
    if received:
        raise KeyboardInterrupt
    if status:
        raise RuntimeError(f"a stage of the demo failed (exit status {status}); its message is above")


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa demo", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--run", default="runs/demo", metavar="DIR", help="where everything is written")
    add("--fresh", action="store_true", help="remove what the demo wrote there first")
    add("--train-prompts", type=at_least(16), default=2400, help="prompts answered for training")
    add("--prompts", type=at_least(2), default=24, help="held-out prompts that are compared")
    add("--rounds", type=at_least(1), default=2, help="measured repetitions")
    add("--real-prompts", type=at_least(1), default=12, help="the same for the real model")
    add("--real-rounds", type=at_least(1), default=1, help="of the real model")
    return parser


if __name__ == "__main__":
    sys.exit(main())
