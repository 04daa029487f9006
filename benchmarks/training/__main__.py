"""`python -m benchmarks.training {loss,speed,cache}`: what the trainer costs on this machine, beside the plain way."""

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.arguments import at_least
from train.recipe_file import RecipeError, parse_overrides

if TYPE_CHECKING:
    import torch

RECIPE = "train/recipes/embedded.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 2 wrong use, 130 Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options, rest = parser.parse_known_args(words)
    if rest and options.command == "loss":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    try:
        overrides = parse_overrides(rest)
        for name in ("json", "picture"):
            if path := getattr(options, name, None):
                Path(path).parent.mkdir(parents=True, exist_ok=True)  # a wrong path is found before the work is done
        device, rows = COMMANDS[options.command](options, overrides)
        _publish(options, words, device, rows)
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 2
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _loss(options: argparse.Namespace, _: dict[str, str]) -> tuple["torch.device", list[dict[str, Any]]]:
    import torch

    from benchmarks.machine import choose_device
    from benchmarks.training.loss import measure_loss
    from benchmarks.training.memory import free_bytes

    device = choose_device(options.device)
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = auto if options.dtype == "auto" else getattr(torch, options.dtype)
    sizes = (options.num_heads, options.positions, options.vocab, options.hidden, options.loss_rows)
    return device, measure_loss(*sizes, dtype, device, options.rounds, free_bytes(device))


def _speed(options: argparse.Namespace, overrides: dict[str, str]) -> tuple["torch.device", list[dict[str, Any]]]:
    from transformers.utils.logging import disable_progress_bar

    from benchmarks.training.speed import measure_cache, measure_speed
    from train.recipe_file import read_recipe
    from train.stop import StopRequest
    from train.workers import Workers

    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(f"processes ({os.environ['WORLD_SIZE']}) must be 1; start it without torchrun")
    disable_progress_bar()
    workers = Workers.start(read_recipe(options.recipe, overrides).engine.device, StopRequest())
    with tempfile.TemporaryDirectory() as scratch:
        subject = (options.recipe, overrides, workers, Path(scratch), options.rounds)
        if options.command == "cache":
            return workers.device, measure_cache(*subject)
        return workers.device, measure_speed(*subject, options.micro_batch)


def _publish(options: argparse.Namespace, words: list[str], device: "torch.device", rows: list[dict[str, Any]]) -> None:
    from benchmarks.training.report import draw_loss, environment, table
    from medusa.files import write_json

    report = {"kind": options.command, **environment(device, words), "rows": rows}
    if options.json:
        write_json(Path(options.json), report)
    threads = f", {report['threads']} threads" if report["threads"] else ""
    print(f"{options.command}: {report['device']}{threads}\n{table(rows)}")
    if getattr(options, "picture", None):
        draw_loss(rows, options.picture)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training",
        description="What the trainer costs, beside the plain way of training. OMP_NUM_THREADS sets the CPU threads.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    loss = _command(commands, "loss", "peak memory and time of the loss, beside K full logits with autograd")
    loss.add_argument("--num-heads", type=at_least(1), nargs="+", default=[1, 2, 3, 4, 5], metavar="K", help="heads")
    loss.add_argument("--positions", type=at_least(1), nargs="+", default=[1024, 2048], metavar="M", help="per step")
    loss.add_argument("--vocab", type=at_least(1), nargs="+", default=[4096, 32768, 131072], metavar="V", help="tokens")
    loss.add_argument("--hidden", type=at_least(1), default=256, metavar="D", help="hidden size")
    loss.add_argument("--loss-rows", type=at_least(1), default=1024, help="rows of logits per micro-batch, all heads")
    loss.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto = cuda if there is one")
    loss.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of products; auto = float32 on a CPU"
    )
    loss.add_argument("--picture", metavar="FILE", help="also draw the peak memory into a PNG file")
    speed = _command(commands, "speed", "useful tokens/s of training, beside a trainer written the original way")
    speed.add_argument("--micro-batch", type=at_least(1), default=8, help="conversations per pass of the original way")
    cache = _command(commands, "cache", "epochs that read hidden states from files, beside epochs that compute them")
    for command in (speed, cache):
        command.add_argument("--recipe", default=RECIPE, metavar="FILE", help="YAML; --recipe.KEY VALUE changes it")
    return parser


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False
    )
    command.add_argument("--rounds", type=at_least(1), default=3, help="measurements of each; the median counts")
    command.add_argument("--json", metavar="FILE", help="also write the figures, the machine and the versions")
    return command


COMMANDS = {"loss": _loss, "speed": _speed, "cache": _speed}

if __name__ == "__main__":
    sys.exit(main())
