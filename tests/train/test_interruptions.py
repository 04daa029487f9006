"""Runs that end before they are done: signals, a full disk, lost processes and machines; and how they go on."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medusa import BaseModel, MedusaModel
from medusa.train.run_directory import RunDirectory
from tests.train.jobs import (
    ROOT,
    Acting,
    alive,
    assert_same_run,
    finish,
    free_port,
    metrics,
    run,
    train,
    until,
    workers,
    write_recipe,
)

pytestmark = pytest.mark.usefixtures("no_pictures")


def _arrives(number: int) -> Callable[..., None]:
    return lambda *_, **__: os.kill(os.getpid(), number)


def test_a_signal_ends_a_run_with_a_checkpoint(
    finished: Path, recipe: Path, tmp_path: Path, before_step: Acting, caplog: pytest.LogCaptureFixture
) -> None:
    for step, number in ((3, signal.SIGINT), (6, signal.SIGTERM)):
        with before_step(step, _arrives(number)):
            assert run(recipe, tmp_path) == 128 + number
        assert f"stopped by {number.name} at step {step + 1}; the same command continues" in caplog.text
        position = RunDirectory(tmp_path).position()
        assert position is not None and position.step == step + 1
    with before_step(8, lambda: [_arrives(signal.SIGINT)() for _ in range(2)]):
        assert run(recipe, tmp_path) == 130
    assert "stopped; the same command continues from the last checkpoint" in caplog.text, "a second one ends at once"
    assert run(recipe, tmp_path) == 0
    assert_same_run(tmp_path, finished, tolerance=1e-6)


def test_a_signal_during_evaluation_is_not_kept_waiting(
    finished: Path, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decoded = []
    generate = MedusaModel.generate

    def interrupted(model: Any, prompt: list[int], **options: Any) -> Any:
        decoded.append(prompt)
        os.kill(os.getpid(), signal.SIGTERM)
        return generate(model, prompt, **options)

    with monkeypatch.context() as patch:
        patch.setattr(MedusaModel, "generate", interrupted)
        assert run(recipe, tmp_path) == 143
        assert run(recipe, tmp_path, **{"evaluate.every_steps": 0}) == 143
    assert len(decoded) == 2  # one prompt of two, in the evaluation at step 6 and in the last one
    assert "stopped by SIGTERM at step 6;" in caplog.text
    assert "stopped by SIGTERM at step 9;" in caplog.text
    assert run(recipe, tmp_path) == 0
    assert_same_run(tmp_path, finished, tolerance=1e-6)


def test_an_evaluation_that_a_signal_left_out_is_made_up(
    finished: Path, recipe: Path, tmp_path: Path, before_step: Acting
) -> None:
    with before_step(5, _arrives(signal.SIGTERM)):
        assert run(recipe, tmp_path) == 143
    assert run(recipe, tmp_path) == 0
    for ours, theirs in zip(metrics(tmp_path), metrics(finished), strict=True):
        assert ours.get("heldout_top1") == theirs.get("heldout_top1")
        assert ours.get("heldout_tokens_per_step") == theirs.get("heldout_tokens_per_step")
    assert_same_run(tmp_path, finished, tolerance=1e-6)


@pytest.mark.parametrize(("number", "status", "name"), [(15, 143, "SIGTERM"), (signal.SIGUSR1, 138, "SIGUSR1")])
def test_a_signal_while_the_base_is_loaded_ends_at_once(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    number: int, status: int, name: str,
) -> None:  # fmt: skip
    handler = signal.getsignal(number)
    monkeypatch.setattr(BaseModel, "load", _arrives(number))
    assert run(recipe, tmp_path) == status
    assert f"stopped by {name} before training began; the same command continues" in caplog.text
    assert signal.getsignal(number) is handler


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def long_recipe(tmp_path_factory: pytest.TempPathFactory, base: Path, samples: Path) -> Path:
    sections = {"optim": {"steps": 50, "rows_per_step": 4}}
    return write_recipe(tmp_path_factory.mktemp("recipe") / "recipe.yaml", base, samples, sections)


@pytest.fixture(scope="module")
def uninterrupted(long_recipe: Path) -> Path:
    assert run(long_recipe, long_recipe.parent / "whole") == 0
    return long_recipe.parent / "whole"


def _last_step(run: Path) -> int:
    lines = metrics(run)
    return int(lines[-1]["step"]) if lines else 0


@linux
@pytest.mark.slow
def test_deaths_on_changing_numbers_of_processes_change_nothing(
    uninterrupted: Path, long_recipe: Path, tmp_path: Path
) -> None:
    for life, (processes, stage) in enumerate([(2, 3), (1, 0), (2, 2)]):
        goal = _last_step(tmp_path) + 8 + 2 * life
        job = train(long_recipe, tmp_path, {"engine.zero_stage": stage}, processes=processes)
        until(lambda goal=goal: _last_step(tmp_path) >= goal)  # type: ignore[misc]
        children = workers(job)
        assert len(children) == processes
        if life:
            os.kill(job.pid if life == 1 else children[1], signal.SIGTERM)  # torchrun hands it on; the processes agree
            said = finish(job, status=143)
            assert f"stopped by SIGTERM at step {_last_step(tmp_path)}; the same" in said
            assert RunDirectory(tmp_path).position().step == _last_step(tmp_path)  # type: ignore[union-attr]
        else:
            job.kill()
            job.communicate()
        until(lambda pids=children: not any(map(alive, pids)))  # type: ignore[misc]
        assert not (tmp_path / "heads").exists()
    assert "resumed at step" in finish(train(long_recipe, tmp_path, {"engine.offload": True}))
    assert_same_run(tmp_path, uninterrupted, tolerance=1e-5)


@linux
@pytest.mark.slow
def test_a_killed_process_ends_the_run_with_one_sentence(long_recipe: Path, tmp_path: Path) -> None:
    job = train(long_recipe, tmp_path)
    until(lambda: _last_step(tmp_path) > 8)
    os.kill(workers(job)[1], signal.SIGKILL)
    said = finish(job, status=1).splitlines()
    assert said[-1].startswith("process 1 was killed by SIGKILL")
    assert not any("lost" in line or "another process" in line for line in said)
    position = RunDirectory(tmp_path).position()
    assert position is not None
    assert RunDirectory(tmp_path).tensors(position)["steps"] == position.step


@linux
def test_a_process_that_begins_does_not_outlive_torchrun(tmp_path: Path) -> None:
    os.mkfifo(recipe := tmp_path / "recipe.yaml")
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-m', 'medusa.train', '--recipe', '{recipe}'])"
    environment = os.environ | {"TORCHELASTIC_RUN_ID": "a"}
    agent = subprocess.Popen([sys.executable, "-c", start], cwd=ROOT, env=environment, text=True)
    with recipe.open("w"):  # it has come to its recipe, and waits for the text
        (worker,) = workers(agent)
        agent.kill()
        agent.wait()
        until(lambda: not alive(worker), seconds=10)


@linux
@pytest.mark.slow
def test_two_machines_train_lose_a_process_and_resume(uninterrupted: Path, long_recipe: Path, tmp_path: Path) -> None:
    def start() -> list[Any]:
        port = free_port()
        return [train(long_recipe, tmp_path, processes=1, node=node, port=port) for node in (0, 1)]

    first, second = start()
    until(lambda: _last_step(tmp_path) > 8)
    os.kill(workers(second)[0], signal.SIGKILL)
    assert "process 1 was killed by SIGKILL" in finish(second, status=1)
    assert "another process of the run ended or cannot be reached any more" in finish(first, status=1)

    first, second = start()
    assert "resumed at step" in finish(first)
    finish(second)
    assert_same_run(tmp_path, uninterrupted, tolerance=1e-5)
