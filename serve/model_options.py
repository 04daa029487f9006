"""Flags of commands that load a base with its heads, and what they load."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from medusa.base.names import DTYPES, full_name
from medusa.budget.plan import in_words
from medusa.data.arguments import base_arguments
from medusa.serve.flags import flag

if TYPE_CHECKING:
    from medusa import MedusaModel

DEFAULT_HEADS = "runs/demo/heads"
ATTENTION = ("auto", "reference", "exact", "flash", "triton")


@dataclass(frozen=True)
class ModelOptions:
    """The base, the heads, and how they run."""

    heads: str | None = flag(
        None,
        "directory of the heads, or their Hub id (default: those of the repository for --base smollm2,"
        f" {DEFAULT_HEADS} for embedded once the demo has run, none for other bases or beside a draft model)",
        metavar="DIR",
    )
    base: str | None = flag(
        None,
        "base: embedded, smollm2, a directory, a GGUF file or a Hub id, of a model or a LoRA adapter (default: the one"
        " that the heads name; without heads embedded, or smollm2 where that is missing, as outside of a clone)",
        metavar="NAME",
    )
    draft_model: str | None = flag(
        None, "a smaller model that drafts, with the base's tokenizer; a directory or a Hub id", metavar="NAME"
    )
    chat_template: str | None = flag(
        None, "Jinja template of conversations, also for a base that has none (default: the base's own)", metavar="FILE"
    )
    mtp: bool = flag(False, "load the multi-token-prediction layer that some bases have, which drafts too")
    dtype: str = flag("auto", "type of the weights", choices=DTYPES)
    device: str = flag("auto", "cpu, cuda, cuda:1, ... (default: %(default)s, cuda if there is one)")
    attention: str = flag(
        "auto",
        "attention backend for trees (default: %(default)s, the first of triton and flash that works on a GPU,"
        " exact on a CPU with the C++ kernels)",
        choices=ATTENTION,
    )
    int8: bool = flag(
        False,
        "LOSSY, for CPUs: multiply in 8 bits, with weights of GGUF and other packed files as they are; answers are no"
        " longer those of the base",
    )
    no_graph: bool = flag(
        False, "on a GPU, run decode steps kernel by kernel and not as CUDA graphs (default: graphs on a GPU)"
    )
    tensor_parallel: bool = flag(
        False,
        "divide the base among the processes that torchrun has started: torchrun --nproc_per_node 4 -m medusa serve "
        "--tensor-parallel (default: off)",
    )

    def load(self) -> "MedusaModel":
        """Load the heads and the base; under tensor parallel one process goes on, the others compute with it.

        Raises:
            OSError: They are not there or cannot be read.
            ValueError: They do not fit together, or the chat template cannot be read or is none.
        """
        if self.base:
            full_name(self.base)  # a base that is not there explains why its heads are not
        heads = self.heads_or_default()
        if heads and not Path(heads).is_dir() and heads.count("/") != 1:  # "user/heads" may be on the Hub
            train = "run ./launch.sh first, which trains them, " if heads == DEFAULT_HEADS else ""
            raise FileNotFoundError(
                f"heads ({heads}) not found: {train}name others with --heads, or take --base smollm2, whose heads are"
                " here"
            )
        template = _read_template(self.chat_template) if self.chat_template else None
        import torch
        import transformers

        from medusa import MedusaModel

        if self.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError(
                f"device ({self.device}) is not there: torch finds no GPU; leave --device out, or give cpu"
            )
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()  # prompts are measured before they are cut to the context
        model = MedusaModel.from_pretrained(
            heads,
            **base_arguments(self),
            attention=self.attention,
            graph=False if self.no_graph else None,
            int8=self.int8,
            load_options={"tp_plan": "auto"} if self.tensor_parallel else None,
            mtp=self.mtp,
        )
        if template is not None:
            model.base.tokenizer.chat_template = template
            model.chat_prompt([{"role": "user", "content": "Hello"}])  # what is no template is refused now
        return model

    def heads_or_default(self) -> str | None:
        """The heads that are loaded if none are named; None = no heads."""
        from medusa.base.names import EMBEDDED, default_base, shipped_heads

        base = self.base or default_base()
        untrained = self.base is not None and not Path(DEFAULT_HEADS).is_dir()
        alone = self.draft_model or base != EMBEDDED or untrained
        return self.heads or shipped_heads(base) or (None if alone else DEFAULT_HEADS)


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat template ({path}) cannot be read: {error}; give a Jinja template") from error


def describe(model: "MedusaModel", directory: str | None) -> str:
    """The banner: base, heads, device and dtype."""
    base, heads = model.base, model.heads
    here = f"{Path.cwd()}/"
    lines = [f"base   {base.name.removeprefix(here)} ({base.context_length:,} tokens of context)"]
    if base.source:
        lines.append(f"       {base.source.partition(', expanded')[0] if base.packed else base.source}")
    if heads and directory:
        lines.append(
            f"heads  {directory.removeprefix(here)} ({heads.config.num_heads} {heads.config.architecture} heads)"
        )
    small = model.drafters.parts.draft_model
    if small:
        lines.append(f"draft  {small.name.removeprefix(here)} ({small.num_layers} layers)")
    packed = f", packed weights ({in_words(base.weight_bytes)})" if base.packed else ""
    dtype = str(base.dtype).removeprefix("torch.") + packed + ", fused pass" * base.fused
    where = f"{base.device}, {base.ranks} processes" if base.ranks > 1 else str(base.device)
    lines.append(f"on     {where}, {dtype}, {base.attention.name} attention")
    if base.int8:
        lines.append("LOSSY  products of 8 bits: answers are not those of the base")
    if base.adapter:
        lines.append("TUNED  the base was changed by training (Medusa-2): answers are not those of the original")
    return "\n".join(lines)
