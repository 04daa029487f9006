"""Options of commands that load a base with its heads, and what they load."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from medusa import MedusaModel

DEFAULT_HEADS = "runs/demo/heads"
ATTENTION = ("auto", "reference", "exact", "flash", "triton")


def add_model_options(model: "argparse._ArgumentGroup") -> None:
    """Options of which base, which heads, and how they run."""
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
