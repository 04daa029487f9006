"""The Triton kernel that moves accepted keys and values: on a GPU, or in Triton's interpreter."""

import pytest
import torch

triton = pytest.importorskip("triton")

from medusa.cache import BlockPool  # noqa: E402
from medusa.cache.sequence import commit  # noqa: E402
from medusa.gpu import moves  # noqa: E402

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(not GPU and not triton.knobs.runtime.interpret, reason="there is no GPU")
DEVICE = torch.device("cuda" if GPU else "cpu")
LENGTHS = torch.tensor([30, 5, 63])
PATHS, COUNTS = torch.tensor([[0, 2, 5], [0, 1, 2], [0, 7, 2]]), torch.tensor([3, 1, 2])


def filled(dtype, layers=3, heads=2, dim=20):
    """A pool of three sequences with two blocks each, and their blocks."""
    torch.manual_seed(0)
    pool = BlockPool(layers, DEVICE, 8 * BlockPool.size)
    for arena in pool.arenas:
        like = torch.zeros(1, heads, 1, dim, dtype=dtype, device=DEVICE)
        arena.allocate(9, like, like)
        for buffer in arena.buffers:
            buffer.copy_(torch.randn(buffer.shape))
    return pool, torch.tensor([[1, 4, 7], [2, 5, 0], [3, 6, 8]], device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_of_all_layers_move_as_torch_moves_them(dtype, monkeypatch):
    pool, table = filled(dtype)
    before = [buffer.clone() for buffer in pool.buffers]
    lengths, paths, counts = (tensor.to(DEVICE) for tensor in (LENGTHS, PATHS, COUNTS))
    monkeypatch.setattr("medusa.cpu.native.reads_indices", lambda _: False)
    called, move_rows = [], moves.move_rows
    monkeypatch.setattr(moves, "move_rows", lambda *given: called.append(move_rows(*given)))
    monkeypatch.setattr(moves, "fits", lambda _: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    commit(pool, table, lengths, paths, counts)
    assert called
    for buffer, old in zip(pool.buffers, before, strict=True):
        for sequence, (length, path) in enumerate(zip(LENGTHS.tolist(), PATHS.tolist(), strict=True)):
            for target, source in enumerate(path):
                at, was = (divmod(length + node, pool.size) for node in (target, source))
                ours, theirs = buffer[table[sequence, at[0]], at[1]], old[table[sequence, was[0]], was[1]]
                assert torch.equal(ours, theirs)
        moved = (buffer != old).flatten(2).any(-1).sum()
        assert moved == sum(target != source for path in PATHS.tolist() for target, source in enumerate(path))


def test_addresses_follow_memory_that_grows():
    pool, _ = filled(torch.float32)
    first = pool.addresses()
    assert first is pool.addresses()
    assert first.tolist() == [buffer.data_ptr() for buffer in pool.buffers]
    pool.arenas[1].grow(20)
    assert pool.addresses().tolist() == [buffer.data_ptr() for buffer in pool.buffers] != first.tolist()


def test_only_buffers_that_are_alike_and_on_a_gpu_fit():
    pool, _ = filled(torch.float32)
    assert moves.fits(pool.buffers) is GPU
    assert not moves.fits([*pool.buffers, pool.buffers[0].half()])
