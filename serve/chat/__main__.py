"""Chat with a base and its heads in a terminal, or through pipes: ``medusa-chat``."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from data.arguments import show_messages
from medusa.sampling import RULES, sources
from serve.chat.commands import COMMANDS
from serve.chat.conversation import Conversation, Settings, tree_budget
from serve.chat.repl import Repl
from serve.chat.terminal import Terminal

if TYPE_CHECKING:
    from medusa import MedusaModel

DEFAULT_HEADS = "runs/demo/heads"
ATTENTION = ("auto", "reference", "exact", "flash", "triton")

EPILOG = """\
With a terminal: /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.
Without one: every line of the input is a message; answers go to stdout, everything else to stderr.

  medusa-chat --temperature 0.8 --colour
  echo 'Write a Python function that reverses a list.' | medusa-chat
"""


def drafter_name(text: str) -> str:
    """A drafter's name as the user writes it.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    try:
        sources(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def build_parser() -> argparse.ArgumentParser:
    """The command line; every flag that other commands have too means the same there."""
    settings = Settings()
    parser = argparse.ArgumentParser(
        prog="medusa-chat",
        description="Chat with a base model that decodes several tokens per step with its heads.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--heads",
        metavar="DIR",
        help=f"directory of the heads, or their Hub id (default: those of the repository for --base smollm2,"
        f" {DEFAULT_HEADS} for embedded, none for other bases or beside a draft model)",
    )
    model.add_argument(
        "--base",
        metavar="NAME",
        help="base: embedded, smollm2, a directory or a Hub id (default: the one that the heads name)",
    )
    model.add_argument(
        "--draft-model",
        metavar="NAME",
        help="a smaller model with the base's tokenizer that guesses, a directory or a Hub id (default: none)",
    )
    model.add_argument(
        "--mtp",
        action="store_true",
        help="load the multi-token-prediction layer that some bases bring, which guesses too (default: off)",
    )
    model.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="type of the weights (default: %(default)s)",
    )
    model.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, ... (default: %(default)s, cuda if there is one)"
    )
    model.add_argument(
        "--attention",
        default="auto",
        choices=ATTENTION,
        help="what computes attention over trees (default: %(default)s, the first of triton and flash that"
        " works on a GPU, exact on a CPU with a compiler)",
    )
    model.add_argument(
        "--int8",
        action="store_true",
        help="LOSSY, for CPUs: round the base's weights to 8 bits; answers are no longer those of the base"
        " (default: off)",
    )
    model.add_argument(
        "--no-graph",
        action="store_true",
        help="on a GPU, run decode steps kernel by kernel and not as CUDA graphs (default: graphs on a GPU)",
    )
    answers = parser.add_argument_group("answers")
    answers.add_argument("--system", default="", metavar="TEXT", help="system prompt (default: none)")
    answers.add_argument(
        "--max-new-tokens",
        type=int,
        default=settings.max_new_tokens,
        metavar="N",
        help="longest answer, in tokens (default: %(default)s)",
    )
    answers.add_argument(
        "--temperature",
        type=float,
        default=settings.temperature,
        metavar="X",
        help="0 is greedy, above it tokens are sampled (default: %(default)s)",
    )
    answers.add_argument(
        "--top-p",
        type=float,
        default=settings.top_p,
        metavar="P",
        help="sample from the likeliest tokens with this much probability (default: %(default)s, off)",
    )
    answers.add_argument(
        "--top-k",
        type=int,
        default=settings.top_k,
        metavar="N",
        help="sample from this many likeliest tokens (default: %(default)s, off)",
    )
    answers.add_argument(
        "--repetition-penalty",
        type=float,
        default=settings.repetition_penalty,
        metavar="X",
        help="above 1, what occurred before becomes less likely (default: %(default)s, off)",
    )
    answers.add_argument(
        "--seed", type=int, default=settings.seed, metavar="N", help="of the sampling noise (default: %(default)s)"
    )
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument(
        "--acceptance",
        choices=RULES,
        default=settings.acceptance,
        help="how draft tokens are accepted. greedy and sampling are lossless: the answer is that of the base alone."
        " speculative is lossless in distribution: answers are as likely as those of the base alone, but for a seed"
        " not the same. typical is LOSSY: faster, but answers can differ"
        " (default: greedy at temperature 0, else sampling)",
    )
    decoding.add_argument(
        "--nodes",
        type=tree_budget,
        default=settings.nodes,
        metavar="N",
        help="tree budget, in tokens per verify pass; 1 is plain decoding (default: auto, what brings the most tokens"
        " per second, found out as it runs)",
    )
    decoding.add_argument(
        "--drafter",
        type=drafter_name,
        default=settings.drafter,
        metavar="NAME",
        help="what guesses: heads, prompt-lookup (what followed the last words earlier in the text), ngram (and in"
        " earlier answers), draft-model, early-exit (the base's first layers), mtp, several of them joined by +; hybrid"
        " is heads+prompt-lookup; heads-sampled draws from the heads, for speculative acceptance. Under greedy and"
        " sampling the answer does not depend on it (default: auto, the fastest of what there is)",
    )
    decoding.add_argument(
        "--tree",
        metavar="FILE",
        help="draft a static tree of medusa-bench tree, in place of --nodes and --drafter (default: a tree per step)",
    )
    decoding.add_argument(
        "--settings",
        metavar="FILE",
        help="drafter and nodes that medusa-bench tune has found, in place of --nodes and --drafter (default: none)",
    )
    decoding.add_argument(
        "--ngrams",
        metavar="FILE",
        help="what the drafter ngram has learned: read at the start if the file is there, written at the end (default:"
        " kept in memory)",
    )
    parser.add_argument("--colour", action="store_true", help="colour the text that was guessed (default: off)")
    return parser


def load_model(args: argparse.Namespace) -> "MedusaModel":
    """Load the heads and the base that the flags name.

    Raises:
        OSError: If the heads or the base are not there or cannot be read.
        ValueError: If they do not fit together.
    """
    from data import EMBEDDED, resolve_base_name, shipped_heads

    alone = args.draft_model or args.base not in (None, EMBEDDED)
    args.heads = args.heads or shipped_heads(args.base or "") or (None if alone else DEFAULT_HEADS)
    if args.heads and not Path(args.heads).is_dir() and args.heads.count("/") != 1:  # "user/heads" may be on the Hub
        raise FileNotFoundError(
            f"heads ({args.heads}) not found: run ./launch.sh first, which trains them, or name others with --heads"
        )
    import torch
    import transformers

    from medusa import MedusaModel

    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device ({args.device}) is not there: torch finds no GPU; leave --device out, or give cpu")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # prompts are measured before they are cut to the context
    return MedusaModel.from_pretrained(
        args.heads,
        base=resolve_base_name(args.base) if args.base else None,
        dtype=None if args.dtype == "auto" else getattr(torch, args.dtype),
        device=None if args.device == "auto" else args.device,
        attention=args.attention,
        graph=False if args.no_graph else None,
        int8=args.int8,
        draft_model=resolve_base_name(args.draft_model) if args.draft_model else None,
        mtp=args.mtp,
    )


def describe(model: "MedusaModel", directory: str | None) -> str:
    """The banner: which base, which heads, where and in what type they run."""
    base, heads = model.base, model.heads
    lines = [f"base   {base.name.removeprefix(f'{Path.cwd()}/')} ({base.context_length:,} tokens of context)"]
    if heads:
        lines.append(f"heads  {directory} ({heads.config.num_heads} {heads.config.architecture} heads)")
    small = model.drafters.parts.draft_model
    if small:
        lines.append(f"draft  {small.name.removeprefix(f'{Path.cwd()}/')} ({small.num_layers} layers)")
    dtype = str(base.dtype).removeprefix("torch.") + ", fused pass" * base.fused
    lines.append(f"on     {base.device}, {dtype}, {base.attention.name} attention")
    if base.int8:
        lines.append("LOSSY  weights rounded to 8 bits: answers are not those of the base")
    if base.adapter:
        lines.append("TUNED  the base was changed by training (Medusa-2): answers are not those of the original")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chat.

    Returns:
        Exit status: 0 at the end of the input, 1 for a failure, 2 for wrong use, 130 after Ctrl-C outside of an answer.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    show_messages()
    try:
        settings = Settings(**{field.name: getattr(args, field.name) for field in fields(Settings)})
    except ValueError as error:
        parser.error(str(error))
    for name in ("tree", "settings"):
        if (file := getattr(args, name)) and (args.nodes is not None or args.drafter is not None):
            parser.error(f"{name} ({file}) takes the place of --nodes and --drafter; leave them out")
    if args.tree and args.settings:
        parser.error(f"tree ({args.tree}) and settings ({args.settings}) both say what is drafted; leave one out")
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    terminal = Terminal(sys.stdin, sys.stdout, sys.stderr, colour=args.colour)
    try:
        from medusa import Prefix, load_settings, load_tree
        from medusa.drafters.ngram import NgramCache

        tree = load_tree(args.tree) if args.tree else None
        if args.settings:
            found = load_settings(args.settings)
            settings = replace(settings, drafter=found.drafter, nodes=found.nodes)
        model = load_model(args)

        title = describe(model, args.heads)
        if settings.nodes is None and tree is None:
            title += "\n" + model.explain(settings.drafter)
        if args.ngrams and Path(args.ngrams).exists():
            model.drafters.parts.ngrams = NgramCache.load(args.ngrams)
        try:
            Repl(model, terminal, COMMANDS, Conversation(args.system), settings, title, Prefix(), tree).run()
        finally:
            if args.ngrams:
                model.ngrams.save(args.ngrams)
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            terminal.error(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
