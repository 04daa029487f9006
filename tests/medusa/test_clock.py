"""Threads follow the CPU quota of a container, as fake files of control groups tell it."""

import logging

import pytest
import torch

from medusa import BaseModel, clock


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Writes what the kernel would say: who is a member of what, and the files of groups; there are 8 cores."""
    monkeypatch.setattr(clock, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(clock, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(clock.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)

    def write(membership, files):
        (tmp_path / "membership").write_text(membership)
        for name, text in files.items():
            file = tmp_path / "groups" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")

    return write


V1 = "3:memory:/a\n2:cpu,cpuacct:/docker/1f\n1:cpuset:/\n"


@pytest.mark.parametrize(
    ("membership", "files", "cores"),
    [
        ("0::/\n", {"cpu.max": "250000 100000"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000"}, 1),
        ("0::/\n", {"cpu.max": "1600000 100000"}, 8),
        ("0::/\n", {"cpu.max": "max 100000"}, 8),
        ("0::/\n", {}, 8),
        ("0::/a/b\n", {"cpu.max": "max 100000", "a/cpu.max": "300000 100000", "a/b/cpu.max": "600000 100000"}, 3),
        ("0::/of/the/host\n", {"cpu.max": "400000 100000"}, 4),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "50000"}, 4),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 8),
        (
            V1,
            {
                "cpu,cpuacct/docker/1f/cpu.cfs_quota_us": "300000",
                "cpu,cpuacct/docker/1f/cpu.cfs_period_us": "100000",
                "memory/a/cpu.max": "100000 100000",
            },
            3,
        ),
        ("0::/\n", {"cpu.max": "what is this"}, 8),
    ],
)
def test_cores_follow_the_strictest_quota(groups, membership, files, cores):
    groups(membership, files)
    assert clock.cores() == cores


def test_without_control_groups_there_is_no_quota(groups):
    assert clock.cores() == 8


@pytest.fixture
def threads(groups, monkeypatch):
    """8 threads, which torch chose, where a quota is worth 3 cores."""
    groups("0::/\n", {"cpu.max": "300000 100000"})
    monkeypatch.setattr(clock, "TORCHS_THREADS", 8)
    for name in clock.CHOICES:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


def test_a_loaded_model_uses_no_more_threads_than_the_quota_is_worth(threads, base_directory, caplog):
    with caplog.at_level(logging.INFO, logger="medusa.clock"):
        BaseModel.load(base_directory, device="cpu")
        BaseModel.load(base_directory, device="cpu")
    assert torch.get_num_threads() == 3
    assert caplog.messages == ["using 3 CPU threads instead of 8: this process may use no more cores"]


@pytest.mark.parametrize("name", clock.CHOICES)
def test_a_number_in_the_environment_stays(threads, monkeypatch, name):
    monkeypatch.setenv(name, "8")
    clock.limit_threads()
    assert torch.get_num_threads() == 8


@pytest.mark.parametrize("chosen", [2, 6])
def test_a_number_given_to_torch_stays(threads, chosen):
    torch.set_num_threads(chosen)
    clock.limit_threads()
    assert torch.get_num_threads() == chosen
