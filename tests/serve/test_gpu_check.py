"""The GPU check on a machine that has no GPU: what it runs, when it stops, what it says."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from serve import demo, gpu_check, gpu_parts, wheels
from serve.bench import timing
from serve.bench.__main__ import main as bench
from serve.bench.arguments import build_parser
from serve.gpu_parts import Part

ROOT = Path(__file__).parents[2]
VERSIONS = {"python": "3", "torch": "2", "transformers": "5"}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Everything is written below tmp_path; there is a GPU, and nothing was carried."""
    found = {"gpu": "H1000", "versions": VERSIONS}
    monkeypatch.setattr(gpu_check, "probe", lambda environment: dict(found))
    for name in ("WORK", "SITE", "WHEELS"):
        monkeypatch.setattr(gpu_check, name, tmp_path / name)
    handler = signal.getsignal(signal.SIGTERM)
    yield found
    signal.signal(signal.SIGTERM, handler)


def check(monkeypatch, tmp_path, parts, *words):
    """Run the command with other parts; returns exit status and report."""
    monkeypatch.setattr(gpu_check, "parts", lambda *_: parts)
    status = gpu_check.main(["--out", str(tmp_path / "out"), *words])
    return status, json.loads((tmp_path / "out" / "report.json").read_text())


def code(text, limit=30.0, **options):
    return Part(("-c", text), limit, **options)


def test_a_failed_part_does_not_stop_the_others(machine, monkeypatch, tmp_path, capsys):
    wrote = tmp_path / "part.json"
    write = f"open({str(wrote)!r}, 'w').write('{{\"x\": 7}}')"
    parts = {
        "bad": code("import sys; print('first'); sys.exit('the reason')"),
        "good": code(write, report=wrote, figure=lambda r: f"x = {r['x']}"),
        "plain": code("print('3 passed in 1 s =====')"),
    }
    status, report = check(monkeypatch, tmp_path, parts)
    assert status == 1
    assert {name: part["result"] for name, part in report["parts"].items()} == {
        "bad": "failed: exit status 1", "good": "passed", "plain": "passed",
    }  # fmt: skip
    assert [part["figure"] for part in report["parts"].values()] == ["the reason", "x = 7", "3 passed in 1 s"]
    assert report["parts"]["good"]["report"] == {"x": 7}
    assert report["machine"] == {"gpu": "H1000", "versions": VERSIONS, "carried": []}
    assert (tmp_path / "out" / "bad.log").read_text() == "first\nthe reason\n"
    last = capsys.readouterr().out.splitlines()[-4:]
    assert last[0].split() == ["part", "result", "seconds", "key", "figure"]
    assert last[2].startswith("good ")
    assert last[2].endswith("x = 7")


def test_all_passed_is_status_0(machine, monkeypatch, tmp_path):
    assert check(monkeypatch, tmp_path, {"a": code("pass")})[0] == 0


def test_a_slow_part_is_ended_with_its_children(machine, monkeypatch, tmp_path):
    pid = tmp_path / "pid"
    child = "import time; time.sleep(60)"
    parent = f"import subprocess, sys, time; c = subprocess.Popen([sys.executable, '-c', {child!r}]);"
    parent += f" open({str(pid)!r}, 'w').write(str(c.pid)); time.sleep(60)"
    began = time.monotonic()
    status, report = check(monkeypatch, tmp_path, {"slow": code(parent, limit=5.0), "next": code("print('ran')")})
    assert time.monotonic() - began < 20
    assert status == 1
    assert report["parts"]["slow"]["result"] == "stopped after 5 s"
    assert report["parts"]["next"]["result"] == "passed"
    assert not runs(int(pid.read_text()))


def runs(pid):
    """Whether a process is there and no zombie that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_limit_holds_for_all_parts_together(machine, monkeypatch, tmp_path):
    parts = {"a": code("import time; time.sleep(60)"), "b": code("pass")}
    status, report = check(monkeypatch, tmp_path, parts, "--limit", "1")
    assert status == 1
    assert report["parts"]["b"]["result"] == "skipped: the 1 s are over"
    assert report["parts"]["a"]["seconds"] < 20


def test_a_check_that_is_told_to_end_takes_its_part_with_it(machine, monkeypatch, tmp_path):
    pid = tmp_path / "pid"
    kill = (
        f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); os.kill(os.getppid(), 15); time.sleep(60)"
    )
    with pytest.raises(SystemExit) as ended:
        check(monkeypatch, tmp_path, {"before": code("pass"), "killer": code(kill)})
    assert ended.value.code == 143
    assert not runs(int(pid.read_text()))
    assert list(json.loads((tmp_path / "out" / "report.json").read_text())["parts"]) == ["before"]


def test_without_a_gpu_only_the_other_parts_run(machine, monkeypatch, tmp_path):
    machine["gpu"] = None
    parts = {"gpu": code("print('never')"), "cpu": code("print('ran')", needs_gpu=False)}
    status, report = check(monkeypatch, tmp_path, parts)
    assert status == 0
    assert [part["result"] for part in report["parts"].values()] == ["skipped: no GPU", "passed"]
    assert not (tmp_path / "out" / "gpu.log").exists()


def test_a_check_that_checked_nothing_is_no_success(machine, monkeypatch, tmp_path):
    machine["gpu"] = None
    assert check(monkeypatch, tmp_path, {"gpu": code("pass")})[0] == 1


def test_an_old_report_is_not_taken_for_a_new_one(machine, monkeypatch, tmp_path):
    old = tmp_path / "old.json"
    old.write_text("{}")
    _, report = check(monkeypatch, tmp_path, {"a": code("print('no report')", report=old, figure=lambda r: r["x"])})
    assert report["parts"]["a"]["figure"] == "no report"
    assert not old.exists()


def test_a_report_that_cannot_be_read_fails_its_part_only(machine, monkeypatch, tmp_path):
    half, other = tmp_path / "half.json", tmp_path / "other.json"
    parts = {
        "half": code(f"open({str(half)!r}, 'w').write('{{')", report=half, figure=lambda r: r["x"]),
        "other": code(f"open({str(other)!r}, 'w').write('{{\"y\": 1}}')", report=other, figure=lambda r: r["x"]),
        "next": code("print('ran')"),
    }
    status, report = check(monkeypatch, tmp_path, parts)
    assert status == 1
    results = [part["result"] for part in report["parts"].values()]
    assert [result.startswith("failed: its report cannot be read") for result in results] == [True, True, False]


def test_children_that_outlive_their_part_are_ended(machine, monkeypatch, tmp_path):
    pid, child = tmp_path / "pid", "import time; time.sleep(60)"
    parent = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', {child!r}]);"
    parent += f" open({str(pid)!r}, 'w').write(str(c.pid)); sys.exit(3)"
    check(monkeypatch, tmp_path, {"left": code(parent)})
    for _ in range(50):
        if not runs(int(pid.read_text())):
            return
        time.sleep(0.1)
    pytest.fail("the child still runs")


def test_wheels_that_cannot_be_installed_stop_nothing(machine, monkeypatch, tmp_path):
    make_wheel(tmp_path / "WHEELS", "surely_not_installed")
    wheel = next((tmp_path / "WHEELS").glob("*.whl"))
    wheel.rename(wheel.with_name("surely_not_installed-1.0-cp27-cp27m-manylinux1_x86_64.whl"))
    status, report = check(monkeypatch, tmp_path, {"a": code("print('ran')")})
    assert status == 0
    assert report["machine"]["carried"].startswith("failed: pip ended with 1; wheels are for Python 3.12")


def test_parts_run_with_the_same_python_and_what_was_carried(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    script = "import os, sys; print(os.environ['MEDUSA_PYTHON'] == sys.executable, os.environ['PYTHONPATH'])"
    _, report = check(monkeypatch, tmp_path, {"a": code(script)})
    assert report["parts"]["a"]["figure"] == f"True {ROOT}{os.pathsep}{tmp_path / 'SITE'}{os.pathsep}/mine"


def test_every_command_is_one_that_exists(tmp_path, capsys):
    parsers = {"serve.bench": build_parser(), "serve.demo": demo._parser()}
    parts = gpu_parts.parts(tmp_path, tmp_path)
    for part in parts.values():
        dash_m, module, *words = part.words
        assert dash_m == "-m"
        if module in parsers:
            parsers[module].parse_args(words)
    assert gpu_check.main(["--dry-run"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(parts)


def test_key_figures_come_from_what_the_benchmarks_write(base_directory, tmp_path, monkeypatch):
    monkeypatch.setitem(timing.BUFFER_BYTES, "cpu", 1 << 16)
    small = ["--base", str(base_directory), "--context", "8", "--rounds", "1", "--json", str(tmp_path / "x.json")]
    assert bench(["step", *small, "--nodes", "64", "--baseline"]) == 0
    figure = gpu_parts._step_figure(json.loads((tmp_path / "x.json").read_text()))
    assert figure.startswith("plain ")
    assert "N = 64" in figure
    assert bench(["replay", *small, "--nodes", "4", "--steps", "3"]) == 0
    assert gpu_parts._replay_figure(json.loads((tmp_path / "x.json").read_text())).startswith("REPLAY, N = 4: ")


@pytest.mark.parametrize("words", [["--only", "nothing"], ["--limit", "x"]])
def test_wrong_use(words):
    with pytest.raises(SystemExit) as wrong:
        gpu_check.main(words)
    assert wrong.value.code == 2


def test_the_machine_is_described_as_the_parts_see_it(monkeypatch):
    assert set(gpu_check.probe(dict(os.environ))["versions"]) == set(VERSIONS)
    monkeypatch.setattr(gpu_check, "PROBE", "import no_such_torch")
    with pytest.raises(ValueError, match="lacks torch or transformers: ModuleNotFoundError"):
        gpu_check.probe(dict(os.environ))


# Wheels


def make_wheel(directory, name):
    directory.mkdir(exist_ok=True)
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(directory / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "value = 7\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_only_missing_packages_are_installed(tmp_path):
    make_wheel(tmp_path / "wheels", "surely_not_installed")
    make_wheel(tmp_path / "wheels", "torch")
    assert wheels.install_missing(tmp_path / "wheels", tmp_path / "site") == ["surely_not_installed"]
    assert not (tmp_path / "site" / "torch.py").exists()
    words = [sys.executable, "-c", "import surely_not_installed as s; print(s.value)"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    assert subprocess.run(words, env=environment, capture_output=True, check=True).stdout == b"7\n"
    assert wheels.install_missing(tmp_path / "nowhere", tmp_path / "site") == []


def test_pack_asks_for_the_pinned_versions(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(wheels.subprocess, "run", lambda words, **_: asked.append(words))
    assert wheels.pack(tmp_path, ROOT / "constraints.txt") == 0
    download, build = asked
    assert "pydantic_core" in [word.partition("==")[0] for word in download]
    assert all("==" in word for word in download[-len(wheels.CARRIED) :])
    assert build[-1].startswith("deepspeed==")


def test_pack_refuses_what_is_not_pinned_or_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels.subprocess, "run", lambda *_, **__: None)
    (tmp_path / "constraints.txt").write_text("deepspeed==1\n")
    with pytest.raises(ValueError, match=r"packages \(annotated-types, .*pin them there"):
        wheels.pack(tmp_path / "w", tmp_path / "constraints.txt")
    make_wheel(tmp_path / "w", "large")
    monkeypatch.setattr(wheels, "LARGEST", 10)
    with pytest.raises(ValueError, match="must be at most 10 together"):
        wheels.pack(tmp_path / "w", ROOT / "constraints.txt")
