"""The compiled pass is the base's own pass, and two bases do not share one."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit

from medusa import BaseModel, MedusaModel
from medusa.cpu.compiled import _enough_rows, compile_function, stack_siblings
from medusa.cpu.header_cache import keep_headers_in_cache
from medusa.cpu.packed import PackedLinear, available
from medusa.loading.self_test import choose_decoding, compile_base
from tests.medusa.test_conformance import tiny

needs_packing = pytest.mark.skipif(not available(torch.float32), reason="no oneDNN packing on this machine")


@needs_packing
def test_small_layers_that_read_the_same_tensor_become_one():
    torch.manual_seed(0)
    query, key = PackedLinear(nn.Linear(128, 160)), PackedLinear(nn.Linear(128, 130, bias=False))
    elsewhere = PackedLinear(nn.Linear(130, 128))
    graphs = []

    def function(x):
        packed = torch.ops.medusa.packed_linear
        k = packed(x, key.handle, 130)
        return packed(x, query.handle, 160), packed(k, elsewhere.handle, 128)

    def keep(graph, _inputs):
        graphs.append((graph, stack_siblings(graph)))
        return graph

    x = torch.randn(3, 128)
    with torch.inference_mode():
        ours = torch.compile(function, backend=keep, fullgraph=True)(x)
        torch.testing.assert_close(ours, (query(x), elsewhere(key(x))))
    (graph, stacks) = graphs[0]
    assert [stack.out_features for stack in stacks] == [290]
    assert sum("packed_linear" in str(node.target) for node in graph.graph.nodes) == 2


def test_closures_of_one_function_are_compiled_apart():
    def times(module):
        def function(x):
            return module(x)

        return compile_function(function)

    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    x = torch.randn(3, 4)
    with torch.inference_mode():
        for layer in layers:
            torch.testing.assert_close(times(layer)(x), layer(x))


@pytest.fixture
def compiled_base(base_directory):
    base = BaseModel.load(base_directory, dtype=torch.float32, device="cpu", pack=True)
    compiled = compile_base(base)
    assert compiled.compiled
    return compiled


@pytest.mark.slow
def test_compiled_decoding_writes_the_same_text(compiled_base, base_directory, make_heads):
    eager = MedusaModel(BaseModel.load(base_directory, dtype=torch.float32, device="cpu"), make_heads())
    model = MedusaModel(compiled_base, make_heads())
    prompts = [[7, 8, 9], [65, 66, 67, 68, 69, 70, 71], [5]]
    for nodes in (1, 9):
        theirs = eager.generate(prompts, nodes=nodes, max_new_tokens=40)
        assert [output.tokens for output in model.generate(prompts, nodes=nodes, max_new_tokens=40)] == [
            output.tokens for output in theirs
        ]
        assert model.generate(prompts[1], nodes=nodes, max_new_tokens=40).tokens == theirs[1].tokens


def test_compiled_rows_are_always_tensors_of_inference_mode():
    rows = torch.zeros(5, 1, dtype=torch.long)  # another kind of tensor is another graph: a batch stalled for 50 s
    with torch.inference_mode():
        assert _enough_rows(rows).is_inference()


@pytest.mark.slow
def test_a_pass_that_compiles_to_something_else_is_not_used(base_directory, monkeypatch, caplog):
    base = BaseModel.load(base_directory, dtype=torch.float32, device="cpu")
    monkeypatch.setattr("medusa.cpu.compiled.attend_rows", lambda plan, query, *_: query.transpose(1, 2).clone())
    with caplog.at_level(logging.WARNING, logger="medusa"):
        assert not compile_base(base).compiled
    assert "without compilation: its logits differ" in caplog.text
    with torch.inference_mode():
        assert MedusaModel(base).generate([5, 6, 7], max_new_tokens=3).tokens


def test_a_base_whose_masks_travel_with_the_call_is_not_compiled(base_directory, caplog):
    base = BaseModel.load(base_directory, dtype=torch.float32, device="cpu")
    base = base.with_traits(explicit_mask=True)
    with caplog.at_level(logging.WARNING, logger="medusa"):
        assert not compile_base(base).compiled
    assert "runs without compilation" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_windows_softcaps_and_sinks_reach_the_compiled_attention(family):
    base, _ = tiny(family)  # the self-test's prompts are longer than its windows
    assert compile_base(choose_decoding(base)).compiled


def test_scales_by_cache_index_are_not_compiled(caplog):
    base, _ = tiny("llama4_text")
    with caplog.at_level(logging.WARNING, logger="medusa"):
        assert not compile_base(base).compiled
    assert "runs without compilation: its layers scale queries by their indices" in caplog.text


def test_too_many_compilations_end_in_the_plain_pass(base_directory, monkeypatch, caplog):
    base = BaseModel.load(base_directory, dtype=torch.float32, device="cpu")
    expected = MedusaModel(base).generate([5, 6, 7], max_new_tokens=5).tokens
    base = base.with_compiled_pass()

    def limit(*_):
        raise FailOnRecompileLimitHit("8")

    monkeypatch.setattr(base._compiled, "_run", limit)
    with caplog.at_level(logging.WARNING, logger="medusa"):
        assert MedusaModel(base).generate([5, 6, 7], max_new_tokens=5).tokens == expected
    assert "runs without compilation from now on" in caplog.text
    assert not base.compiled


def test_precompiled_headers_stand_with_the_compilers_cache(tmp_path, monkeypatch):
    from torch._inductor import codecache

    before = codecache._HEADER_DIR
    monkeypatch.setattr(codecache, "_HEADER_DIR", before)
    monkeypatch.setattr(codecache, "_HEADER_LOCK_DIR", codecache._HEADER_LOCK_DIR)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    keep_headers_in_cache()
    assert before == codecache._HEADER_DIR, "nobody has asked for another place"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    keep_headers_in_cache()
    assert Path(codecache._HEADER_DIR).is_relative_to(tmp_path)
    assert Path(codecache._HEADER_LOCK_DIR).is_relative_to(tmp_path)


SMALL = """
import torch
from medusa.cpu.compiled import compile_function
with torch.no_grad():
    print(compile_function(lambda x: torch.nn.functional.gelu(x).sum(-1))(torch.randn(4, 64)).shape)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_compiling_leaves_nothing_in_the_systems_temporary_folder(tmp_path):
    folders = {name: tmp_path / name for name in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HOME")}
    for folder in folders.values():
        folder.mkdir()
    environment = os.environ | {name: str(folder) for name, folder in folders.items()}
    subprocess.run(
        [sys.executable, "-c", SMALL], env=environment, cwd=Path(__file__).parents[2], check=True, timeout=600
    )
    assert any(folders["TORCHINDUCTOR_CACHE_DIR"].rglob("*.gch")), "headers are precompiled"
    for name in ("TMPDIR", "HOME"):
        assert [path for path in folders[name].rglob("*") if path.is_file()] == []
