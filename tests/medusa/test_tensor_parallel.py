"""Tensor parallel: several processes give the tokens of one, and all of them end."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from medusa import DraftHeads, MedusaModel
from medusa.formats import save_heads
from tests.medusa.tensor_parallel_cases import load, said

ROOT = Path(__file__).parents[2]
CASES = "tests.medusa.tensor_parallel_cases"


@pytest.fixture(scope="module")
def heads(make_heads: Callable[..., DraftHeads], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_heads(make_heads().to(torch.float32), tmp_path_factory.mktemp("heads"))


def torchrun(*arguments: object, processes: int = 2) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", processes]
    return subprocess.run(
        [*map(str, (*command, *arguments))], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["exact", "reference"])
def test_two_processes_give_the_tokens_of_one(
    base_directory: Path, heads: Path, attention: str, tmp_path: Path
) -> None:
    names = (str(base_directory), str(heads), attention, str(base_directory))
    done = torchrun("-m", CASES, *names, tmp_path / "said.json")
    assert done.returncode == 0, done.stderr
    ours, theirs = json.loads((tmp_path / "said.json").read_text(encoding="utf-8")), said(load(*names))
    assert ours.keys() == theirs.keys()
    for way, tokens in theirs.items():
        assert ours[way] == tokens, way
