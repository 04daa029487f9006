"""Exported heads in vLLM: its text stays its own, and it accepts as many of their tokens as our own chain of drafts."""

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa import BaseModel, DraftHeads, MedusaModel, SamplingParams, Speculation, Tree, build_heads
from medusa.drafters import HeadsDrafter
from medusa.engine.step import decode_step
from medusa.formats import Export, export_heads, load_heads
from tests.engines.environment import UnavailableError, python_with
from tests.medusa.passes import prefill
from tests.medusa.rules import make_rule
from tests.train.jobs import ROOT, write_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get("MEDUSA_TEST_VLLM"),
        reason="installs vLLM for minutes; MEDUSA_TEST_VLLM=1 ./launch.sh test -m slow tests/engines",
    ),
]

PROMPTS = 24
MAX_NEW_TOKENS = 64
DRAFTED = 3
DRAFT_VOCABULARY = 256
EXPORTS = ("vllm", "universal", "own-output-layers", "draft-vocabulary")
ATTENTION = ("eagle3", "speculators")


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return python_with("vllm")
    except UnavailableError as reason:
        pytest.skip(f"vLLM cannot be installed here: {reason}")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def base() -> BaseModel:
    """In float32, as in vLLM: there are no near ties for engines to decide differently."""
    return BaseModel.load(ROOT / "data/embedded/base", dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def answers(directory: Path) -> Path:
    """What the embedded base answers to a few prompts."""
    path, limits = directory / "answers.jsonl", ("--count", PROMPTS, "--max-new-tokens", MAX_NEW_TOKENS)
    run(sys.executable, "-m", "medusa", "data", "regenerate", "--prompts", "heldout", *limits, "--out", path)
    return path


@pytest.fixture(scope="module")
def prompts(answers: Path) -> list[list[int]]:
    records = map(json.loads, answers.read_text(encoding="utf-8").splitlines())
    return [record["input_ids"][: record["loss_mask"].index(1)] for record in records]


@pytest.fixture(scope="module")
def heads(answers: Path, directory: Path) -> DraftHeads:
    return trained(answers, directory / "medusa", {"num_heads": DRAFTED}, lr=3e-3)


@pytest.fixture(scope="module")
def attention_heads(answers: Path, directory: Path) -> DraftHeads:
    """Likewise, with the norms of EAGLE 3.1."""
    shape = {"num_heads": DRAFTED, "architecture": "attention", "feature_layers": 3, "last_layer": False}
    return trained(answers, directory / "attention", shape, lr=1e-3)


def trained(answers: Path, directory: Path, shape: dict[str, Any], lr: float) -> DraftHeads:
    """Heads that know these very answers half by heart: often right, often wrong, and trained in seconds."""
    sections = {
        "heads": shape,
        "data": {"row_tokens": 256, "cache": str(directory / "rows")},
        "optim": {"lr": lr, "steps": 40, "rows_per_step": 4, "micro_rows": 4},
    }
    directory.mkdir()
    recipe = write_recipe(directory / "recipe.yaml", Path("embedded"), answers, sections)
    run(sys.executable, "-m", "medusa.train", "--recipe", recipe, "--recipe.run", directory / "run")
    return load_heads(directory / "run" / "heads")


@pytest.fixture(scope="module")
def exports(
    heads: DraftHeads, attention_heads: DraftHeads, base: BaseModel, answers: Path, directory: Path
) -> dict[str, Path]:
    """The heads as vLLM reads them, in all shapes that it knows."""
    own = reshaped(heads, own_lm_heads=True)
    own.init_from_base(base.lm_head_weight)
    noise = torch.randn(own.lm_heads.shape, generator=torch.Generator().manual_seed(0))
    own.lm_heads += 0.1 * base.lm_head_weight.std() * noise  # so that no head's is another's
    records = map(json.loads, answers.read_text(encoding="utf-8").splitlines())
    frequent = Counter(token for record in records for token in record["input_ids"]).most_common(DRAFT_VOCABULARY)
    part = reshaped(heads, draft_vocab_size=DRAFT_VOCABULARY)
    part.draft_ids.copy_(torch.tensor(sorted(token for token, _ in frequent)))
    shapes = ((heads, "vllm"), (heads, "universal"), (own, "universal"), (part, "vllm"))
    shapes += tuple((attention_heads, form) for form in ATTENTION)
    return {
        name: export_heads(Export(shape, base), form, directory / name)
        for name, (shape, form) in zip((*EXPORTS, *ATTENTION), shapes, strict=True)
    }


@pytest.fixture(scope="module")
def theirs(
    python: Path, exports: dict[str, Path], base: BaseModel, prompts: list[list[int]], directory: Path
) -> dict[str, Any]:
    """What vLLM writes and accepts, plainly and with each export."""
    engines: dict[str, dict[str, Any]] = {"plain": {}}
    for name, path in exports.items():
        method = "eagle3" if name in ATTENTION else "medusa"
        speculative = {"method": method, "model": str(path), "num_speculative_tokens": DRAFTED}
        engines[name] = {"speculative_config": speculative}
    # vLLM 0.32 forgets that it has read the token map: without this it refuses any draft vocabulary.
    engines["draft-vocabulary"]["model_loader_extra_config"] = {"enable_weights_track": False}
    values = {"base": base.name, "prompts": prompts, "max_new_tokens": MAX_NEW_TOKENS, "engines": engines}
    job, result = directory / "job.json", directory / "result.json"
    job.write_text(json.dumps(values), encoding="utf-8")
    # -I: our packages, and the modules beside the script, are none of vLLM's business.
    run(python, "-I", ROOT / "tests/engines/vllm_check.py", job, result)
    return json.loads(result.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [*EXPORTS, *ATTENTION])
def test_the_text_is_that_of_plain_decoding(theirs: dict[str, Any], name: str) -> None:
    assert theirs[name]["tokens"] == theirs["plain"]["tokens"]


@pytest.mark.parametrize("name", EXPORTS)
def test_as_many_draft_tokens_are_accepted_as_here(
    theirs: dict[str, Any], exports: dict[str, Path], base: BaseModel, prompts: list[list[int]], name: str
) -> None:
    drafts, accepted = count_accepted(load_heads(exports[name]), base, prompts, theirs["plain"]["tokens"])
    assert min(accepted) > 50 and max(accepted) < 0.9 * drafts  # right and wrong often enough to tell heads apart
    assert theirs[name]["drafts"] == pytest.approx(drafts, rel=0.05)
    assert theirs[name]["accepted"] == pytest.approx(accepted, rel=0.05)


@pytest.mark.parametrize("name", ATTENTION)
def test_as_many_tokens_of_the_layer_are_accepted_as_here(
    theirs: dict[str, Any], exports: dict[str, Path], base: BaseModel, prompts: list[list[int]], name: str
) -> None:
    drafts, accepted = count_steps(load_heads(exports[name]), base, prompts, theirs["plain"]["tokens"])
    assert min(accepted) > 50 and max(accepted) < 0.95 * drafts
    assert theirs[name]["drafts"] == pytest.approx(drafts, rel=0.05)
    assert theirs[name]["accepted"] == pytest.approx(accepted, rel=0.05)


def run(*command: object) -> None:
    words, environment = list(map(str, command)), os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("GLIBC_TUNABLES", None)  # how launch.sh has our processes allocate is no setting of vLLM's
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def reshaped(heads: DraftHeads, **shape: Any) -> DraftHeads:
    """A copy in another shape; what only that shape has is as in fresh heads."""
    copy = build_heads(dataclasses.replace(heads.config, **shape))
    copy.load_state_dict(heads.state_dict(), strict=False)
    return copy.requires_grad_(False)


def count_accepted(
    heads: DraftHeads, base: BaseModel, prompts: Sequence[list[int]], texts: Sequence[list[int]]
) -> tuple[int, list[int]]:
    """Drafts that our own steps make on the way to these texts, and how many of their tokens stand, by position.

    vLLM drafts from the second token of a text on: the first becomes part of the prompt here.
    """
    lengths: Counter[int] = Counter()

    begun = [[*prompt, text[0]] for prompt, text in zip(prompts, texts, strict=True)]
    drafter = HeadsDrafter(heads, base, nodes=1 + DRAFTED, tree=Tree.chain(DRAFTED))
    sequences, state = prefill(base, begun)
    written: list[list[int]] = [[] for _ in texts]
    while any(growing := [len(ours) < len(text) - 1 for ours, text in zip(written, texts, strict=True)]):
        state = dataclasses.replace(state, active=torch.tensor(growing))
        result = decode_step(base, sequences, drafter, make_rule("greedy"), state)
        state = result.state
        for ours, new in zip(written, result.tokens, strict=True):
            ours += new
            lengths.update([len(new) - 1] if new else [])
    assert all(ours[: len(text) - 1] == text[1:] for ours, text in zip(written, texts, strict=True))
    return lengths.total(), [sum(lengths[n] for n in lengths if n >= least) for least in range(1, 1 + DRAFTED)]


def count_steps(
    heads: DraftHeads, base: BaseModel, prompts: Sequence[list[int]], texts: Sequence[list[int]]
) -> tuple[int, list[int]]:
    """As ``count_accepted``, of heads that remember; vLLM has their first drafts checked with the first token."""
    batch, lengths = MedusaModel(base, heads).batch(), list[int]()
    sampling, chain = SamplingParams(max_new_tokens=MAX_NEW_TOKENS), Tree.chain(DRAFTED)
    requests = [batch.add(prompt, sampling, Speculation("heads", tree=chain)) for prompt in prompts]
    while len(batch):
        before = [len(request.output.tokens) for request in requests]
        batch.step()
        grown = [len(request.output.tokens) - length for request, length in zip(requests, before, strict=True)]
        lengths += [new - 1 for new, length in zip(grown, before, strict=True) if new and length]
    assert [request.output.tokens for request in requests] == list(texts)
    return len(lengths), [sum(length >= least for length in lengths) for least in range(1, 1 + DRAFTED)]
