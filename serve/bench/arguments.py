"""The command line of ``medusa-bench``; flags that other commands have too mean the same there."""

import argparse
from typing import Any

from data import EMBEDDED
from data.arguments import at_least
from medusa.sampling import GREEDY_DRAFTERS
from serve.chat import ATTENTION

TREE_HELP = "draft a static tree of medusa-bench tree, in place of --nodes and --drafter (default: a tree per step)"
DTYPES = ("auto", "float32", "bfloat16", "float16")
ARCHITECTURES = ("recurrent", "medusa", "markov", "hydra")
EPILOG = """\
OMP_NUM_THREADS sets the CPU threads. Everything that is compared in a report is measured alternately in one run.

  medusa-bench compare --compile
  medusa-bench step --shape qwen3-0.6b --json step.json --picture step.png
  medusa-bench replay --shape llama-1b --nodes 16
  medusa-bench tree --heads runs/demo/heads --keep 16 --out tree.json --picture tree.png
"""


def build_parser() -> argparse.ArgumentParser:
    """All commands."""
    parser = argparse.ArgumentParser(
        prog="medusa-bench",
        description="What a decode step costs on this machine, beside what it could cost at best.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{compare,step,replay,trace,tree,nodes,attention}"
    )
    _add_compare(_command(commands, "compare", "every drafter of trained heads beside plain decoding and transformers"))
    _add_step(_command(commands, "step", "cost of a step against tree size and batch, beside the memory's bound"))
    _add_replay(_command(commands, "replay", "a recorded acceptance trace, forced through the real step of any shape"))
    _add_trace(_command(commands, "trace", "record the acceptance of trained heads, for replay"))
    _add_tree(_command(commands, "tree", "the best static trees for trained heads, beside dynamic ones"))
    _add_attention(_command(commands, "attention", "attention of one layer per backend, beside the memory's bound"))
    _add_nodes(_command(commands, "nodes", "trees sized by measured costs, beside fixed sizes and plain decoding"))
    return parser


def _add_compare(compare: argparse.ArgumentParser) -> None:
    compare.add_argument("--heads", metavar="DIR", help="directory of trained heads (default: those of smollm2)")
    compare.add_argument("--base", metavar="NAME", help="base (default: the one that the heads name)")
    compare.add_argument(
        "--questions",
        metavar="FILE",
        help="a question file of Spec-Bench or MT-bench, with --count questions of each category (default: held-out"
        " prompts of the repository)",
    )
    _add_lengths(compare, count=24)
    _add_rounds(compare, rounds=3)
    compare.add_argument("--compile", action="store_true", help="compile the base's pass (default: off)")
    _add_place(compare)
    _add_json(compare)


def _add_step(step: argparse.ArgumentParser) -> None:
    _add_subject(step)
    _add_heads(step)
    _add_sizes(step, "; 1 is always among them")
    step.add_argument(
        "--baseline",
        action="store_true",
        help="also time transformers generate on an unpacked copy of the weights (twice the memory)",
    )
    step.add_argument("--profile", action="store_true", help="also say where the time of a plain step goes")
    step.add_argument(
        "--memory-steps",
        type=at_least(10),
        default=0,
        metavar="N",
        help="also watch the memory over N more steps of the largest tree (default: off)",
    )
    _add_measuring(step, rounds=10)


def _add_replay(replay: argparse.ArgumentParser) -> None:
    _add_subject(replay)
    _add_heads(replay)
    replay.add_argument(
        "--trace", metavar="FILE", help="made by medusa-bench trace (default: one of the embedded base's heads)"
    )
    replay.add_argument(
        "--nodes", type=at_least(2), metavar="N", help="tree size with the root (default: 16 on a CPU, 64 on a GPU)"
    )
    replay.add_argument(
        "--steps", type=at_least(1), default=64, metavar="N", help="steps per measurement (default: %(default)s)"
    )
    _add_measuring(replay, rounds=3)


def _add_trace(trace: argparse.ArgumentParser) -> None:
    _add_answers(trace, count=8)
    trace.add_argument("--out", required=True, metavar="FILE", help="where the trace goes")
    trace.add_argument(
        "--nodes", type=at_least(2), metavar="N", help="tree budget (default: auto, sized by what steps cost)"
    )
    trace.add_argument(
        "--drafter",
        choices=GREEDY_DRAFTERS,
        help="what guesses (default: heads, as replay drafts)",
    )
    trace.add_argument("--tree", metavar="FILE", help=TREE_HELP)


def _add_tree(tree: argparse.ArgumentParser) -> None:
    _add_answers(tree, count=24)
    tree.add_argument(
        "--calibrate",
        type=at_least(1),
        metavar="N",
        help="count how often the heads are right in the answers to N more prompts (default: the calibration beside the"
        " heads; where there is none, as many prompts as --count)",
    )
    tree.add_argument(
        "--nodes",
        type=_numbers,
        default=[1, 4, 8, 16, 32, 64],
        metavar="N,...",
        help="tree sizes with the root (default: 1,4,8,16,32,64)",
    )
    tree.add_argument(
        "--keep",
        type=at_least(1),
        metavar="N",
        help="size of the tree that is drawn and written (default: the largest)",
    )
    tree.add_argument("--out", metavar="FILE", help="also write that tree there, for --tree")
    _add_report(tree)
    tree.set_defaults(shape=None)


def _add_answers(command: argparse.ArgumentParser, count: int) -> None:
    """Which trained heads answer what."""
    command.add_argument("--heads", required=True, metavar="DIR", help="directory of trained heads")
    command.add_argument("--base", metavar="NAME", help="base (default: the one that the heads name)")
    command.add_argument(
        "--prompts",
        default="heldout",
        metavar="FILE",
        help="JSON lines of prompts or conversations, or heldout: the standard library (default: %(default)s)",
    )
    _add_lengths(command, count)
    _add_place(command)


def _add_lengths(command: argparse.ArgumentParser, count: int) -> None:
    """How much is answered."""
    command.add_argument(
        "--count", type=at_least(1), default=count, metavar="N", help="prompts that are answered (default: %(default)s)"
    )
    command.add_argument(
        "--max-new-tokens", type=at_least(1), default=128, metavar="N", help="tokens per answer (default: %(default)s)"
    )


def _add_nodes(nodes: argparse.ArgumentParser) -> None:
    _add_place(nodes)
    _add_heads(nodes)
    nodes.add_argument(
        "--heads", metavar="DIR", help="trained heads (default: random ones for --base, which are useless)"
    )
    nodes.add_argument(
        "--base", metavar="NAME", help="embedded, a directory or a Hub id (default: what the heads name, or embedded)"
    )
    nodes.add_argument(
        "--nodes", type=_numbers, default=[4, 8, 16, 32], metavar="N,...", help="fixed sizes (default: 4,8,16,32)"
    )
    nodes.add_argument(
        "--drafter", choices=GREEDY_DRAFTERS, default="hybrid", help="what guesses (default: %(default)s)"
    )
    _add_lengths(nodes, count=8)
    _add_rounds(nodes, rounds=5)
    nodes.add_argument("--seed", type=int, default=0, help="of random heads (default: %(default)s)")
    _add_json(nodes)
    nodes.set_defaults(shape=None, picture=None)


def _add_attention(attention: argparse.ArgumentParser) -> None:
    _add_subject(attention)
    _add_sizes(attention)
    _add_measuring(attention, rounds=10)


def _add_sizes(command: argparse.ArgumentParser, note: str = "") -> None:
    command.add_argument(
        "--nodes",
        type=_numbers,
        default=[1, 2, 4, 8, 16, 32, 64, 128],
        metavar="N,...",
        help=f"tree sizes with the root{note} (default: powers of two up to 128)",
    )


def _add_subject(command: argparse.ArgumentParser) -> None:
    """Which base is measured."""
    base = command.add_mutually_exclusive_group()
    base.add_argument(
        "--base",
        default=EMBEDDED,
        metavar="NAME",
        help="embedded, smollm2, a directory or a Hub id (default: %(default)s)",
    )
    base.add_argument(
        "--shape", metavar="NAME", help="random weights of a known shape instead, as qwen3-0.6b, llama-1b, llama-8b"
    )
    _add_place(command)


def _add_heads(command: argparse.ArgumentParser) -> None:
    """What a whole step needs; heads have random weights, since only their shape takes time."""
    command.add_argument(
        "--attention", choices=ATTENTION, default="auto", help="backend of tree attention (default: %(default)s)"
    )
    command.add_argument(
        "--int8", action="store_true", help="LOSSY, for CPUs: weights of 8 bits but in the output layer (default: off)"
    )
    command.add_argument("--compile", action="store_true", help="compile the base's pass (default: off)")
    command.add_argument(
        "--architecture", choices=ARCHITECTURES, default="recurrent", help="of the heads (default: %(default)s)"
    )
    command.add_argument(
        "--num-heads", type=at_least(1), default=5, metavar="K", help="heads, the depth of trees (default: %(default)s)"
    )
    command.add_argument(
        "--feature-layers", type=at_least(0), default=0, metavar="N", help="layers that heads read (default: none)"
    )


def _add_place(command: argparse.ArgumentParser) -> None:
    command.add_argument("--dtype", choices=DTYPES, default="auto", help="type of the weights (default: %(default)s)")
    command.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, ... (default: %(default)s, cuda if there is one)"
    )


def _add_measuring(command: argparse.ArgumentParser, rounds: int) -> None:
    command.add_argument(
        "--batch", type=_numbers, default=[1], metavar="B,...", help="sequences decoded together (default: 1)"
    )
    command.add_argument(
        "--context",
        type=at_least(1),
        default=512,
        metavar="L",
        help="cached tokens of each sequence (default: %(default)s)",
    )
    _add_rounds(command, rounds)
    command.add_argument(
        "--seed", type=at_least(0), default=0, metavar="N", help="of all random numbers (default: %(default)s)"
    )
    _add_report(command)


def _add_rounds(command: argparse.ArgumentParser, rounds: int) -> None:
    command.add_argument(
        "--rounds",
        type=at_least(1),
        default=rounds,
        metavar="N",
        help="measured repetitions; medians count (default: %(default)s)",
    )


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", metavar="FILE", help="also write the report there")


def _add_report(command: argparse.ArgumentParser) -> None:
    _add_json(command)
    command.add_argument("--picture", metavar="FILE", help="also draw it, as PNG")


def _command(commands: Any, name: str, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    return command


def _numbers(text: str) -> list[int]:
    return sorted({at_least(1)(part.strip()) for part in text.split(",")})
