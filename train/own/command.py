"""``medusa heads --base NAME``: heads for a model of your own, in one command and a given time.

It lets the base answer prompts, or takes answers that it gave before, trains heads on them, and compares them with
plain decoding. Each stage does the work of another command (``data prompts``, ``data regenerate``, ``train``), and
writes the files of that command into one directory.
"""

import argparse
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from medusa.data.arguments import up_to
from medusa.data.exchange import Prompt
from medusa.files import digest_of_weights
from medusa.train.own.plan import STAGES, Asked, Plan
from medusa.train.own.screen import Screen, clock
from medusa.train.stop import Stopped, StopRequest

HOURS = 2.0
MOST_HOURS = 1000.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 2 wrong use, 128 + the signal that ended it.
    """
    began = time.monotonic()
    options = _parser().parse_args(arguments)
    console = Console()
    handler = RichHandler(console=console, show_time=False, show_level=False, show_path=False)
    logging.basicConfig(format="%(message)s", handlers=[handler], level=logging.WARNING)
    logging.getLogger("medusa.base.smollm2").setLevel(logging.INFO)  # messages about a download
    try:
        with StopRequest().listening():
            _make(options, Screen(console), began)
    except (KeyboardInterrupt, Stopped) as stopped:
        number = stopped.number if isinstance(stopped, Stopped) else signal.SIGINT
        sys.stderr.write(f"stopped by {signal.Signals(number).name}; the same command continues where it stopped\n")
        return 128 + number
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _make(options: argparse.Namespace, screen: Screen, began: float) -> None:
    """Run all stages; finished ones are skipped."""
    from medusa.train.own.answers import answered
    from medusa.train.own.training import finished, train, write_recipe

    out, asked, found = _checked(options)
    plan = Plan.load(out, asked)
    if plan is not None:
        screen.say(f"{out}: going on with the run that was begun there")
    if plan is None or not answered(plan, out):
        plan = _answers(asked, plan, out, found, screen, began)
    recipe = write_recipe(plan, out)
    if not finished(recipe, out):
        with screen.stage("training", plan.seconds["training"]) as tell:
            train(plan, recipe, out, tell)
    shutil.rmtree(out / "hidden", ignore_errors=True)  # hidden states are large, and useful for this run only
    from medusa.train.own import result

    if not (out / result.FILE).exists():
        with screen.stage("comparison", plan.seconds["comparison"]) as tell:
            result.compare(plan, out, tell)
    result.show(plan, out, screen.console)


def _checked(options: argparse.Namespace) -> tuple[Path, Asked, list[Prompt]]:
    """Check the arguments before anything is loaded; returns the directory, the request and the user's prompts.

    Raises:
        OSError, ValueError: the directory is taken, or the prompts cannot be read.
    """
    from medusa.data.files import sample_files
    from medusa.data.sources import Source
    from medusa.io.hub import fetch_heads
    from medusa.train.own.asked import read_prompts
    from medusa.train.own.plan import FILE

    name = re.sub(r"[^\w.-]+", "-", options.base.removesuffix(".gguf")).strip("-.")
    name = name or Path(options.base).resolve().name
    out = Path(options.out or Path("runs") / name)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out ({out}) is a file; give a directory")
    if (out / "recipe.yaml").exists() and not (out / FILE).exists():
        raise ValueError(f"--out ({out}) holds a run that this command did not begin; give another directory")
    content, found = "", list[Prompt]()
    for path in filter(None, (options.prompts, options.answers)):
        sample_files(Path(path))
    if options.prompts:
        content, found = Source(options.prompts).fingerprint(), read_prompts(options.prompts)
    weights, heads = digest_of_weights(Path(options.base)), ""
    if options.heads:
        heads = digest_of_weights(fetch_heads(options.heads))
    named = options.base, options.hours, options.prompts, content, weights
    return out, Asked(*named, options.answers, options.heads, heads), found


def _answers(asked: Asked, plan: Plan | None, out: Path, found: list[Prompt], screen: Screen, began: float) -> Plan:
    """The stages that need the base in this process: the plan, if there is none, prompts and answers."""
    from transformers.utils.logging import disable_progress_bar

    from medusa.train.own.answers import answer
    from medusa.train.own.asked import division, write_prompts
    from medusa.train.own.measure import free, load

    disable_progress_bar()
    if plan is None:
        plan = _planned(asked, out, found, screen, began)
    if asked.answers:
        return plan
    with screen.stage("prompts", plan.seconds["prompts"]) as tell:
        model = load(asked.base, plan.dtype)
        write_prompts(plan, model, out, tell)
        train, heldout = division(plan, model, out, found)
    with screen.stage("answers", plan.seconds["answers"]) as tell:
        answer(plan, model, out, train, heldout, tell)
    del model
    free()
    return plan


def _planned(asked: Asked, out: Path, found: list[Prompt], screen: Screen, began: float) -> Plan:
    """Measure, make the plan, print it, and save it."""
    from medusa.train.command import processes
    from medusa.train.own.estimate import make_plan
    from medusa.train.own.given import write_given
    from medusa.train.own.measure import measure

    screen.say(f"measuring {asked.base} on a few rows; this takes a minute or two")
    measured = measure(asked, found, out, processes(os.environ), began)
    spent = time.monotonic() - began
    out.mkdir(parents=True, exist_ok=True)
    plan = make_plan(asked, measured, spent, shutil.disk_usage(out).free)
    answers, training, values = measured.answers, measured.training, plan.recipe
    given = bool(measured.given)
    together = "" if given else f"{1 / answers.token:,.0f} tokens/s in {answers.together} answers together, "
    screen.say(
        f"{asked.base}, {measured.facts.parameters / 1e6:,.1f}M parameters: {together}{1 / measured.alone.token:,.1f} "
        f"tokens/s in one answer; in training it reads {1 / training.row_token:,.0f} tokens/s, and heads learn "
        f"{1 / training.position:,.0f} positions/s"
    )
    what = {
        "prompts": f"{plan.written:,} that the base writes" if plan.written else plan.kind,
        "answers": f"{plan.conversations:,} conversations ({plan.kind}) and {plan.heldout} held-out ones, about "
        f"{answers.length:.0f} tokens each; half of them greedy, half drawn",
        "training": f"{values['heads.num_heads']} {values['heads.architecture']} heads, "
        f"{values['optim.epochs']:g} passes over the answers" + f" ({plan.conversations:,} conversations)" * given,
        "comparison": f"{plan.compared} held-out prompts, plainly and with the heads",
    }
    for stage in STAGES[2:] if given else STAGES:
        screen.say(f"  {stage:<10} {clock(plan.seconds[stage]):>8}  {what[stage]}")
    total = sum(plan.seconds.values())
    screen.say(
        f"  {'together':<10} {clock(total):>8}  of {clock(3600 * asked.hours - spent)} that --hours leaves; in {out}"
    )
    if given:
        write_given(plan, measured.given, out)
    plan.save(out)
    return plan


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="medusa heads",
        description="Make heads for a base: the base answers prompts, or has answered them (--answers), heads are "
        "trained on its answers, and decoding with them is compared with plain decoding. After a stop the same command "
        "continues.",
    )
    add = parser.add_argument
    add("--base", required=True, metavar="NAME", help='a directory, a GGUF file, a Hub id, "smollm2" or "embedded"')
    hours = up_to(MOST_HOURS, "a number of hours")
    add("--hours", type=hours, default=HOURS, help=f"time for all of it (default: {HOURS:g})")
    what = "prompts or conversations, in a file or a directory of them (default: the base writes prompts itself)"
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompts", default="", metavar="FILE", help=what)
    what = "answers of the base, in a file or a directory of them, as a server records them (default: the "
    what += "base answers prompts)"
    source.add_argument("--answers", default="", metavar="FILE", help=what)
    what = "trained heads, a directory or their Hub id, whose training continues (default: new heads)"
    add("--heads", default="", metavar="DIR", help=what)
    add("--out", default="", metavar="DIR", help="where everything is written (default: runs/NAME)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
