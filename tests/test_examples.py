"""The examples with stand-ins for ssh and SLURM: which launcher each machine starts, and with what."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".sh", ".sbatch"))

LAUNCHER = """#!/usr/bin/env bash
[ "$1" = train ] || exit 0
echo "rank $NODE_RANK of $NNODES at $MASTER_ADDR:$MASTER_PORT $(printf '<%s>' "$@")" >>"$LOG"
exit "${STATUS:-0}"
"""
SSH = """#!/usr/bin/env bash
[ "$1" = -tt ] && echo "ssh $2" >>"$LOG"
bash -c "$3"
"""
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
status=0
for node in 0 1; do SLURM_NODEID=$node "$@" || status=$?; done
exit $status
"""
SCONTROL = """#!/usr/bin/env bash
if [ "$1" = show ]; then printf '%s\\n' node-a node-b; else echo "$*" >>"$LOG"; fi
"""


@pytest.fixture
def run(tmp_path):
    """Run an example inside a copied clone; the lines that its launchers wrote, and its exit status."""
    clone = tmp_path / "a clone"
    shutil.copytree(ROOT / "examples", clone / "examples")
    programs = {clone / "launch.sh": LAUNCHER}
    programs |= {tmp_path / "bin" / name: text for name, text in (("ssh", SSH), ("srun", SRUN), ("scontrol", SCONTROL))}
    (tmp_path / "bin").mkdir()
    for path, text in programs.items():
        path.write_text(text)
        path.chmod(0o755)
    log = tmp_path / "log"
    log.touch()

    def run_example(name, *arguments, **variables):
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        environment = {"PATH": path, "LOG": str(log), "SLURM_SUBMIT_DIR": str(clone)} | variables
        done = subprocess.run(
            [clone / "examples" / name, *arguments], env=environment, check=False, capture_output=True, text=True
        )
        return log.read_text().splitlines(), done.returncode

    return run_example


@pytest.mark.parametrize("script", [*SCRIPTS, ROOT / "launch.sh", ROOT / ".ci" / "run"], ids=lambda script: script.name)
def test_is_valid_bash(script):
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", script], check=True)
    assert os.access(script, os.X_OK)


def test_machines_start_one_launcher_each(run):
    lines, status = run("machines.sh", "a,b,c", "--recipe", "my recipe.yaml", MASTER_PORT="7")
    assert status == 0
    assert sorted(lines) == [
        *(f"rank {rank} of 3 at a:7 <train><--recipe><my recipe.yaml>" for rank in range(3)),
        "ssh a", "ssh b", "ssh c",
    ]  # fmt: skip


def test_a_failed_machine_is_the_exit_status(run):
    assert run("machines.sh", "a,b", "--recipe", "x", STATUS="3")[1] == 3
    assert run("machines.sh", "a,b")[1] == 2


@pytest.mark.parametrize(("status", "requeued"), [("0", []), ("143", ["requeue 20007"]), ("1", [])])
def test_slurm_starts_one_launcher_per_node_and_requeues_what_was_stopped(run, status, requeued):
    variables = {"SLURM_JOB_NODELIST": "node-[a-b]", "SLURM_JOB_ID": "20007", "SLURM_JOB_NUM_NODES": "2"}
    lines, exit_status = run("slurm.sbatch", "--recipe", "x.yaml", STATUS=status, **variables)
    assert exit_status == int(status)
    launchers = [f"rank {rank} of 2 at node-a:20007 <train><--recipe><x.yaml>" for rank in (0, 1)]
    assert lines == launchers + requeued


def test_the_log_of_slurm_needs_no_directory():
    """SLURM makes none, and a job whose log cannot be opened ends without a word; a new clone has no runs/."""
    (log,) = [line for line in (ROOT / "examples" / "slurm.sbatch").read_text().splitlines() if "--output" in line]
    assert "/" not in log
