"""Tensor parallel: several processes give the tokens of one, what cannot be divided is refused, and nobody hangs."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from medusa import BaseModel, DraftHeads
from medusa.formats import save_heads
from tests.medusa.tensor_parallel_cases import load, said

ROOT = Path(__file__).parents[2]
CASES = "tests.medusa.tensor_parallel_cases"
FAILING = """
import json
import sys
from medusa import BaseModel
from tests.medusa.tensor_parallel_cases import load, said

def fail(*_):
    raise RuntimeError("this rank alone")

model = load(*sys.argv[1:])
try:
    BaseModel.load(sys.argv[1], device="cpu", load_options={"tp_plan": "auto"})
except ValueError as error:
    print(error, flush=True)
print(json.dumps(said(model)))
model.base.decoder.layers[1].register_forward_pre_hook(fail)
for _ in range(2):
    try:
        model.generate("a", max_new_tokens=2)
    except RuntimeError as error:
        print(type(error).__name__, error)
"""
WAITING = """
import sys
from tests.medusa.tensor_parallel_cases import load

model = load(*sys.argv[1:])
print("loaded", flush=True)
sys.stdin.readline()
print(type(model.base).__name__, model.generate("a", max_new_tokens=2).text)
"""


@pytest.fixture(scope="module")
def names(
    base_directory: Path, make_heads: Callable[..., DraftHeads], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, ...]:
    """Arguments of ``load``: base, heads, attention, draft model."""
    heads = save_heads(make_heads().float(), tmp_path_factory.mktemp("heads"))
    return str(base_directory), str(heads), "reference", str(base_directory)


@contextmanager
def ranks(*arguments: str, count: int = 2) -> Iterator[list[subprocess.Popen[str]]]:
    """The same command on so many ranks, which nobody watches, as torchrun would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=os.environ | group | {"RANK": rank, "LOCAL_RANK": rank},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in map(str, range(count))
    ]  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


@contextmanager
def loaded(*names: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks that wait with a loaded model."""
    with ranks("-c", WAITING, *names) as both:
        assert both[0].stdout is not None
        assert both[0].stdout.readline() == "loaded\n"
        yield both


def assert_tokens_of_one(names: tuple[str, ...], told: str) -> None:
    """That two processes have said what this one says."""
    ours, theirs = json.loads(told), said(load(*names))
    assert (ours.pop("ranks"), theirs.pop("ranks")) == (2, 1)
    assert ours.keys() == theirs.keys()
    for way, tokens in theirs.items():
        assert ours[way] == tokens, way


@pytest.mark.slow
def test_two_processes_give_the_tokens_of_one(names: tuple[str, ...], tmp_path: Path) -> None:
    base, heads, _, small = names
    names, out = (base, heads, "exact", small), tmp_path / "said.json"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", CASES, *names, str(out)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=300)
    assert_tokens_of_one(names, out.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_after_a_pass_that_fails_on_one_rank_nothing_is_computed_and_all_end(names: tuple[str, ...]) -> None:
    """Until then they give the tokens of one, with the reference's attention too."""
    with ranks("-c", FAILING, *names) as (first, second):
        assert first.stdout is not None
        refused = first.stdout.readline()
        second.terminate()  # as torchrun does to all; rank 0 may have answers to end
        told, errors = first.communicate(timeout=300)
        assert first.returncode == 0, errors
        tokens, failed, again = told.splitlines()
        assert_tokens_of_one(names, tokens)
        assert "is the second one under tensor parallel; load one in each start" in refused
        assert failed == "RuntimeError this rank alone"
        assert again.startswith("GroupError a pass of the base has failed on a rank")
        assert second.wait(60) != 0


@pytest.mark.slow
def test_ranks_outlive_no_one(names: tuple[str, ...]) -> None:
    with loaded(*names) as (first, second):
        second.terminate()  # as torchrun does to all; rank 0 may have answers to end
        told, errors = first.communicate("\n", timeout=60)
        assert (first.returncode, second.wait(60)) == (0, 0), errors
        assert told.startswith("BaseModel ")
    with loaded(*names) as (first, second):
        first.kill()
        assert second.wait(60) == 1
        assert "rank 0 has ended, so this rank (1) ends too" in second.communicate()[1]
    with loaded(*names) as (first, second):
        second.kill()
        first.communicate("\n", timeout=60)
        assert first.returncode == 1


@pytest.mark.parametrize(
    ("processes", "arguments", "message"),
    [
        (1, {}, r"tensor parallel \(tp_plan auto\) divides the base among processes, and this is the only one"),
        (4, {}, r"processes \(4\) do not divide the base's heads \(4 of queries, 2 of keys\)"),
        (2, {"int8": True}, r"int8 \(True\) cannot be combined with tensor parallel"),
        (2, {"adapter": "some"}, r"adapter \(some\) cannot be combined with tensor parallel"),
        (2, {"device": "cpu:0"}, r"device \(cpu:0\) cannot be chosen: each rank"),
        (2, {"load_options": {"tp_plan": "auto", "device_map": "auto"}}, r"device_map \(auto\) cannot be combined"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    base_directory: Path, processes: int, arguments: dict[str, object], message: str
) -> None:
    os.environ["WORLD_SIZE"] = str(processes)
    with pytest.raises(ValueError, match=message):
        BaseModel.load(base_directory, **{"load_options": {"tp_plan": "auto"}} | arguments)  # type: ignore[arg-type]
