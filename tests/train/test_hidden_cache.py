"""Hidden states on disk: the same as the base's, written whole, refused where they belong to something else."""

import os
import resource
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from medusa.base.model import BaseModel
from medusa.data.packing import PackedRows, pack
from medusa.data.sources import read_samples
from medusa.heads import HeadsConfig, build_heads
from medusa.train import hidden_cache
from medusa.train.features import BasePass
from medusa.train.hidden_cache import HiddenCache
from medusa.train.medusa1 import Medusa1
from medusa.train.recipe_file import build_recipe
from medusa.train.workers import Workers

HEADS = 3


@pytest.fixture(scope="module")
def frozen(base: Path) -> BaseModel:
    return BaseModel.load(base, dtype=torch.bfloat16, device="cpu")


@pytest.fixture(scope="module")
def packed(frozen: BaseModel, samples: Path) -> PackedRows:
    return pack(read_samples(samples, frozen.tokenizer), row_tokens=96)


class CountedPass(BasePass):
    """The base, and the rows that it was asked for."""

    def __init__(self, base: BaseModel, packed: PackedRows) -> None:
        super().__init__(base, packed, HEADS, micro_rows=2)
        self.asked: list[int] = []

    def read(self, rows_B: Tensor) -> Tensor:
        self.asked += rows_B.tolist()
        return super().read(rows_B)


def _cache(directory: Path, base: BaseModel, packed: PackedRows, shard_bytes: int = 10_000) -> HiddenCache:
    return HiddenCache(directory, base, packed, HEADS, CountedPass(base, packed), shard_bytes)


def _asked(cache: HiddenCache) -> list[int]:
    source = cache._source
    assert isinstance(source, CountedPass)
    return source.asked


def test_rows_in_any_order_are_the_bases_own(tmp_path: Path, frozen: BaseModel, packed: PackedRows) -> None:
    cache = _cache(tmp_path, frozen, packed)
    cache.fill(torch.arange(20), rows_at_a_time=3, shown=False)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    again = _cache(tmp_path, frozen, packed)
    rows = torch.tensor([7, 25, 3, 19, 30, 0])
    expected = BasePass(frozen, packed, HEADS, micro_rows=2).read(rows)
    for _ in range(2):
        states = again.read(rows)
        assert len(states) == len(expected)
        mixed = torch.randperm(len(expected), generator=torch.Generator().manual_seed(0))[:50]
        for index in (torch.arange(len(expected)), mixed, mixed[:0], torch.tensor([len(expected) - 1, 0, 0])):
            taken = states[index, :]
            assert taken.dtype == torch.bfloat16
            torch.testing.assert_close(taken, expected[index], rtol=0.02, atol=0.02)
            assert torch.equal(states[index, :7], taken[:, :7])
    assert _asked(again) == [25, 30]
    again.flush()
    third = _cache(tmp_path, frozen, packed)
    third.read(rows)
    assert not _asked(third)


def test_a_shard_is_mapped_once_whatever_the_order_of_rows(
    tmp_path: Path, frozen: BaseModel, packed: PackedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system limits the number of mappings of a process."""
    cache = _cache(tmp_path, frozen, packed)
    cache.fill(torch.arange(20), rows_at_a_time=3, shown=False)
    opened, really = list[Path](), hidden_cache._open
    monkeypatch.setattr(hidden_cache, "_open", lambda path: (opened.append(path), really(path))[1])
    cache.read(torch.randperm(20, generator=torch.Generator().manual_seed(0)))
    assert len(opened) == len(set(opened)) > 2


def test_what_another_process_wrote_is_found(tmp_path: Path, frozen: BaseModel, packed: PackedRows) -> None:
    ours, theirs = _cache(tmp_path, frozen, packed), _cache(tmp_path, frozen, packed)
    theirs.fill(torch.arange(4), rows_at_a_time=2, shown=False)
    ours.read(torch.arange(4))
    assert not _asked(ours)


def test_what_a_killed_process_left_is_removed(tmp_path: Path, frozen: BaseModel, packed: PackedRows) -> None:
    _cache(tmp_path, frozen, packed)
    before = time.time() - 7200
    for name, changed in ((".0a-1.tmp9", before), (".manifest.tmp9", before), (".0a-2.tmp9", None)):
        (tmp_path / name).write_bytes(b"half")
        if changed is not None:
            os.utime(tmp_path / name, (changed, changed))
    cache = _cache(tmp_path, frozen, packed)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".0a-2.tmp9", "manifest.json"]
    cache.read(torch.tensor([0]))
    assert _asked(cache) == [0], "half a shard does not count"


def test_a_damaged_shard_is_computed_again(tmp_path: Path, frozen: BaseModel, packed: PackedRows) -> None:
    _cache(tmp_path, frozen, packed).fill(torch.arange(4), rows_at_a_time=2, shown=False)
    shards = sorted(tmp_path.glob("*.safetensors"))
    hidden_cache._open.cache_clear()  # as in another process
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    cache = _cache(tmp_path, frozen, packed)
    expected = BasePass(frozen, packed, HEADS, micro_rows=2).read(torch.arange(4))
    found = cache.read(torch.arange(4))[torch.arange(len(expected)), :]
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert 0 < len(_asked(cache)) <= 4


def test_shards_of_another_owner_do_not_count(
    tmp_path: Path, base: Path, frozen: BaseModel, packed: PackedRows
) -> None:
    other = BaseModel.load(base, dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        next(other.model.parameters()).add_(1.0)
    _cache(tmp_path, other, packed).fill(torch.arange(4), rows_at_a_time=2, shown=False)
    (tmp_path / "manifest.json").unlink()  # or two runs started at once, and the later one wrote it
    cache = _cache(tmp_path, frozen, packed)
    cache.read(torch.arange(4))
    assert _asked(cache) == [0, 1, 2, 3]


def test_a_full_disk_is_one_sentence(tmp_path: Path, frozen: BaseModel, packed: PackedRows) -> None:
    cache = _cache(tmp_path, frozen, packed)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"hidden-state cache .* cannot be written: File too large.*; make room"):
            cache.fill(torch.arange(4), rows_at_a_time=2, shown=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    with pytest.raises(OSError, match=r"hidden-state cache .* cannot be written: Not a directory; make room"):
        _cache(tmp_path / "manifest.json" / "cache", frozen, packed)


def test_another_identity_is_refused(
    tmp_path: Path, base: Path, frozen: BaseModel, packed: PackedRows, samples: Path
) -> None:
    _cache(tmp_path, frozen, packed)
    other = BaseModel.load(base, dtype=torch.bfloat16, device="cpu")
    with torch.no_grad():
        next(other.model.parameters()).add_(1.0)
    with pytest.raises(ValueError, match=r"belongs to something else: base is \w+, the states have \w+; delete it"):
        _cache(tmp_path, other, packed)
    stretched = BaseModel.load(base, dtype=torch.bfloat16, device="cpu")
    stretched.model.config.rope_parameters = stretched.model.config.rope_parameters | {"rope_theta": 5e5}
    with pytest.raises(ValueError, match=r"something else: config is \w+, the states have"):
        _cache(tmp_path, stretched, packed)
    with pytest.raises(ValueError, match="dtype is float32, the states have bfloat16"):
        _cache(tmp_path, BaseModel.load(base, dtype=torch.float32, device="cpu"), packed)
    with pytest.raises(ValueError, match="rows is"):
        _cache(tmp_path, frozen, pack(read_samples(samples, frozen.tokenizer), row_tokens=80))
    with pytest.raises(ValueError, match="heads is 2"):
        HiddenCache(tmp_path, frozen, packed, 2, CountedPass(frozen, packed), 10_000)
    with pytest.raises(ValueError, match=r"layers is \[1\], the states have None"):
        _cache(tmp_path, frozen.tapped((1,)), packed)
    _cache(tmp_path / "tapped", frozen.tapped((1,)), packed)
    with pytest.raises(ValueError, match=r"layers is None, the states have \[1\]"):
        _cache(tmp_path / "tapped", frozen, packed)


def test_a_damaged_manifest_is_named(tmp_path: Path, frozen: BaseModel, packed: PackedRows) -> None:
    (tmp_path / "manifest.json").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"manifest .* is not valid JSON: .*; delete"):
        _cache(tmp_path, frozen, packed)


def test_processes_share_what_is_missing(
    tmp_path: Path, frozen: BaseModel, packed: PackedRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a run goes on with another number of processes; the others wait for the last one."""

    class Alone(Workers):
        def wait(self) -> None:
            """The other one is not there."""

    done = len(packed) // 2
    _cache(tmp_path, frozen, packed).fill(torch.arange(done), rows_at_a_time=2, shown=False)
    cache = {"cache.mode": "offline", "cache.directory": str(tmp_path), "optim.micro_rows": 1}
    recipe = build_recipe({"data.train": "x.jsonl", "heads.num_heads": HEADS} | cache)
    heads = build_heads(HeadsConfig(frozen.hidden_size, frozen.vocab_size, HEADS))
    workers = [Alone(rank, 2, frozen.device) for rank in range(2)]
    methods = [Medusa1(recipe, frozen, heads, packed, one, total=1) for one in workers]
    passes: list[int] = []
    read = BasePass.read
    monkeypatch.setattr(BasePass, "read", lambda self, rows_B: passes.extend(rows_B.tolist()) or read(self, rows_B))
    methods[0].prepare()
    first = len(passes)
    methods[1].prepare()
    assert len(passes) == len(packed) - done
    assert abs(2 * first - len(passes)) <= 1
