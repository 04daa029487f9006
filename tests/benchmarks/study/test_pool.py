"""Jobs run beside each other, and none survives the others' failure."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks.study.pool import Job, Pool


def _job(tmp_path: Path, name: str, *programs: str) -> Job:
    return Job(name, [[sys.executable, "-c", program] for program in programs], tmp_path / name / "log.txt")


def test_commands_of_a_job_follow_each_other_and_jobs_share_the_time(tmp_path: Path) -> None:
    # Each waits for a file that the other one writes: one after the other they would wait for ever.
    wait = "import pathlib, time, sys\nwhile not pathlib.Path({0!r}).exists(): time.sleep(0.01)"
    paths = [str(tmp_path / name) for name in "ab"]
    jobs = [
        _job(tmp_path, f"job {i}", f"import os, pathlib; pathlib.Path({paths[i]!r}).touch(); print(os.environ['WORD'])",
             wait.format(paths[1 - i]))
        for i in range(2)
    ]  # fmt: skip
    assert {job.name for job in Pool(2, {"WORD": "hello"}).run(jobs)} == {"job 0", "job 1"}
    assert jobs[0].log.read_text() == "hello\n"


def test_a_failure_is_named_and_ends_the_others(tmp_path: Path) -> None:
    slow = f"import pathlib, time; time.sleep(60); pathlib.Path({str(tmp_path / 'late')!r}).touch()"
    jobs = [
        _job(tmp_path, "good", slow),
        _job(tmp_path, "bad", "import sys; sys.exit('first line\\nno memory\\n')", "import nothing"),
        _job(tmp_path, "never", "import time; time.sleep(60)"),
    ]
    began = time.monotonic()
    with pytest.raises(ChildProcessError, match=r"bad failed \(exit status 1\): no memory; .*bad/log.txt"):
        list(Pool(2, {}).run(jobs))
    assert time.monotonic() - began < 30
    assert not (tmp_path / "late").exists()


def test_whoever_stops_to_ask_ends_all_jobs(tmp_path: Path) -> None:
    jobs = [_job(tmp_path, "quick", "pass"), _job(tmp_path, "slow", "import time; time.sleep(60)")]
    began = time.monotonic()
    done = Pool(2, {}).run(jobs)
    assert next(done).name == "quick"
    done.close()
    assert time.monotonic() - began < 30
