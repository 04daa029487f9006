"""The engine under every ZeRO stage, with and without offload, on one process and on three."""

import pytest
import torch

from medusa.train.stop import StopRequest
from medusa.train.workers import Workers
from tests.train import engine_agreement
from tests.train.jobs import finish, launch


def test_every_stage_goes_on_from_another_like_plain_torch() -> None:
    engine_agreement.hand_on()


@pytest.mark.slow
def test_three_processes_train_like_plain_torch() -> None:
    finish(launch(["-m", "tests.train.engine_agreement"], processes=3))


def test_a_state_of_other_parameters_is_refused() -> None:
    Workers.start("cpu", StopRequest())
    engine = engine_agreement.make(1, offload=False)
    state = {name: value for name, value in engine.state().items() if name != "exp_avg/first.bias"}
    with pytest.raises(ValueError, match=r"checkpoint has no exp_avg/first\.bias; it is damaged"):
        engine.load_state(state)
    assert torch.equal(engine.state()["steps"], torch.tensor(0))
