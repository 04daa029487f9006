"""A base in shares: what it says, what it holds, and that processes do equally many passes of it."""

from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from transformers import LlamaConfig

from medusa.base.model import BaseModel
from medusa.data.packing import pack
from medusa.data.sources import read_samples
from medusa.train.features import BasePass
from medusa.train.sharded_base import load_sharded
from medusa.train.stop import StopRequest
from medusa.train.workers import Workers
from tests.medusa.gguf_files import write_file


@pytest.fixture(params=["directory", "gguf"])
def stored(request, base, tokenizer, tmp_path, monkeypatch):
    """A base in both forms."""
    if request.param == "directory":
        return base
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write_file(tmp_path / "base.gguf", "llama", LlamaConfig, tokenizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_says_what_the_whole_base_says_and_lets_go_of_its_layers(stored: Path, dtype: torch.dtype) -> None:
    workers = Workers.start("cpu", StopRequest())
    whole, sharded = BaseModel.load(stored, dtype, "cpu"), load_sharded(str(stored), dtype, workers.device)
    sizes = (dtype, whole.vocab_size, (whole.vocab_size, whole.hidden_size))
    assert (sharded.dtype, sharded.vocab_size, sharded.lm_head_weight.shape) == sizes
    for seed in range(3):  # DeepSpeed notes the order of layers in the first pass and relies on it later
        ids_BT = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(seed))
        positions_BT = torch.cat([torch.arange(10), torch.arange(14)]).expand(2, -1)
        with torch.no_grad():
            expected, found = whole.hidden_states(ids_BT, positions_BT), sharded.hidden_states(ids_BT, positions_BT)
            tapped = [each.tapped((1,)).hidden_states(ids_BT, positions_BT) for each in (whole, sharded)]
        assert torch.equal(found, expected)
        assert torch.equal(*tapped)
        assert torch.equal(sharded.logits(found), whole.logits(expected))
        assert torch.equal(sharded.embed(ids_BT), whole.embed(ids_BT))
    held = {name for name, parameter in sharded.model.named_parameters() if parameter.numel()}
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= held
    assert not any("gate_proj" in name or "q_proj" in name for name in held)


def test_a_base_that_is_not_there_is_named() -> None:
    workers = Workers.start("cpu", StopRequest())
    with pytest.raises(ValueError, match=r"base \(/no/such/base\) cannot be loaded"):
        load_sharded("/no/such/base", torch.float32, workers.device)


def test_a_process_with_fewer_passes_goes_along(base: Path, samples: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = BaseModel.load(base, torch.float32, "cpu")
    packed, rows = pack(read_samples(samples, whole.tokenizer), 96), torch.tensor([7, 8, 9])
    expected, passes = BasePass(whole, packed, 2, micro_rows=1).read(rows), []
    whole.decoder.register_forward_hook(lambda *_: passes.append(1))
    monkeypatch.setattr(dist, "all_reduce", lambda most, op: most.fill_(5))  # another process needs five passes
    found = BasePass(whole, packed, 2, micro_rows=1, together=True).read(rows)
    assert torch.equal(found, expected)
    assert len(passes) == 5
