"""Exported heads in vLLM: its text stays its own, and it accepts as many of their tokens as this engine does."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from medusa import BaseModel, MedusaModel, Tree
from medusa.acceptance import build_rule
from medusa.drafters import HeadsDrafter
from medusa.formats import Export, export_heads, load_heads
from medusa.generate import decode, new_answers
from medusa.step import EagerSteps
from tests.engines.environment import UnavailableError, vllm_python
from tests.engines.vllm_check import DRAFTED
from tests.train.jobs import ROOT, write_recipe

pytestmark = pytest.mark.slow

PROMPTS = 24
MAX_NEW_TOKENS = 64
FORMATS = ("vllm", "universal")


class Drafting(NamedTuple):
    """What was drafted and accepted for all prompts together."""

    drafts: int
    accepted: list[int]


def run(*command: object) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return vllm_python()
    except UnavailableError as reason:
        pytest.skip(f"vLLM cannot be installed here: {reason}")


@pytest.fixture(scope="module")
def answers(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the embedded base answers to a few prompts; asked for the environment first, as all of this needs it."""
    path = tmp_path_factory.mktemp("answers") / "answers.jsonl"
    limits = ("--count", PROMPTS, "--max-new-tokens", MAX_NEW_TOKENS)
    run(sys.executable, "-m", "data", "regenerate", "--prompts", "heldout", *limits, "--out", path)
    return path


@pytest.fixture(scope="module")
def heads(answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that know these very answers half by heart: accepted often, refused often, and trained in seconds."""
    directory = tmp_path_factory.mktemp("train")
    sections = {"heads": {"num_heads": DRAFTED}, "data": {"row_tokens": 256, "cache": str(directory / "rows")}}
    sections["optim"] = {"lr": 3e-3, "steps": 40, "rows_per_step": 4, "micro_rows": 4}
    recipe = write_recipe(directory / "recipe.yaml", Path("embedded"), answers, sections)
    run(sys.executable, "-m", "train", "--recipe", recipe, "--recipe.run", directory / "run")
    return directory / "run" / "heads"


@pytest.fixture(scope="module")
def prompts(answers: Path) -> list[list[int]]:
    records = map(json.loads, answers.read_text(encoding="utf-8").splitlines())
    return [record["input_ids"][: record["loss_mask"].index(1)] for record in records]


@pytest.fixture(scope="module")
def theirs(
    python: Path, heads: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What vLLM decodes, plainly and with the heads in each of the formats that it reads."""
    directory = tmp_path_factory.mktemp("vllm")
    loaded = load_heads(heads)
    export = Export(loaded, BaseModel.load(ROOT / "data/embedded/base"))
    exported = {name: str(export_heads(export, name, directory / name)) for name in FORMATS}
    job = {"base": export.base.name, "prompts": prompts, "max_new_tokens": MAX_NEW_TOKENS, "heads": exported}
    (directory / "job.json").write_text(json.dumps(job), encoding="utf-8")
    # -I: our packages, and modules beside the script, are none of vLLM's business
    run(python, "-I", ROOT / "tests/engines/vllm_check.py", directory / "job.json", directory / "result.json")
    return json.loads((directory / "result.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def ours(heads: Path, prompts: list[list[int]], theirs: dict[str, Any]) -> Drafting:
    """The same by our own steps; vLLM drafts from the second token on, so ours begin with the first in the prompt."""
    lengths = Counter()

    class CountedSteps(EagerSteps):
        def next(self) -> list[list[int]]:
            new_tokens = super().next()
            lengths.update(len(tokens) - 1 for tokens in new_tokens if tokens)
            return new_tokens

    model = MedusaModel.from_pretrained(heads, dtype=torch.float32, device="cpu")
    drafter = HeadsDrafter(model.heads, model.base, nodes=1 + DRAFTED, tree=Tree.chain(DRAFTED))
    plain = theirs["plain"]["tokens"]
    begun = [[*prompt, text[0]] for prompt, text in zip(prompts, plain, strict=True)]
    answers = new_answers(model.base, begun, MAX_NEW_TOKENS - 1)
    for _ in decode(model.base, drafter, build_rule("greedy"), begun, answers, start=CountedSteps):
        pass
    assert [answer.output.tokens for answer in answers] == [text[1:] for text in plain]
    accepted = [sum(count for length, count in lengths.items() if length >= n) for n in range(1, 1 + DRAFTED)]
    return Drafting(lengths.total(), accepted)


@pytest.mark.parametrize("name", FORMATS)
def test_the_text_is_that_of_plain_decoding(theirs: dict[str, Any], name: str) -> None:
    assert theirs[name]["tokens"] == theirs["plain"]["tokens"]


@pytest.mark.parametrize("name", FORMATS)
def test_as_many_draft_tokens_are_accepted_as_here(theirs: dict[str, Any], ours: Drafting, name: str) -> None:
    assert min(ours.accepted) > 50 and max(ours.accepted) < 0.9 * ours.drafts, "no measure of agreement"
    assert theirs[name]["drafts"] == pytest.approx(ours.drafts, rel=0.05)
    assert theirs[name]["accepted"] == pytest.approx(ours.accepted, rel=0.05)
