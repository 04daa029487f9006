"""The demo: heads are trained on what the embedded base writes, then ways of decoding are compared.

Stages, each a command that you can run yourself: the base answers training prompts (``data regenerate``), torchrun and
DeepSpeed train heads on the answers (``train``), held-out prompts are decoded by transformers, plainly by this engine,
with the heads, with prompt lookup, and with both.
"""

import argparse
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.arguments import at_least

ROOT = Path(__file__).parent.parent
HELDOUT_PROMPTS = 96
"""Answers that the heads' accuracy is measured on."""
MAX_NEW_TOKENS = 128
LABELS = {"hybrid": "heads + lookup (default)", "heads": "heads", "prompt-lookup": "prompt lookup"}
"""What is compared with plain decoding, the default first; ``heads-sampled`` is for temperatures above 0."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 2 wrong use, 130 Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    run = Path(options.run).resolve()
    began = time.monotonic()
    try:
        if options.fresh:
            _remove(run)
        _make_heads(run, options.train_prompts)
        report = _compare(run, options.prompts, options.rounds, options.compile)
        report["demo_seconds"] = round(time.monotonic() - began, 1)
        _publish(run, report)
    except subprocess.CalledProcessError as error:
        print(f"a stage of the demo failed (exit status {error.returncode}); its message is above", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on where it was", file=sys.stderr)
        return 130
    return 0


def _remove(run: Path) -> None:
    """Remove what the demo writes, and nothing else that may be in the directory."""
    for name in ("data", "checkpoints", "heads"):
        shutil.rmtree(run / name, ignore_errors=True)
    for name in ("recipe.yaml", "metrics.jsonl", "report.json", "report.png"):
        (run / name).unlink(missing_ok=True)


def _make_heads(run: Path, train_prompts: int) -> None:
    """The first two stages; what is there already is kept."""
    data = run / "data"
    regenerate = [sys.executable, "-m", "data", "regenerate", "--max-new-tokens", str(MAX_NEW_TOKENS), "--prompts"]
    _say("1/3  the embedded base answers training prompts: heads learn from what it really says")
    _run(*regenerate, "train", "--count", str(train_prompts), "--out", str(data / "train.jsonl"))
    _run(*regenerate, "heldout", "--count", str(HELDOUT_PROMPTS), "--out", str(data / "heldout.jsonl"))
    _say("2/3  torchrun + DeepSpeed train the heads; the base stays frozen")
    # As the recipe itself names them, so that ./launch.sh train goes on with the demo's run and the other way round.
    run = run.relative_to(ROOT) if run.is_relative_to(ROOT) else run
    data = run / "data"
    paths = {"run": run, "data.train": data / "train.jsonl", "data.heldout": data / "heldout.jsonl"}
    overrides = [word for key, path in paths.items() for word in (f"--recipe.{key}", str(path))]
    import torch

    # Two processes are faster than two threads on two cores; with GPUs launch.sh starts one process for each.
    processes = {} if torch.cuda.is_available() or _cores() != 2 else {"NPROC": os.environ.get("NPROC", "2")}
    recipe = ("--recipe", str(ROOT / "train/recipes/embedded.yaml"))
    _run(str(ROOT / "launch.sh"), "train", *recipe, *overrides, **processes)


def _compare(run: Path, count: int, rounds: int, compiled: bool) -> dict[str, Any]:
    """The third stage: the same held-out prompts, decoded by transformers, plainly, and with each drafter."""
    _say("3/3  the same held-out prompts, decoded by transformers, plainly, and with each drafter")
    import torch
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    from data.prompts import embedded_prompts
    from medusa import MedusaModel
    from serve.compare import compare, identical, medusa_engine, repeated_share, transformers_engine

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = MedusaModel.from_pretrained(run / "heads", compiled=compiled)
    dtype, device = model.base.dtype, model.base.device
    plain_transformers = AutoModelForCausalLM.from_pretrained(model.base.name, dtype=dtype).to(device)
    prompts = embedded_prompts(model, "heldout", count)
    engines = {
        "transformers": transformers_engine(plain_transformers, MAX_NEW_TOKENS),
        "plain": medusa_engine(model, MAX_NEW_TOKENS, nodes=1),
        **{name: medusa_engine(model, MAX_NEW_TOKENS, drafter=name) for name in LABELS},
    }
    timings = compare(engines, prompts, rounds, shown=True)
    kinds = {"code": range(0, len(prompts), 2), "chat": range(1, len(prompts), 2)}
    speeds = {name: timing.tokens_per_second for name, timing in timings.items()}

    exact = MedusaModel.from_pretrained(run / "heads", dtype=torch.float32)
    ways: dict[str, Any] = {"plain": {"nodes": 1}} | {name: {"drafter": name} for name in LABELS}
    plain, *drafted = (
        [exact.generate(p, max_new_tokens=MAX_NEW_TOKENS, **how) for p in tqdm(prompts, desc=f"float32, {name}")]
        for name, how in ways.items()
    )
    texts, outputs = [o.tokens for o in plain], drafted[0]
    same = {name: identical([o.tokens for o in d], texts) for name, d in zip(LABELS, drafted, strict=True)}
    training = json.loads((run / "heads" / "provenance.json").read_text(encoding="utf-8"))["figures"]

    drafters = {
        name: {
            "tokens_per_step": round(timings[name].tokens_per_step, 3),
            **{f"tokens_per_step_{kind}": round(timings[name].of(at).tokens_per_step, 3) for kind, at in kinds.items()},
            "tokens_per_s": round(speeds[name], 1),
            "speedup": round(timings[name].speedup_over(timings["plain"]), 3),
            "speedup_over_transformers": round(timings[name].speedup_over(timings["transformers"]), 3),
            "identical_outputs": same[name],
        }
        for name in LABELS
    }
    default_drafter = next(iter(LABELS))
    default = drafters[default_drafter]
    return {
        "drafter": default_drafter,
        "tokens_per_step": default["tokens_per_step"],
        "speedup": default["speedup"],
        "speedup_over_transformers": default["speedup_over_transformers"],
        "plain_tokens_per_s": round(speeds["plain"], 1),
        "plain_speedup_over_transformers": round(timings["plain"].speedup_over(timings["transformers"]), 3),
        "medusa_tokens_per_s": default["tokens_per_s"],
        "hf_tokens_per_s": round(speeds["transformers"], 1),
        "identical_outputs": {
            "count": default["identical_outputs"],
            "total": len(prompts),
            "dtype": "float32",
            "against": "plain greedy",
        },
        "drafters": drafters,
        "head_top1": training["heldout_top1"],
        "head_top5": training["heldout_top5"],
        "head_top10": training["heldout_top10"],
        "steps": training["steps"],
        "train_seconds": round(training["train_seconds"], 1),
        "rates": {name: [round(r, 1) for r in timing.rates] for name, timing in timings.items()},
        "repeated_4grams": round(repeated_share([o.tokens for o in outputs]), 3),
        "prompts": len(prompts),
        "max_new_tokens": MAX_NEW_TOKENS,
        "nodes": "auto",
        "dtype": str(dtype).removeprefix("torch."),
        "compiled": model.base.compiled,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "sample": _sample(model.base.tokenizer, prompts, outputs),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "deepspeed")}
        | {"python": platform.python_version()},
    }


def _sample(tokenizer: Any, prompts: Sequence[list[int]], outputs: Sequence[Any]) -> dict[str, Any]:
    """The chat answer with the most drafted tokens that ended by itself, as (text, drafted) runs."""
    ended = [i for i in range(1, len(outputs), 2) if outputs[i].finish_reason == "eos"] or [1]
    best = max(ended, key=lambda i: outputs[i].tokens_per_step)
    pieces = [
        (tokenizer.decode([token], skip_special_tokens=True), drafted)
        for token, drafted in zip(outputs[best].tokens, outputs[best].drafted, strict=True)
    ]
    return {"prompt": tokenizer.decode(prompts[best], skip_special_tokens=True).strip(), "pieces": pieces}


def _publish(run: Path, report: dict[str, Any]) -> None:
    """Write the report and the picture, print the table, and say what to try next."""
    from rich.console import Console
    from rich.table import Table

    path = run / "report.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    picture = run / "report.png"
    try:
        from serve.picture import draw
    except ImportError as error:  # on a bare machine the figures count
        print(f"no picture: {error}", file=sys.stderr)
    else:
        draw(report, picture)
    engine = f"{report['dtype']}, {'compiled, ' if report['compiled'] else ''}{report['threads']} threads"
    table = Table(title=f"{report['prompts']} held-out prompts, greedy, {engine}")
    for heading in ("decoding", "tokens/s", "tokens per step", "speedup over plain"):
        table.add_column(heading, justify="left" if heading == "decoding" else "right")
    for name, speed, steps, ratio in (
        ("transformers generate", report["hf_tokens_per_s"], 1.0, 1 / report["plain_speedup_over_transformers"]),
        ("plain, this engine", report["plain_tokens_per_s"], 1.0, 1.0),
        *(
            (LABELS[key], d["tokens_per_s"], d["tokens_per_step"], d["speedup"])
            for key, d in reversed(report["drafters"].items())
        ),
    ):
        table.add_row(name, f"{speed:.0f}", f"{steps:.2f}", f"{ratio:.2f}x")
    Console().print(table)
    counts = ", ".join(f"{LABELS[name]} {drafter['identical_outputs']}" for name, drafter in report["drafters"].items())
    print(f"identical outputs in float32, of {report['prompts']}: {counts}")
    print(f"{report['repeated_4grams']:.0%} of the 4-grams repeat the same answer: the more, the better lookup works")
    print(f"report: {path}    picture: {picture}" if picture.is_file() else f"report: {path}")
    print("next:   ./launch.sh chat --colour      talk to the model and see what was guessed")
    print("        ./launch.sh train --recipe train/recipes/embedded.yaml --recipe.run runs/medusa \\")
    print("            --recipe.heads.architecture medusa      train another design on the same answers")


def _run(*words: str, **environment: str) -> None:
    subprocess.run(words, check=True, cwd=ROOT, env=os.environ | environment)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _say(text: str) -> None:
    print(f"\n{text}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./launch.sh demo", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--run", default="runs/demo", metavar="DIR", help="where everything is written")
    parser.add_argument("--fresh", action="store_true", help="remove what the demo wrote there first")
    parser.add_argument(
        "--train-prompts",
        type=at_least(16),
        default=4000,
        help="prompts answered for training",
    )
    parser.add_argument("--prompts", type=at_least(2), default=24, help="held-out prompts that are compared")
    parser.add_argument(
        "--no-compile",
        dest="compile",
        action="store_false",
        help="compare without compiling the base's pass: saves up to a minute, and both of our speeds drop",
    )
    parser.add_argument("--rounds", type=at_least(1), default=3, help="measured repetitions; the median counts")
    return parser


if __name__ == "__main__":
    sys.exit(main())
