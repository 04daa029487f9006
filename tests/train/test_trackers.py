"""Trackers across kills and restarts; Weights & Biases by a stand-in for its server, and offline for real."""

import json
import logging
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from medusa.train.recipe_file import build_recipe
from medusa.train.run_directory import Position, RunDirectory
from medusa.train.trackers import Trackers

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def _recipe(**log: Any) -> Any:
    return build_recipe({"data.train": "x.jsonl"} | {f"log.{key}": value for key, value in log.items()})


def _record(step: int, start: int = 0) -> dict[str, Any]:
    return {"step": step, "loss": 10.0 * start + step, "head_top1": [0.5, 0.25], "note": "text"}


def _train(directory: RunDirectory, recipe: Any, steps: range, start: int = 0) -> None:
    """Make steps with trackers, from a checkpoint at the first one; a run that ends in the middle dies."""
    if steps.start:
        directory.save(Position(steps.start, total=6, seconds=0.0, data=""), {}, keep=1)
    directory.start(recipe, steps.start)
    trackers = Trackers(recipe, directory, shown=True)
    for step in range(steps.start + 1, steps.stop + 1):
        directory.log(_record(step, start))
        trackers.log(_record(step, start))
    if steps.stop == 6:
        with trackers:
            trackers.log({"step": 6, "heldout_tokens_per_step": 2.0}, more=True)


class FakeServer:
    """Keeps what a wandb run sent, and drops steps that go backwards, as the real one does."""

    def __init__(self) -> None:
        self.history: dict[int, dict[str, float]] = {}
        self.statuses: list[int] = []

    def init(self, **options: Any) -> "FakeServer":
        self.options = options
        self.step = self.starting_step = max(self.history, default=-1) + 1
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        assert step >= self.step, "a step that goes backwards is dropped"
        self.step = step
        self.history.setdefault(step, {}).update(values)

    def finish(self, exit_code: int) -> None:
        self.statuses.append(exit_code)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    server = FakeServer()
    fake = SimpleNamespace(
        init=server.init, login=lambda **_: True, Error=RuntimeError, Settings=lambda **options: options
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_SILENT"):
        monkeypatch.setenv(name, "set")
    return server


def test_wandb_online_neither_loses_nor_doubles_steps(server: FakeServer, tmp_path: Path) -> None:
    directory, recipe = RunDirectory(tmp_path), _recipe(wandb="online")
    _train(directory, recipe, range(4))
    identity = server.options["id"]
    del server.history[4]  # the machine died before it was sent
    _train(directory, recipe, range(2, 6), start=1)
    assert server.options["id"] == identity
    assert server.options["resume"] == "allow"
    assert [server.history[step]["loss"] for step in range(1, 7)] == [1, 2, 3, 14, 15, 16]
    assert server.history[6]["heldout_tokens_per_step"] == 2.0
    assert server.history[1] == {"step": 1, "loss": 1.0, "head_top1/1": 0.5, "head_top1/2": 0.25}
    assert server.statuses == [0]


def test_wandb_gets_the_last_figures_although_it_has_the_last_step(server: FakeServer, tmp_path: Path) -> None:
    directory, recipe = RunDirectory(tmp_path), _recipe(wandb="online")
    server.history = {step: {} for step in range(7)}
    _train(directory, recipe, range(6, 6))
    assert server.history[7]["heldout_tokens_per_step"] == 2.0


def test_a_tracker_that_fails_later_is_dropped_and_training_goes_on(
    server: FakeServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise BrokenPipeError("the service is gone")

    server.log = broken  # type: ignore[method-assign]
    directory = RunDirectory(tmp_path)
    _train(directory, _recipe(wandb="online"), range(6))
    assert [record["step"] for record in directory.records()] == [1, 2, 3, 4, 5, 6]
    assert caplog.text.count("log.wandb failed and is dropped: the service is gone") == 1
    assert server.statuses == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("login", lambda **_: False, "finds no login; run `wandb login`"),
        ("init", None, "cannot be started: no such host; check network"),
    ],
)
def test_wandb_that_cannot_start_is_one_clear_error(
    server: FakeServer, tmp_path: Path, name: str, value: Any, message: str
) -> None:
    def unreachable(**_: Any) -> None:
        raise RuntimeError("no such\nhost")

    setattr(sys.modules["wandb"], name, value or unreachable)
    with pytest.raises(ValueError, match=r"log\.wandb \(online\)") as caught:
        Trackers(_recipe(wandb="online"), RunDirectory(tmp_path), shown=True)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("module", "key", "value"), [("wandb", "wandb", "online"), ("torch.utils.tensorboard", "tensorboard", True)]
)
def test_a_missing_package_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, key: str, value: Any
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"log\.{key} .* needs the package {key}; pip install {key}"):
        Trackers(_recipe(**{key: value}), RunDirectory(tmp_path), shown=True)


def test_other_processes_track_nothing(tmp_path: Path) -> None:
    with Trackers(_recipe(wandb="online", tensorboard=True), RunDirectory(tmp_path), shown=False) as trackers:
        trackers.log(_record(1))
    assert not list(tmp_path.iterdir())


def test_tensorboard_shows_each_step_once_after_a_kill(tmp_path: Path) -> None:
    directory, recipe = RunDirectory(tmp_path), _recipe(tensorboard=True)
    _train(directory, _recipe(), range(2))
    _train(directory, recipe, range(2, 4))
    _train(directory, recipe, range(3, 6), start=1)
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(point.step, point.value) for point in events.Scalars("loss")] == [
        (1, 1), (2, 2), (3, 3), (4, 14), (5, 15), (6, 16),
    ]  # fmt: skip
    assert {"head_top1/1", "head_top1/2", "heldout_tokens_per_step"} <= set(events.Tags()["scalars"])


@pytest.mark.slow
def test_wandb_offline_leaves_one_folder_with_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    directory, recipe = RunDirectory(tmp_path), _recipe(wandb="offline")
    with caplog.at_level(logging.WARNING, "medusa.train"):
        _train(directory, recipe, range(6))
        _train(directory, recipe, range(4, 6), start=1)
    assert not caplog.text
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert _losses(file) == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 15), (6, 16)]


def _losses(file: Path) -> list[tuple[int, float]]:
    """Step and loss of each step in a .wandb file."""
    from wandb.proto.wandb_internal_pb2 import Record

    deadline = time.monotonic() + 30  # another process writes the file, up to an "exit" record
    while True:
        records = [Record.FromString(content) for content in _contents(file.read_bytes())]
        if any(record.HasField("exit") for record in records) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    items = [
        {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.HasField("history")
    ]
    return [(item["step"], item["loss"]) for item in items if "loss" in item]


def _contents(data: bytes) -> Iterator[bytes]:
    """The entries of a log file of LevelDB's format: blocks of 32 KB, chunks behind a checksum, a length and a kind."""
    place, entry = 7, b""  # behind the file's header
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack("<HB", data[place + 4 : place + 7])
        entry += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield entry
            entry = b""
