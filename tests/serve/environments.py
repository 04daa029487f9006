"""Clients that need versions of their own, in virtual environments beside ours; tests skip where there is none."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
REQUIREMENTS = {
    "lm-eval": "'lm-eval[api]' torch transformers accelerate",
    "clients": "litellm langchain-openai instructor",
}
"""What each environment is made of."""


def python_of(name: str) -> Path:
    """The interpreter of an environment: .cache/NAME in the clone, or where MEDUSA_TEST_NAME says."""
    variable = f"MEDUSA_TEST_{name.replace('-', '_').upper()}"
    directory = Path(os.environ.get(variable) or ROOT / ".cache" / name)
    python = directory / "bin" / "python"
    if not python.is_file():
        made = f"python -m venv {directory} && {directory}/bin/pip install {REQUIREMENTS[name]}"
        pytest.skip(f"{name} has no environment: {made}")
    return python


def run(name: str, script: str, *words: object) -> Any:
    """What a script beside this file prints as its last line, which is JSON; it sees nothing of ours and no network."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | offline
    command = [python_of(name), Path(__file__).with_name(script), *words]
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])
