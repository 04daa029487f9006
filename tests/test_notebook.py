"""The notebook of examples/: its code runs from the first cell to the last, in small."""

import json
import subprocess
from pathlib import Path

import pytest

from medusa.__main__ import main

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "heads.ipynb"
SIZES = "TRAIN_ANSWERS, HELDOUT_ANSWERS, NEW_TOKENS = 600, 32, 128"


def cells(kind):
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == kind]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    script = "\n".join(cells("code"))
    assert SIZES in script
    script = script.replace(SIZES, "TRAIN_ANSWERS, HELDOUT_ANSWERS, NEW_TOKENS = 24, 4, 32")
    start = subprocess.run

    def run(words, **options):
        """Commands of ours that start no others run in this process."""
        if words[1:3] != ["-m", "medusa"] or words[3] == "train":
            return start(words, **options)
        assert main(words[3:]) == 0
        return None

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", run)
    for name, value in (("PYTHONPATH", str(ROOT)), ("MPLBACKEND", "Agg"), ("NPROC", "1"), ("OMP_NUM_THREADS", "1")):
        monkeypatch.setenv(name, value)
    exec(script, {})
    assert "plain decoding writes the same 64 tokens in 64 steps" in capsys.readouterr().out
    assert {"accept.png", "training.png", "heads"} <= {path.name for path in (tmp_path / "runs/notebook").iterdir()}


def test_files_that_the_notebook_names_exist():
    for text in cells("markdown"):
        for link in text.split("](")[1:]:
            assert (NOTEBOOK.parent / link.partition(")")[0]).is_file()
