"""The launcher hands on what a failed worker said and its exit status."""

import pytest
from torch.distributed import DistNetworkError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from medusa.train.launch import exit_status


@pytest.mark.parametrize(
    ("exit_code", "status", "said"),
    [(2, 2, ""), (1, 1, ""), (130, 130, ""), (-9, 1, "process 11 was killed by SIGKILL")],
)
def test_a_workers_exit_status_is_handed_on_and_one_that_cannot_speak_is_named(exit_code, status, said, caplog):
    failure = ProcessFailure(local_rank=3, pid=1, exitcode=exit_code, error_file="/nowhere")
    assert exit_status(ChildFailedError("train", {11: failure})) == status
    assert said in caplog.text


def test_a_signal_to_the_launcher_is_its_exit_status():
    assert exit_status(SignalException("stopped", 2)) == 130


def test_machines_that_cannot_meet_are_one_sentence(caplog):
    assert exit_status(DistNetworkError("address already in use")) == 1
    assert "processes cannot connect: address already in use; check MASTER_ADDR" in caplog.text
