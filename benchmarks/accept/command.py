"""``medusa bench accept``: from flags to the report."""

import argparse
from pathlib import Path

from medusa import MedusaModel, Speculation
from medusa.acceptance import build_rule
from medusa.benchmarks.accept.figures import figures, grouped
from medusa.benchmarks.accept.measure import measure
from medusa.benchmarks.accept.shown import conclusion, fields, tables
from medusa.benchmarks.accept.texts import known_answers, usual_file
from medusa.benchmarks.questions import questions
from medusa.benchmarks.report import environment, logger, publish
from medusa.benchmarks.run.command import named_model

LEAST_OWN = 0.99
"""Least share of tokens that are the base's own choice; with fewer, the answers are not its greedy texts."""
TITLE = "{base}: what drafters have accepted on {questions} questions"


def accept(options: argparse.Namespace) -> None:
    """Measure how many drafts of each drafter the base accepts, from its texts alone."""
    if min(options.nodes) < 2:
        raise ValueError(f"nodes ({min(options.nodes)}) leave no guess to try; give sizes of 2 or more")
    model = named_model(options, int8=options.int8, mtp=options.mtp)
    if model.base.decoding == "plain":
        raise ValueError(f"base ({model.base.name}) decodes plainly and verifies no drafts; give another base")
    names = options.drafters or _usual(model)
    for name in names:  # before the base answers, which takes long
        model.drafters.check(Speculation(drafter=name), build_rule())
    prompts, kinds = questions(model, options.questions, options.count)
    path = Path(options.texts) if options.texts else usual_file(model)
    answers, written = known_answers(model, prompts, path, options.max_new_tokens)
    measured = measure(model, names, options.nodes, prompts, answers, options.full)
    own = measured.own / (tokens := sum(map(len, answers)))
    if own < LEAST_OWN:
        logger.warning(
            "texts (%s): only %.1f %% of the tokens are those that the base (%s) chooses, so these are not its greedy"
            " answers; remove the file, and new ones are generated", path, 100 * own, model.base.name,
        )  # fmt: skip
    groups = grouped(kinds, [len(prompt) for prompt in prompts])
    drafters = {name: figures(counts, groups) for name, counts in measured.drafters.items()}
    report = {
        "kind": "accept", "base": "/".join(Path(model.base.name).parts[-2:]), "source": model.base.source,
        "heads": options.heads, "draft_model": options.draft_model, "int8": options.int8,
        "dtype": str(model.base.dtype).removeprefix("torch."),
        **environment("medusa bench", options.words, model.base.device), "questions": len(prompts),
        "max_new_tokens": options.max_new_tokens, "nodes": options.nodes, "full": options.full,
        "texts": {"file": str(path), "written": written, "tokens": tokens, "own": own}, "drafters": drafters,
        "conclusions": {name: conclusion(rows) for name, rows in drafters.items()},
    }  # fmt: skip
    publish(options, report, tables(report), TITLE.format_map(report), fields(report))


def _usual(model: MedusaModel) -> list[str]:
    """The default drafters: heads if the model has any, otherwise the model's default drafter."""
    return ["heads"] if model.heads else list(model.drafters.choices())[:1]
