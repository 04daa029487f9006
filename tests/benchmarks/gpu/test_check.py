"""The GPU check on a machine that has no GPU: what it runs, when it stops, what it says."""

import json
import os
import platform
import signal
import time
from pathlib import Path

import pytest

from medusa.benchmarks.__main__ import main as bench
from medusa.benchmarks.arguments import build_parser
from medusa.benchmarks.demo import __main__ as demo
from medusa.benchmarks.gpu import __main__ as command
from medusa.benchmarks.gpu import parts as gpu
from medusa.benchmarks.gpu.__main__ import main, probe
from medusa.benchmarks.gpu.parts import Part
from tests.train.jobs import alive, until

ROOT = Path(__file__).parents[3]
VERSIONS = {"python": "3", "torch": "2", "transformers": "5"}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs parts as on a machine with a GPU; returns exit status and report."""
    monkeypatch.setattr(command, "WORK", tmp_path / "work")
    handler = signal.getsignal(signal.SIGTERM)

    def run(parts, limit=480.0, gpu="H1000"):
        monkeypatch.setattr(command, "probe", lambda environment: {"gpu": gpu, "versions": VERSIONS})
        status = command.check(parts, tmp_path / "out", limit)
        return status, json.loads((tmp_path / "out" / "report.json").read_text())

    yield run
    signal.signal(signal.SIGTERM, handler)


def code(text, limit=30.0, **options):
    return Part(("-c", text), limit, **options)


def test_a_failed_part_does_not_stop_the_others(run, tmp_path, capsys):
    wrote = tmp_path / "part.json"
    write = f"open({str(wrote)!r}, 'w').write('{{\"x\": 7}}')"
    parts = {
        "bad": code("import sys; print('first'); sys.exit('the reason')"),
        "good": code(write, report=wrote, figure=lambda r: f"x = {r['x']}", details=lambda r: f"{r['x']} in detail"),
        "plain": code("print('3 passed in 1 s =====')"),
    }
    status, report = run(parts)
    assert status == 1
    assert {name: part["result"] for name, part in report["parts"].items()} == {
        "bad": "failed: exit status 1", "good": "passed", "plain": "passed",
    }  # fmt: skip
    assert [part["figure"] for part in report["parts"].values()] == ["the reason", "x = 7", "3 passed in 1 s"]
    assert report["parts"]["good"]["report"] == {"x": 7}
    assert report["machine"] == {"gpu": "H1000", "versions": VERSIONS}
    assert (tmp_path / "out" / "bad.log").read_text() == "first\nthe reason\n"
    printed = capsys.readouterr().out
    assert "\n7 in detail\n" in printed
    last = printed.splitlines()[-4:]
    assert last[0].split() == ["part", "result", "seconds", "key", "figure"]
    assert last[2].startswith("good ")
    assert last[2].endswith("x = 7")


def test_a_slow_part_is_ended_with_its_children(run, tmp_path):
    pid = tmp_path / "pid"
    child = "import time; time.sleep(60)"
    parent = f"import subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', {child!r}]);"
    parent += f" open({str(pid)!r}, 'w').write(str(c.pid)); time.sleep(60)"
    began = time.monotonic()
    status, report = run({"slow": code(parent, limit=2.0), "next": code("print('ran')")})
    assert time.monotonic() - began < 20
    assert status == 1
    assert report["parts"]["slow"]["result"] == "stopped after 2 s"
    assert report["parts"]["next"]["result"] == "passed"
    assert not alive(int(pid.read_text()))


def test_the_limit_holds_for_all_parts_together(run, tmp_path):
    parts = {"a": code("import time; time.sleep(60)"), "b": code("pass")}
    status, report = run(parts, limit=1)
    assert status == 1
    assert report["parts"]["b"]["result"] == "skipped: the 1 s have passed"
    assert report["parts"]["a"]["seconds"] < 20


def test_a_check_that_is_told_to_end_takes_its_part_with_it(run, tmp_path):
    pid = tmp_path / "pid"
    kill = (
        f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); os.kill(os.getppid(), 15); time.sleep(60)"
    )
    with pytest.raises(SystemExit) as ended:
        run({"before": code("pass"), "killer": code(kill)})
    assert ended.value.code == 143
    assert not alive(int(pid.read_text()))
    assert list(json.loads((tmp_path / "out" / "report.json").read_text())["parts"]) == ["before"]


def test_without_a_gpu_only_the_other_parts_run(run, tmp_path):
    parts = {"gpu": code("print('never')"), "cpu": code("print('ran')", needs_gpu=False)}
    status, report = run(parts, gpu=None)
    assert status == 0
    assert [part["result"] for part in report["parts"].values()] == ["skipped: no GPU", "passed"]
    assert not (tmp_path / "out" / "gpu.log").exists()


def test_a_check_that_checked_nothing_is_no_success(run, tmp_path):
    assert run({"gpu": code("pass")}, gpu=None)[0] == 1


def test_an_old_report_is_not_taken_for_a_new_one(run, tmp_path):
    old = tmp_path / "old.json"
    old.write_text("{}")
    _, report = run({"a": code("print('no report')", report=old, figure=lambda r: r["x"])})
    assert report["parts"]["a"]["figure"] == "no report"
    assert not old.exists()


def test_a_report_that_cannot_be_read_fails_its_part_only(run, tmp_path):
    half, other = tmp_path / "half.json", tmp_path / "other.json"
    parts = {
        "half": code(f"open({str(half)!r}, 'w').write('{{')", report=half, figure=lambda r: r["x"]),
        "other": code(f"open({str(other)!r}, 'w').write('{{\"y\": 1}}')", report=other, figure=lambda r: r["x"]),
        "next": code("print('ran')"),
    }
    status, report = run(parts)
    assert status == 1
    results = [part["result"] for part in report["parts"].values()]
    assert [result.startswith("failed: its report cannot be read") for result in results] == [True, True, False]


def test_children_that_outlive_their_part_are_ended(run, tmp_path):
    pid, child = tmp_path / "pid", "import time; time.sleep(60)"
    parent = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {child!r}]);"
    parent += f" open({str(pid)!r}, 'w').write(str(c.pid)); sys.exit(3)"
    run({"left": code(parent)})
    until(lambda: not alive(int(pid.read_text())), seconds=5)


def test_parts_run_with_the_same_python(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    script = "import os, sys; print(os.environ['MEDUSA_PYTHON'] == sys.executable, os.environ['PYTHONPATH'])"
    _, report = run({"a": code(script)})
    assert report["parts"]["a"]["figure"] == f"True {ROOT}{os.pathsep}/mine"


def test_every_command_is_one_that_exists(tmp_path, capsys):
    parsers = {"benchmarks": build_parser(), "medusa.benchmarks.demo": demo._parser()}
    parts = gpu.parts(tmp_path)
    for part in parts.values():
        dash_m, module, *words = part.words
        assert dash_m == "-m"
        if module in parsers:
            parsers[module].parse_args(words)
    assert main(["--dry-run"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(parts)


def test_key_figures_come_from_what_the_benchmarks_write(base_directory, tmp_path):
    small = ["--count", "1", "--max-new-tokens", "2", "--rounds", "1", "--json", str(tmp_path / "x.json")]
    assert bench(["run", "--base", str(base_directory), *small]) == 0
    assert gpu._run_figure(json.loads((tmp_path / "x.json").read_text())).endswith("over transformers")


@pytest.mark.parametrize("words", [["--only", "nothing"], ["--limit", "x"]])
def test_wrong_use(words):
    with pytest.raises(SystemExit) as wrong:
        main(words)
    assert wrong.value.code == 2


def test_the_machine_is_described_as_the_parts_see_it(tmp_path):
    theirs = os.environ | {"PYTHONPATH": str(tmp_path)}
    torch, transformers = tmp_path / "torch.py", tmp_path / "transformers.py"
    torch.write_text("class cuda: is_available, get_device_name = lambda: True, 'H{}'.format\n__version__ = '8'")
    transformers.write_text("__version__ = '9'")
    versions = {"python": platform.python_version(), "torch": "8", "transformers": "9"}
    assert probe(theirs) == {"gpu": "H0", "versions": versions}
    torch.write_text("import no_such_library")
    with pytest.raises(ValueError, match="lacks torch or transformers: ModuleNotFoundError"):
        probe(theirs)
