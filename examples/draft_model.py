"""A pair of models of one family: how many tokens K should the smaller one draft for the larger one?

    python examples/draft_model.py --target facebook/opt-350m --draft facebook/opt-125m
    python examples/draft_model.py --target openai-community/gpt2-large --draft openai-community/gpt2

Both need the same tokenizer.

Chains of exactly K tokens, greedy and sampled, beside plain decoding of the same engine; the last row is what the
engine finds out by itself. All texts are plain decoding's, token for token, and the table counts them.
"""

import argparse

from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from medusa import MedusaModel
from medusa.acceptance.logits import NO_NOISE, Warper
from medusa.base.names import EMBEDDED, full_name
from medusa.data.prompts import embedded_prompts, file_prompts
from medusa.drafters import ModelDrafter, SmallModel
from medusa.serve.demo.compare import Timing, compare, identical, medusa_engine


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Tokens per draft for a pair of models: a table for K = 1 .. 8.")
    add = parser.add_argument
    add("--target", default=EMBEDDED, metavar="NAME", help="the larger model (default: %(default)s)")
    add("--draft", required=True, metavar="NAME", help="the smaller one: a directory or a Hub id")
    add("--prompts", metavar="FILE", help="JSON lines of prompts (default: beginnings of Python functions)")
    add("--count", type=int, default=12, metavar="N", help="prompts (default: %(default)s)")
    add("--max-new-tokens", type=int, default=128, metavar="N", help="tokens per answer (default: %(default)s)")
    add("--temperature", type=float, default=0.8, metavar="T", help="of the sampled table (default: %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="measured repetitions (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Measure, and print a table for each rule."""
    options = parse()
    disable_progress_bar()
    target, draft = full_name(options.target), full_name(options.draft)
    model = MedusaModel.from_pretrained(None, base=target, draft_model=draft)
    count = options.count
    prompts = file_prompts(model, options.prompts) if options.prompts else embedded_prompts(model, "heldout", count)
    for temperature in (0.0, options.temperature):
        timings = measure(model, prompts[:count], temperature, options.max_new_tokens, options.rounds)
        show(model, timings, temperature)


def measure(
    model: MedusaModel, prompts: list[list[int]], temperature: float, new_tokens: int, rounds: int
) -> dict[str, Timing]:
    """Plain decoding, chains of every K, and what is found out as it runs, alternated."""
    small, base = model.drafters.parts.draft_model, model.base
    assert small is not None, "loaded with the target"
    writer, noise = SmallModel(small), Warper(temperature) if temperature else NO_NOISE
    ways = {
        str(k): {"drafter": ModelDrafter(writer, base.vocab_size, k + 1, 0.0, host_decides=False, noise=noise)}
        for k in range(1, 9)
    }
    options = {"plain": {"nodes": 1}, **ways, "auto": {}}
    engines = {
        name: medusa_engine(model, new_tokens, temperature=temperature, **how)  # type: ignore[arg-type]
        for name, how in options.items()
    }
    return compare(engines, prompts, rounds)


def show(model: MedusaModel, timings: dict[str, Timing], temperature: float) -> None:
    """Print a table."""
    small, plain = model.drafters.parts.draft_model, timings["plain"]
    assert small is not None, "loaded with the target"
    rule = f"temperature {temperature}" if temperature else "greedy"
    ratio = model.base.weight_bytes / small.weight_bytes
    table = Table(title=f"{small.name} drafts for {model.base.name} ({ratio:.1f} times its size), {rule}")
    for heading in ("K", "accepted", "tokens per step", "tokens/s", "over plain", "equal to plain"):
        table.add_column(heading, justify="right")
    for name, timing in timings.items():
        drafted = sum(call.steps - 1 for call in timing.rounds[-1])  # the prompt's pass brings a token without a draft
        per_draft = sum(len(tokens) - 1 for tokens in timing.outputs) / max(1, drafted)
        accepted = f"{(per_draft - 1) / int(name):.0%}" if name.isdigit() else ""
        same = f"{identical(timing.outputs, plain.outputs)} of {len(plain.outputs)}"
        speeds = f"{timing.tokens_per_second:.0f}", f"{timing.speedup_over(plain):.2f}x"
        table.add_row(name, accepted, f"{timing.tokens_per_step:.2f}", *speeds, same)
    Console().print(table)


if __name__ == "__main__":
    main()
