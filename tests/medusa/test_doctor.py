"""What ``medusa doctor`` says of machines of all kinds, and that a look that fails stops no other."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import OfflineModeIsEnabled

from medusa.cpu import build, native
from medusa.doctor import machine, packages
from medusa.doctor.__main__ import main
from medusa.doctor.finding import Finding

ROOT = Path(__file__).parents[2]
HUB = packages.hub
OF_HARDWARE = ("processor", "kernels")
"""What may be slow without a remedy."""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Little memory is read, and nobody is asked."""
    monkeypatch.setattr(machine, "SECONDS", 0.0)
    monkeypatch.setattr(machine, "BUFFER", 1 << 20)
    monkeypatch.setattr(packages, "hub", lambda: Finding("hub", "ok", "not asked"))


def report(tmp_path, capsys):
    """Exit status, what was found by name, and what was shown."""
    path = tmp_path / "doctor.json"
    status = main(["--json", str(path)])
    found = json.loads(path.read_text(encoding="utf-8"))
    return status, {one["what"]: one for one in found["findings"]}, capsys.readouterr().out, found["expectations"]


def test_this_machine(tmp_path, capsys):
    status, found, shown, expected = report(tmp_path, capsys)
    assert status == 0
    assert {"python", "torch", "transformers", "processor", "compiler", "kernels", "memory", "gpu", "disk"} <= set(
        found
    )
    for what, one in found.items():
        assert one["state"] != "wrong"
        assert one["state"] == "ok" or one["remedy"] or what in OF_HARDWARE
        assert f"  {one['state']:<8}{what} " in shown
        assert not one["remedy"] or f"-> {one['remedy']}\n" in shown
    assert found["torch"]["figures"]["version"] == torch.__version__
    assert found["memory"]["figures"]["bytes_per_second"] > 1e8
    assert [one["tokens_per_second"] for one in expected] == sorted(
        (one["tokens_per_second"] for one in expected), reverse=True
    )
    assert all(one["base"] in shown for one in expected)
    assert shown.endswith("Models can be decoded here.\n")


def test_a_torch_that_cannot_be_imported_is_said_and_all_else_is_looked_at(tmp_path):
    """In a process of its own, whose torch lacks a library."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch_cpu.so: cannot open shared object file')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "medusa", "doctor", "--json", str(tmp_path / "doctor.json")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    assert "cannot be imported: libtorch_cpu.so: cannot open shared object file" in done.stdout
    assert "-m pip install --force-reinstall 'torch>=" in done.stdout
    assert "-> unset HF_HUB_OFFLINE" in done.stdout
    assert done.stdout.endswith("until this is fixed: torch.\n") or "fixed: torch, transformers." in done.stdout
    found = json.loads((tmp_path / "doctor.json").read_text(encoding="utf-8"))
    whats = [one["what"] for one in found["findings"]]
    assert {"processor", "compiler", "disk", "hub"} <= set(whats)
    assert not {"kernels", "memory", "gpu"} & set(whats), "they need torch"
    assert found["expectations"] == []


def test_without_a_compiler_decoding_is_slow_and_the_remedy_is_named(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/bin/{name}" if name == "dnf" else None)
    status, found, shown, _ = report(tmp_path, capsys)
    assert status == 0
    assert (found["compiler"]["state"], found["compiler"]["remedy"]) == ("slow", "dnf install gcc-c++")
    assert "no C++ compiler" in shown
    assert "kernels" not in found


def test_kernels_of_a_wheel_need_no_compiler(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(machine.flavours, "shipped", lambda source: source.with_name("kernels-avx2.so"))
    found = machine.compiler()
    assert (found.state, found.says) == ("ok", "not needed: the kernels came compiled (kernels-avx2.so)")


def test_kernels_that_do_not_build_are_slow_too(monkeypatch):
    def fails():
        raise build.NativeUnavailableError(
            "kernel (kernels.cpp) does not build or load: error: no such flag\nsecond line"
        )

    monkeypatch.setattr(native, "kernels", fails)
    found = machine.kernels()
    assert (found.state, "second" in found.says) == ("slow", False)
    assert found.says.endswith("error: no such flag: decoding runs as transformers does")


@pytest.mark.parametrize(("flavour", "state"), [(b"AMX, OpenMP", "ok"), (b"AVX2, OpenMP", "slow"), (b"NEON", "slow")])
def test_flavours(monkeypatch, flavour, state):
    monkeypatch.setattr(native, "kernels", lambda: SimpleNamespace(medusa_flavour=lambda: flavour))
    found = machine.kernels()
    assert found.state == state
    assert ("packed weights" in found.says) == flavour.startswith(b"AVX2")


def test_a_look_that_fails_stops_no_other(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(machine, "disks", lambda: 1 / 0)
    status, found, _, _ = report(tmp_path, capsys)
    assert (status, found["disk"]["state"]) == (0, "unknown")
    assert found["disk"]["says"] == "cannot be examined: ZeroDivisionError: division by zero"
    assert "hub" in found


def test_a_package_that_is_not_there_or_too_old(monkeypatch):
    versions = {"torch": "2.9.1+cpu"}

    def version(package):
        if package not in versions:
            raise packages.metadata.PackageNotFoundError
        return versions[package]

    monkeypatch.setattr(packages.metadata, "version", version)
    found = {one.what: one for one in packages.needed()}
    assert {one.state for one in found.values()} == {"wrong"}
    assert found["torch"].says.startswith("2.9.1+cpu does not fit (")
    assert found["transformers"].says == "is not installed"
    lacking = {one.what: one.figures["lacking"] for one in packages.extras()}
    assert "deepspeed" in lacking["[train]"]
    assert "[dev]" not in lacking


@pytest.mark.parametrize(
    ("version", "versions", "expected"),
    [
        ("2.13.0+cpu", ">=2.11", True), ("2.9.1", ">=2.11", False), ("6.0", "<6,>=5.17", False),
        ("5.23.0", "<6,>=5.17", True), ("2.8.3", "==2.8.3", True), ("2.8.4", "==2.8.3", False), ("0.0.1", "", True),
    ],
)  # fmt: skip
def test_versions(version, versions, expected):
    assert packages.fits(version, versions) == expected


def test_a_clone_that_is_not_installed_knows_what_it_needs(monkeypatch):
    def missing(name):
        raise packages.metadata.PackageNotFoundError

    installed = packages.requirements()
    monkeypatch.setattr(packages.metadata, "requires", missing)
    written = packages.requirements()
    assert set(written) == set(installed)
    assert {extra: set(lines) for extra, lines in written.items()} == {
        extra: set(lines) for extra, lines in installed.items()
    }


def cuda(monkeypatch, available, **functions):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    for name, value in functions.items():
        monkeypatch.setattr(torch.cuda, name, value)


def test_gpus_are_named_with_their_memory(monkeypatch):
    cuda(
        monkeypatch, True, device_count=lambda: 1, get_device_name=lambda index: "NVIDIA L4",
        get_device_capability=lambda index: (8, 9), mem_get_info=lambda index: (20_000_000_000, 24_000_000_000),
    )  # fmt: skip
    monkeypatch.setattr(machine, "bandwidth", lambda device, size: 250e9)
    monkeypatch.setitem(sys.modules, "triton", None)
    gpu, triton = machine.gpus()
    assert gpu.says == "NVIDIA L4 (8.9), 24.0 GB, 20.0 GB of it free, read at 250 GB/s"
    assert (triton.state, triton.remedy) == ("slow", f"{sys.executable} -m pip install triton")
    slow = Finding("memory", "ok", "", figures={"bytes_per_second": 1e10, "available": 4e9})
    smallest, *_, largest = machine.expectations([slow, gpu])
    assert smallest.tokens_per_second == pytest.approx(250e9 / 270e6)
    assert largest.fits
    assert not machine.expectations([slow])[-1].fits


@pytest.mark.parametrize(("built", "remedy"), [(None, machine.CUDA_WHEELS), ("13.0", "nvidia-smi")])
def test_a_driver_that_torch_does_not_use(monkeypatch, built, remedy):
    cuda(monkeypatch, False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/bin/{name}")
    (gpu,) = machine.gpus()
    assert gpu.state == "slow"
    assert remedy in gpu.remedy


def test_directories_without_room_or_rights(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "not there yet"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    assert [one.figures["path"] for one in machine.disks()] == [
        str(tmp_path / "not there yet" / "medusa"), str(tmp_path / "hub")
    ]  # fmt: skip
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    own, hub = machine.disks()
    assert own.state == hub.state == "slow"
    assert (own.remedy, hub.remedy) == (
        "export XDG_CACHE_HOME=/a/directory/with/room", "export HF_HOME=/a/directory/with/room"
    )  # fmt: skip
    monkeypatch.setattr(machine.os, "access", lambda path, mode: False)
    assert all("cannot be written to" in one.says for one in machine.disks())


def test_a_busy_machine_is_said_to_be_busy(monkeypatch):
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (400.0, 0.0, 0.0))
    assert "on which 400 programs run now" in machine.processor().says


def test_the_hub(monkeypatch):
    def answers(outcome):
        def head(url, timeout):
            if outcome is not None:
                raise outcome

        monkeypatch.setattr("huggingface_hub.get_session", lambda: SimpleNamespace(head=head))
        return HUB()

    assert answers(None).state == "ok"
    found = answers(OfflineModeIsEnabled("no"))
    assert found.state == "missing"
    assert "HF_HUB_OFFLINE is set" in found.says


def test_a_report_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["--json", str(tmp_path / "file" / "place.json")]) == 1
    assert "name a file that can be written" in capsys.readouterr().err
