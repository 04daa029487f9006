"""One small module under every ZeRO stage against plain torch; run in one process, or as a script by torchrun."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch import distributed as dist

from medusa.train.config import EngineRecipe, OptimRecipe
from medusa.train.engine import Engine
from medusa.train.stop import StopRequest
from medusa.train.workers import Workers

SHAPES = [(0, False), (1, False), (2, False), (3, False), (1, True), (2, True), (3, True)]
"""ZeRO stage and offload."""
OPTIM = replace(OptimRecipe(), weight_decay=0.1, clip_norm=0.5)
STEPS = len(SHAPES)
ROWS = 12


class Net(nn.Module):
    """Two layers whose sizes few numbers of processes divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(7, 5), nn.Linear(5, 3, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor]:
        return (((self.second(torch.tanh(self.first(inputs))) - targets) ** 2).sum() / ROWS,)

    def groups(self) -> list[list[nn.Parameter]]:
        return [list(self.first.parameters()), [self.second.weight]]


def batch(step: int) -> tuple[Tensor, Tensor]:
    data = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, 7, generator=data), torch.randn(ROWS, 3, generator=data)


def rates(step: int) -> list[float]:
    """One for each group."""
    return [0.05 / (1 + step), 0.025 / (1 + step)]


def plain() -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of all steps, and the state after them, in plain torch."""
    net, figures = Net(), []
    optimizer = torch.optim.AdamW([{"params": group} for group in net.groups()], weight_decay=OPTIM.weight_decay)
    for step in range(STEPS):
        for group, rate in zip(optimizer.param_groups, rates(step), strict=True):
            group["lr"] = rate
        optimizer.zero_grad()
        (loss,) = net(*batch(step))
        loss.backward()
        figures += [loss.item(), float(nn.utils.clip_grad_norm_(net.parameters(), OPTIM.clip_norm))]
        optimizer.step()
    state = {"steps": torch.tensor(STEPS)}
    for name, parameter in net.named_parameters():
        state[f"parameter/{name}"] = parameter.detach()
        state |= {f"{moment}/{name}": optimizer.state[parameter][moment] for moment in ("exp_avg", "exp_avg_sq")}
    return figures, state


def make(stage: int, offload: bool) -> Engine:
    net, recipe = Net(), replace(EngineRecipe(), zero_stage=stage, offload=offload)
    return Engine(net, OPTIM, recipe, torch.device("cpu"), net.groups())


def train_step(engine: Engine, step: int) -> list[float]:
    """Loss and norm of one step; steps have different numbers of micro-batches, some of them empty."""
    inputs, targets = (whole.tensor_split(dist.get_world_size())[dist.get_rank()] for whole in batch(step))
    count, total = 1 + 5 * (step % 3), torch.zeros(())
    micros = zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)
    for number, micro in enumerate(micros, start=1):
        (loss,) = engine(*micro)
        engine.backward(loss, last=number == count)
        total += loss.detach()
    engine.step(*rates(step))
    dist.all_reduce(total)
    return [float(total), engine.gradient_norm]


def check(figures: list[float], state: dict[str, Tensor]) -> None:
    expected_figures, expected = plain()
    torch.testing.assert_close(torch.tensor(figures), torch.tensor(expected_figures), rtol=1e-5, atol=1e-5)
    if dist.get_rank() > 0:
        assert not state
        return
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6, msg=name)


def hand_on() -> None:
    """Each step under another ZeRO stage, from the state of the one before."""
    Workers.start("cpu", StopRequest())
    state, figures = make(*SHAPES[-1]).state(), []  # before any step
    for step, shape in enumerate(SHAPES):
        engine = make(*shape)
        engine.load_state(state)
        figures += train_step(engine, step)
        state = engine.state()
    check(figures, state)


if __name__ == "__main__":
    hand_on()
