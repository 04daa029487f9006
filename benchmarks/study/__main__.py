"""`python -m benchmarks.study`: trains head designs that differ in one thing each, and compares what they draft."""

import argparse
import json
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Any

from benchmarks.study.arguments import parser
from benchmarks.study.variants import Run, plan_runs, read_variants
from medusa.clock import cores
from train.recipe_file import RecipeError, parse_overrides, resolved
from train.run_directory import RunDirectory
from train.stop import Stopped, StopRequest

if TYPE_CHECKING:
    from benchmarks.study.texts import Texts

STATIC_NODES = 64
TEMPERATURES = (0.0, 1.0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 2 wrong use, 130 Ctrl-C, 143 SIGTERM (128 + the signal).
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    options, rest = parser(quick="--quick" in words).parse_known_args(words)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        with StopRequest().listening():
            _study(options, rest, words)
    except KeyboardInterrupt:
        print("stopped; the same command goes on where it was", file=sys.stderr)
        return 130
    except Stopped as stopped:
        print(f"stopped by {Signals(stopped.number).name}; the same command goes on where it was", file=sys.stderr)
        return 128 + stopped.number
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 2
    except (OSError, ValueError, MemoryError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _study(options: argparse.Namespace, rest: Sequence[str], words: Sequence[str]) -> None:
    common = {"data.train": str(_samples(options)), **parse_overrides(rest)}
    if options.base:
        common["base.name"] = options.base
    variants = read_variants(options.variants, options.only)
    runs = plan_runs(options.recipe, common, variants, options.seeds, options.out)
    options.out.mkdir(parents=True, exist_ok=True)

    texts = _texts(options, runs[0].recipe.base.name)
    _train(options, runs, texts)
    evaluations = _evaluations(runs, texts)
    speed = _speed(options, runs, texts, evaluations[runs[0].variant][0]["tree"]) if options.rounds else {}
    _publish(options, _report(options, words, runs, texts, evaluations, speed))


def _data(options: argparse.Namespace) -> Path:
    directory: Path = options.data or options.out / "data"
    return directory


def _samples(options: argparse.Namespace) -> Path:
    """Training samples: a file that the user brought, or the directory that is made."""
    brought = _data(options) / "train.jsonl"
    return brought if brought.exists() else brought.with_suffix("")


def _texts(options: argparse.Namespace, base: str) -> "Texts":
    """Training data, and the texts that designs are measured on; what is there already is kept."""
    from benchmarks.study.inputs import load_base, make_heldout_data, make_training_data, read_prompts
    from benchmarks.study.texts import Questions, make_texts, read_texts

    model, data, path = load_base(base), _data(options), options.out / "texts.json"
    if (samples := _samples(options)).suffix != ".jsonl":
        make_training_data(model, samples, options.train_prompts, options.max_new_tokens)
    make_heldout_data(model, data / "heldout.jsonl", options.prompts, options.max_new_tokens)
    prompts = read_prompts(model, data / "heldout.jsonl", options.prompts, options.max_new_tokens)
    nodes = tuple(sorted(set(options.nodes)))
    questions = Questions(model.base.name, nodes, STATIC_NODES, TEMPERATURES, options.max_new_tokens, prompts)
    if path.is_file() and (texts := read_texts(path)).questions == questions:
        return texts
    texts = make_texts(model, questions)
    texts.write(path)
    return texts


def _train(options: argparse.Namespace, runs: Sequence[Run], texts: "Texts") -> None:
    """Train and evaluate every run that is not done yet, a few at a time."""
    from tqdm import tqdm

    from benchmarks.study.evaluate import evaluated
    from benchmarks.study.pool import Job, Pool

    jobs = []
    for run in runs:
        directory, commands = run.directory, []
        if not RunDirectory(directory).finished(run.recipe):
            commands.append(_train_command(options, run))
        static = run.variant == runs[0].variant
        if commands or evaluated(directory, texts, static) is None:
            words = [str(options.out / "texts.json"), str(directory), *["--static"] * static]
            commands.append([sys.executable, "-m", "benchmarks.study.evaluate", *words])
            jobs.append(Job(run.name, commands, directory / "study.log"))
    threads = str(max(1, cores() // options.processes))
    pool = Pool(options.processes, {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads)})
    bar = tqdm(desc="train and evaluate", total=len(runs), initial=len(runs) - len(jobs), unit="run")
    with bar, closing(pool.run(jobs)) as done:
        for job in done:
            bar.set_postfix_str(job.name, refresh=False)
            bar.update()


def _train_command(options: argparse.Namespace, run: Run) -> list[str]:
    overrides = [word for key, value in run.overrides.items() for word in (f"--recipe.{key}", value)]
    return [sys.executable, "-m", "train", "--recipe", str(options.recipe), *overrides]


def _evaluations(runs: Sequence[Run], texts: "Texts") -> dict[str, list[dict[str, Any]]]:
    """What was found out about each variant, one evaluation per seed."""
    from benchmarks.study.evaluate import evaluated

    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        evaluation = evaluated(run.directory, texts, run.variant == runs[0].variant)
        assert evaluation is not None, f"{run.name} is evaluated"
        found.setdefault(run.variant, []).append(evaluation)
    return found


def _speed(options: argparse.Namespace, runs: Sequence[Run], texts: "Texts", tree: Any) -> dict[str, Any]:
    """Speeds of each variant's first seed; those of an equal question are kept."""
    import torch

    from benchmarks.study.speed import measure_speed
    from medusa.files import write_json

    heads = {run.variant: run.directory / "heads" for run in runs if run.seed == 0}
    sizes = (options.speed_prompts, options.rounds)
    designs = {run.variant: resolved(run.recipe) for run in runs if run.seed == 0}
    asked = [texts.digest, designs, *sizes, torch.get_num_threads()]
    path = options.out / "speed.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if stored.get("asked") != asked:
        stored = {"asked": asked, "figures": measure_speed(texts, heads, {runs[0].variant: tree}, *sizes)}
        write_json(path, stored)
    figures: dict[str, Any] = stored["figures"]
    return figures


def _report(
    options: argparse.Namespace,
    words: Sequence[str],
    runs: Sequence[Run],
    texts: "Texts",
    evaluations: dict[str, list[dict[str, Any]]],
    speed: dict[str, Any],
) -> dict[str, Any]:
    import torch

    from benchmarks.study.report import summarise
    from train.provenance import device_name, software

    names = ("seeds", "max_new_tokens", "speed_prompts", "rounds")
    settings = {name: getattr(options, name) for name in names}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "command": shlex.join(["python", "-m", "benchmarks.study", *words]),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        **software(),
        "settings": settings | {"prompts": len(texts.questions.prompts), "temperatures": TEMPERATURES},
        "variants": {run.variant: run.overrides for run in runs if run.seed == 0},
        "figures": summarise(evaluations),
        "speed": speed,
    }


def _publish(options: argparse.Namespace, report: dict[str, Any]) -> None:
    """Write the report, its tables and its pictures, and print the tables."""
    from benchmarks.study.report import tables
    from medusa.files import write_json

    text, path = tables(report), options.out / "report.json"
    write_json(path, report)
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(f"{text}\nreport: {path}, tables: {path.with_suffix('.md')}")
    if find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed; pip install matplotlib", file=sys.stderr)
        return
    from benchmarks.study.picture import draw

    print(f"pictures: {', '.join(map(str, draw(report, options.out)))}")


if __name__ == "__main__":
    sys.exit(main())
