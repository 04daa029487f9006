"""Every backend on a GPU, against attention computed row by row in float64; and inside a CUDA graph."""

import pytest
import torch

from medusa.attention import TreeAttention, flash
from medusa.attention.backends import build, choose
from tests.medusa.attention_cases import FEATURES, THIN, Case, grid, make, make_draft

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")]

DEVICE = "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LONG = [
    Case(nodes=64, groups=4, dim=128, lengths=(4000, 1000, 0, 2047)),
    Case(nodes=1, groups=4, dim=128, lengths=(8191,)),
    Case(nodes=512, groups=4, dim=128, lengths=(700,), shape="chain"),
    Case(
        nodes=(512, 1, 64, 1), groups=4, dim=128, lengths=(100, 4000, 1000, 0),
        shape=("chain", "star", "random", "star"),
    ),
]  # fmt: skip


@pytest.fixture(params=["reference", "flash", "flash-torch", "triton"])
def backend(request, monkeypatch) -> TreeAttention:
    """Each backend; flash with the package, where it is installed, and with torch's own kernel."""
    if request.param == "triton":
        pytest.importorskip("triton")
    if request.param == "flash" and flash._package() is None:
        pytest.skip("flash-attn is not installed")
    if request.param == "flash-torch":
        monkeypatch.setattr(flash, "_package", lambda: None)
    return build(request.param.partition("-")[0], torch.device(DEVICE))


def check(backend: TreeAttention, case: Case, dtype: torch.dtype) -> None:
    layer = make(case, dtype, device=DEVICE)
    reason = backend.objection(*layer.inputs)
    if case.chunk is not None and backend.name != "reference":
        reason = "chunks are the reference's"
    if reason is not None:
        pytest.skip(reason)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(layer.run(backend).double(), layer.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", [*THIN, *LONG], ids=str)
def test_agrees_with_the_oracle(backend, case, dtype):
    check(backend, case, dtype)


@pytest.mark.parametrize("case", grid(), ids=str)
def test_agrees_with_the_oracle_over_the_grid(backend, case):
    check(backend, case, torch.bfloat16)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("feature", FEATURES)
def test_what_layers_add(backend, feature, dtype):
    check(backend, FEATURES[feature], dtype)


def test_one_graph_serves_all_lengths_and_trees(backend):
    """Plan and attention are captured once for a bucket of positions, then replayed with other trees and lengths."""
    generator = torch.Generator().manual_seed(3)
    case = Case(nodes=33, groups=4, dim=128, lengths=(300, 257))
    layer = make(case, torch.bfloat16, device=DEVICE)
    (draft,) = layer.drafts

    def step() -> torch.Tensor:
        return backend.attend(layer.plan(backend), *layer.inputs)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles kernels, which a capture must not
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([300, 257], [0, 64], [299, 17]):  # no longer than the texts, behind which nothing is defined
        fresh = make_draft("random", 2, case.nodes, generator, DEVICE)
        for name in ("parents", "depths", "ancestors"):
            getattr(draft, name).copy_(getattr(fresh, name))
        layer.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        torch.testing.assert_close(out.double(), layer.expected(), atol=3e-2, rtol=3e-2)


def test_automatic_choice_has_a_reason(caplog):
    with caplog.at_level("INFO", "medusa.attention.backends"):
        backend, reason = choose("auto", torch.device(DEVICE), torch.bfloat16)
    assert f"attention {backend.name}: {reason}" in caplog.text
