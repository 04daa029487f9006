"""`python -m benchmarks.study.evaluate TEXTS RUN`: what a finished run's heads would do along the study's texts."""

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.study.texts import Questions, Texts, read_texts
from benchmarks.study.transcript import Transcript, chain_acceptance, count_steps
from medusa import MedusaModel, Tree
from medusa.budget.calibrate import calibrate
from medusa.budget.tree_search import grow_tree
from medusa.drafters import HeadsDrafter
from medusa.files import replace_file

FILE = "evaluation.json"
Paths = Sequence[Sequence[int]]
"""Rank paths of a tree, as JSON knows them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure, 2 wrong use, 130 Ctrl-C.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.study.evaluate",
        description=f"Writes RUN/{FILE}: steps and acceptance of a run's heads.",
    )
    parser.add_argument("texts", type=Path, metavar="TEXTS", help="texts.json of a study")
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory with heads")
    parser.add_argument("--static", action="store_true", help="also with the best static tree for these heads")
    options = parser.parse_args(arguments)
    try:
        figures = evaluate(read_texts(options.texts), options.run / "heads", options.static)
        replace_file(options.run / FILE, lambda beside: beside.write_text(json.dumps(figures) + "\n", encoding="utf-8"))
    except (ValueError, OSError, MemoryError) as error:
        logging.getLogger("train").error("%s", error)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def evaluated(run: Path, texts: Texts, static: bool) -> dict[str, Any] | None:
    """The figures of a run for these texts, with a static tree where one is wanted; None: they have yet to be made."""
    try:
        figures: dict[str, Any] = json.loads((run / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    fits = figures.get("texts") == texts.digest and not (static and figures.get("tree") is None)
    return figures if fits else None


def evaluate(texts: Texts, heads: Path, static: bool) -> dict[str, Any]:
    """Figures of one set of heads.

    Args:
        texts: The study's texts.
        heads: Directory of the heads.
        static: Also measure the best static tree for these heads.

    Returns:
        "texts" (what they belong to), "parameters" (trained ones), "tree" (paths of the static tree, or None), and by
        temperature under "temperatures": "tokens" of each text; by tree ("dynamic 16", "static 64") the "steps" of each
        text; "tries" and "hits" of each text and depth. JSON types only.
    """
    model = MedusaModel.from_pretrained(heads, base=texts.questions.base)
    assert model.heads is not None
    tree = static_tree(model, texts.questions) if static else None
    drafters = tree_drafters(model, texts.questions, tree)
    num_heads = model.heads.config.num_heads
    chain = HeadsDrafter(model.heads, model.base, num_heads + 1, Tree.chain(num_heads))
    figures = {}
    for temperature, answers in texts.answers.items():
        transcript = Transcript.of(model.base, texts.questions.prompts, answers)
        tries_BK, hits_BK = chain_acceptance(chain, transcript, num_heads)
        figures[temperature] = {
            "tokens": list(map(len, answers)),
            "steps": {name: count_steps(drafter, transcript).tolist() for name, drafter in drafters.items()},
            "tries": tries_BK.tolist(),
            "hits": hits_BK.tolist(),
        }
    trained = sum(parameter.numel() for parameter in model.heads.parameters())
    return {"texts": texts.digest, "parameters": trained, "tree": tree, "temperatures": figures}


def static_tree(model: MedusaModel, questions: Questions) -> Paths:
    """The best static tree for these heads, grown from how right they are on the prompts that it is measured on."""
    prompts = [list(prompt) for prompt in questions.prompts]
    calibration = calibrate(model, prompts, questions.max_new_tokens)
    return grow_tree(calibration.accuracies, questions.static_nodes).tree.paths


def tree_drafters(model: MedusaModel, questions: Questions, static: Paths | None) -> dict[str, HeadsDrafter]:
    """The trees that heads are measured with, by name; dynamic ones have exactly N nodes."""
    assert model.heads is not None
    drafters = {
        f"dynamic {nodes}": HeadsDrafter(model.heads, model.base, nodes, host_decides=False)
        for nodes in questions.nodes
    }
    if static is not None:
        tree = Tree(tuple(map(tuple, static)))
        drafters[f"static {questions.static_nodes}"] = HeadsDrafter(model.heads, model.base, tree.nodes, tree)
    return drafters


if __name__ == "__main__":
    sys.exit(main())
