"""The command line of ``medusa bench``; flags that other commands share have the same meaning there."""

import argparse

from medusa.base.names import DTYPES, default_base
from medusa.data.arguments import at_least
from medusa.sampling import sources
from medusa.serve.model_options import ATTENTION
from medusa.train.config import ARCHITECTURES

QUESTIONS = "a question file of Spec-Bench or MT-bench, or records of prompt; --count questions of each category"
EPILOG = """\
OMP_NUM_THREADS sets the CPU threads. Everything that is compared in a report is measured alternately in one run.

  medusa bench tune --drafters hybrid,heads,prompt-lookup --out tuned.json
  medusa bench run --batch 1,8 --temperature 0 0.8 --picture run.png
  medusa bench run --shape llama-1b --peers peers
  medusa bench accept --questions question.jsonl --count 4 --drafters heads,hybrid --picture accept.png
  medusa bench step --shape qwen3-0.6b --json step.json --picture step.png
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
    text = "Compare drafters with plain decoding and other engines; measure a decode step against its lower bound."
    parser = argparse.ArgumentParser(
        "medusa bench", description=text, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="{run,accept,tune,step,attention}")
    for name, text, add_flags in (
        ("run", "compare drafters and rules with plain decoding, transformers and other engines", _add_run),
        (
            "accept",
            "measure how many guesses the base accepts, by depth, size and kind, and where guesses fail",
            _add_accept,
        ),
        (
            "tune",
            "find the best drafter and tree size here, compared with plain decoding and auto",
            _add_tune,
        ),
        ("step", "measure a step by tree size and batch, with the lower bound that memory sets", _add_step),
        (
            "attention",
            "measure attention of a layer by backend, with the lower bound that memory sets",
            _add_attention,
        ),
    ):
        add_flags(commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}."))
    return parser


def _add_run(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    _add_model(command)
    _add_rounds(command, rounds=3)
    text = "use random weights of a known shape and random prompts; plain decoding unless --methods says otherwise"
    add("--shape", metavar="NAME", help=text)
    text = "drafters, with or without a rule: heads auto:typical (default: all; when sampling also auto:typical, LOSSY)"
    add("--methods", nargs="+", metavar="NAME[:RULE]", help=text)
    text = "0 is greedy, above it tokens are sampled; one run for each (default: 0)"
    add("--temperature", type=float, nargs="+", default=[0.0], metavar="T", help=text)
    add("--batch", type=_numbers, default=[1], metavar="B,...", help="prompts that share a call (default: 1)")
    text = "also measure the engines that benchmarks/peers/setup.sh put into DIR, with greedy decoding"
    add("--peers", metavar="DIR", help=text)
    _add_report(command)


def _add_accept(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    _add_model(command)
    _add_parts(command)
    text = "drafters, separated by commas (default: heads, or the other drafters of a model without heads)"
    add("--drafters", type=_drafters, metavar="NAME,...", help=text)
    text = "sizes of drafts with the root (default: 4,8,16,32,64)"
    add("--nodes", type=_numbers, default=[4, 8, 16, 32, 64], metavar="N,...", help=text)
    text = "keep unlikely guesses too, so that trees are always full, as on a GPU (default: as on this device)"
    add("--full", action="store_true", help=text)
    text = "file of the base's greedy answers; missing ones are generated and added (default: kept in the cache)"
    add("--texts", metavar="FILE", help=text)
    _add_report(command)
    command.set_defaults(shape=None)


def _add_tune(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    _add_model(command)
    _add_rounds(command, rounds=3)
    _add_parts(command)
    text = "drafters to try, separated by commas (default: all that the model has)"
    add("--drafters", type=_drafters, metavar="NAME,...", help=text)
    text = "tree sizes with the root (default: 2,4,6,8,12)"
    add("--nodes", type=_numbers, default=[2, 4, 6, 8, 12], metavar="N,...", help=text)
    add("--temperature", type=float, nargs=1, default=[0.0], metavar="T", help="sample at T (default: 0, greedy)")
    text = "also measure transformers' own generate, with prompt lookup, early exit and the draft model"
    add("--transformers", action="store_true", help=text)
    add("--out", metavar="FILE", help="also write the best settings there, for --settings")
    _add_report(command)
    command.set_defaults(shape=None)


def _add_parts(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--mtp", action="store_true", help="load the multi-token-prediction layer that some bases have (default: off)")
    _add_int8(command)


def _add_int8(command: argparse.ArgumentParser) -> None:
    command.add_argument("--int8", action="store_true", help="LOSSY, for CPUs: products of 8 bits (default: off)")


def _add_model(command: argparse.ArgumentParser) -> None:
    """Flags of the model and the prompts."""
    add = command.add_argument
    add("--heads", metavar="DIR", help="trained heads (default: those of smollm2; none for another --base)")
    add("--base", metavar="NAME", help="base (default: the one that the heads name)")
    add("--draft-model", metavar="NAME", help="a smaller model with the base's tokenizer (default: none)")
    add("--questions", metavar="FILE", help=f"{QUESTIONS} (default: held-out prompts of the repository)")
    add("--count", type=at_least(1), default=12, metavar="N", help="number of prompts (default: %(default)s)")
    text = "tokens per answer (default: %(default)s)"
    add("--max-new-tokens", type=at_least(1), default=128, metavar="N", help=text)
    _add_place(command)
    add("--markdown", metavar="FILE", help="also write the tables there, as Markdown")


def _add_step(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    _add_subject(command)
    _add_heads(command)
    _add_sizes(command, "; 1 is always among them")
    text = "PROJECT the speed with T tokens per step, as trained heads have them elsewhere (default: no projection)"
    add("--tokens-per-step", type=float, metavar="T", help=text)
    add("--profile", action="store_true", help="also say where the time of a plain step goes")
    _add_measuring(command)


def _add_attention(command: argparse.ArgumentParser) -> None:
    _add_subject(command)
    _add_sizes(command)
    _add_measuring(command)


def _add_sizes(command: argparse.ArgumentParser, note: str = "") -> None:
    text = f"tree sizes with the root{note} (default: powers of two up to 128)"
    sizes = [1, 2, 4, 8, 16, 32, 64, 128]
    command.add_argument("--nodes", type=_numbers, default=sizes, metavar="N,...", help=text)


def _add_subject(command: argparse.ArgumentParser) -> None:
    """Flags of the measured base."""
    add = command.add_mutually_exclusive_group().add_argument
    text = "embedded, smollm2, a directory or a Hub id (default: %(default)s)"
    add("--base", default=default_base(), metavar="NAME", help=text)
    text = "random weights of a known shape instead, as qwen3-0.6b, llama-1b, llama-8b"
    add("--shape", metavar="NAME", help=text)
    _add_place(command)


def _add_heads(command: argparse.ArgumentParser) -> None:
    """Flags of heads for whole steps; they have random weights, because only their shape affects time."""
    add = command.add_argument
    add("--attention", choices=ATTENTION, default="auto", help="backend of tree attention (default: %(default)s)")
    _add_int8(command)
    add("--packed", action="store_true", help="with --shape: layers of 4 bits, as of Q4_K (default: off)")
    add("--architecture", choices=ARCHITECTURES, default="recurrent", help="of the heads (default: %(default)s)")
    text = "heads, the depth of trees (default: %(default)s)"
    add("--num-heads", type=at_least(1), default=5, metavar="K", help=text)


def _add_place(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--dtype", choices=DTYPES, default="auto", help="type of the weights (default: %(default)s)")
    add("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: %(default)s, cuda if there is one)")


def _add_measuring(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--batch", type=_numbers, default=[1], metavar="B,...", help="sequences decoded together (default: 1)")
    text = "cached tokens of each sequence (default: %(default)s)"
    add("--context", type=at_least(1), default=512, metavar="L", help=text)
    _add_rounds(command, rounds=10)
    _add_report(command)


def _add_rounds(command: argparse.ArgumentParser, rounds: int) -> None:
    text = "measured repetitions; medians count (default: %(default)s)"
    command.add_argument("--rounds", type=at_least(1), default=rounds, metavar="N", help=text)


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", metavar="FILE", help="also write the report there")
    command.add_argument("--picture", metavar="FILE", help="also draw it, as PNG")


def _numbers(text: str) -> list[int]:
    return sorted({at_least(1)(part.strip()) for part in text.split(",")})


def _drafters(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    try:
        for name in names:
            sources(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return names
