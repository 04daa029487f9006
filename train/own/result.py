"""The result: speed compared with plain decoding, the heads' card, and a table."""

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from medusa import MedusaModel
from medusa.clock import seconds
from medusa.data.sources import read_samples
from medusa.files import header, read_json, write_json
from medusa.formats import load_heads, load_provenance
from medusa.formats.custom_generate import keeps_states
from medusa.io.card import write_card
from medusa.io.hub import fetch_heads
from medusa.train.evaluate import held_out_prompts
from medusa.train.own.answers import HELDOUT
from medusa.train.own.estimate import COMPARED_TOKENS
from medusa.train.own.plan import Plan
from medusa.train.own.screen import Tell
from medusa.train.run_directory import RunDirectory

FILE = "comparison.json"
PLAIN, BEFORE, HEADS, DEFAULT = "plain", "heads before", "heads alone", "default (fastest)"
WAYS: Mapping[str, Mapping[str, Any]] = {
    PLAIN: {"nodes": 1}, BEFORE: {"drafter": "heads", "heads": BEFORE}, HEADS: {"drafter": "heads"}, DEFAULT: {},
}  # fmt: skip
"""Ways of decoding with their options; heads before are those whose training was continued."""


def compare(plan: Plan, out: Path, tell: Tell) -> None:
    """Decode held-out prompts one after the other, in all ways in turn, and write the result and the heads' card.

    The default must find the fastest drafter, which takes some of these prompts.
    """
    model = MedusaModel.from_pretrained(out / "heads", base=plan.asked.base)
    assert model.heads is not None, "they are in that directory"
    write_card(out / "heads", model.heads.config, "native", provenance=load_provenance(out / "heads"))
    samples = read_samples(out / HELDOUT, model.base.tokenizer, model.base.vocab_size)
    prompts = held_out_prompts(samples, plan.compared, model.base.context_length - COMPARED_TOKENS)
    if plan.asked.heads:
        model = model.with_heads({BEFORE: load_heads(fetch_heads(plan.asked.heads))})
    ways = [name for name in WAYS if name != BEFORE or plan.asked.heads]
    for name in ways:
        _decoded(model, prompts[0], WAYS[name])
    sums = {name: {"tokens": 0, "steps": 0, "seconds": 0.0} for name in ways}
    for number, prompt in enumerate(prompts):
        shift = number % len(ways)
        for name in (*ways[shift:], *ways[:shift]):
            for key, value in _decoded(model, prompt, WAYS[name]).items():
                sums[name][key] += value
        tell((number + 1) / len(prompts), f"{number + 1} of {len(prompts)} prompts")
    chat = bool(model.base.tokenizer.chat_template)
    export = "native" if keeps_states(model.base.model) else "custom-generate"
    told = {"prompts": len(prompts), "ways": sums, "chat": chat, "export": export}
    write_json(out / FILE, {**header("comparison"), **told})


def _decoded(model: MedusaModel, prompt: Sequence[int], options: Mapping[str, Any]) -> dict[str, float]:
    outputs: list[Any] = []
    generate = partial(model.generate, list(prompt), max_new_tokens=COMPARED_TOKENS, **options)
    taken = seconds(lambda: outputs.append(generate()), model.base.device)
    return {"tokens": len(outputs[0].tokens), "steps": outputs[0].steps, "seconds": taken}


def show(plan: Plan, out: Path, console: Console) -> None:
    """Print the table and the next commands.

    Raises:
        ValueError, OSError: a file of the run is damaged.
    """
    compared = read_json(out / FILE, "comparison", "remove it and give the same command again")
    records = [record for record in RunDirectory(out).records() if "steps" in record]
    accepted = records[-1].get("heldout_acceptance", []) if records else []
    table = Table(
        title=f"heads for {plan.asked.base}: {compared['prompts']} held-out prompts, greedy", title_justify="left"
    )
    for heading in ("decoding", "tokens per step", "tokens/s", "over plain", "% right at depth 1, 2, .."):
        table.add_column(heading, justify="left" if heading == "decoding" else "right")
    speeds = {name: way["tokens"] / way["seconds"] for name, way in compared["ways"].items()}
    for name, way in compared["ways"].items():
        figures = f"{way['tokens'] / way['steps']:.2f}", f"{speeds[name]:.1f}", f"{speeds[name] / speeds[PLAIN]:.2f}x"
        table.add_row(name, *figures, " ".join(f"{100 * share:.0f}" for share in accepted) if name == HEADS else "")
    console.print(table)
    heads, exported = (shlex.quote(str(out / name)) for name in ("heads", "export"))
    use = f"chat --heads {heads} --colour" if compared.get("chat", True) else f"serve --heads {heads}"
    console.print(f"use them:    medusa {use}", highlight=False, markup=False, soft_wrap=True)
    words = f"medusa export --heads {heads} --format {compared.get('export', 'custom-generate')} --out {exported}"
    console.print(f"export them: {words}", highlight=False, markup=False, soft_wrap=True)
