"""``medusa train``: what it checks, and what it tells torchrun."""

import pytest

from medusa.train import command
from medusa.train.recipe_file import RecipeError


@pytest.fixture
def machine(monkeypatch):
    """8 cores and, where a test says so, GPUs."""
    monkeypatch.setattr("medusa.clock.cores", lambda: 8)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    return monkeypatch


def test_one_process_for_each_gpu(machine):
    machine.setattr("torch.cuda.device_count", lambda: 4)
    assert command.torchrun_flags({})[:2] == ["--nproc_per_node", "4"]


@pytest.mark.parametrize(("processes", "threads"), [("", "8"), ("3", "2"), ("100", "1")])
def test_processes_divide_the_cores(machine, processes, threads):
    environment = {"NPROC": processes}
    flags = command.torchrun_flags(environment)
    assert flags[1] == (processes or "1")
    assert environment["OMP_NUM_THREADS"] == threads
    assert "--standalone" in flags


@pytest.mark.parametrize("named", ["two", "0", "-1", "1.5"])
def test_nproc_is_a_number_of_processes(machine, caplog, named):
    machine.setenv("NPROC", named)
    machine.setattr(command, "work", lambda words: 0)
    assert command.main(["--recipe", "x.yaml"]) == 2
    assert f"NPROC ({named}) must be a number of processes" in caplog.text


def test_threads_that_the_user_names_stay(machine):
    environment = {"NPROC": "2", "OMP_NUM_THREADS": "3"}
    command.torchrun_flags(environment)
    assert environment["OMP_NUM_THREADS"] == "3"


def test_several_machines(machine):
    with pytest.raises(RecipeError, match="MASTER_ADDR"):
        command.torchrun_flags({"NNODES": "2"})
    flags = command.torchrun_flags({"NPROC": "8", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"})
    assert " ".join(flags).startswith(
        "--nproc_per_node 8 --nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 29500 --log_dir"
    )


@pytest.mark.parametrize("flag", ["--help", "--check"])
def test_what_only_talks_starts_no_torchrun(machine, flag):
    asked = []
    machine.setattr(command, "work", lambda words: asked.append(list(words)) or 0)
    assert command.main([flag]) == 0
    assert asked == [[flag]]


def test_torchrun_is_not_started_by_its_own_processes(machine):
    asked = []
    machine.setenv("TORCHELASTIC_RUN_ID", "a")
    machine.setattr(command, "work", lambda words: asked.append(list(words)) or 0)
    machine.setattr("medusa.train.launch.main", lambda words: pytest.fail("torchrun was started"))
    assert command.main(["--recipe", "x.yaml"]) == 0
    assert asked == [["--recipe", "x.yaml"]]


def test_a_wrong_recipe_is_refused_before_torchrun(machine):
    machine.setattr(command, "work", lambda words: 2 if words[0] == "--check" else 0)
    machine.setattr("medusa.train.launch.main", lambda words: pytest.fail("torchrun was started"))
    assert command.main(["--recipe", "x.yaml"]) == 2


def test_torchrun_gets_the_arguments(machine):
    started = []
    machine.setenv("OMP_NUM_THREADS", "1")
    machine.setattr(command, "work", lambda words: 0)
    machine.setattr("medusa.train.launch.main", lambda words: started.append(list(words)) or 0)
    assert command.main(["--recipe", "x.yaml"]) == 0
    assert started[0][-4:] == ["-m", "medusa.train", "--recipe", "x.yaml"]
