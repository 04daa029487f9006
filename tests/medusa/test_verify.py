"""The verifier: a tree pass equals the sequential passes that it stands for."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from medusa import BaseModel, Tree
from medusa.cache import SlotCache
from medusa.packed import PackedLinear, available, pack_linears
from medusa.step import prefill, verify
from medusa.tree import Draft

CLOSE = {"atol": 1e-5, "rtol": 1e-5}
"""The models are float64, but their norms and softmaxes go through float32."""

SHAPE = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip


def llama_like(kind, tokenizer):
    torch.manual_seed(0)
    if kind == "mistral":
        model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=7))
    else:
        config = Gemma2Config(**SHAPE, sliding_window=7, attn_logit_softcapping=5.0, final_logit_softcapping=8.0)
        model = Gemma2ForCausalLM(config)
    return BaseModel(model.double(), tokenizer)


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2"])
def any_base(request, base, tokenizer):
    return base if request.param == "llama" else llama_like(request.param, tokenizer)


def sequential_logits(any_base, tokens):
    """The base's own logits after the last of the tokens; transformers' masks, no cache."""
    hidden = any_base.hidden_states(torch.tensor([tokens]))
    return any_base.logits(hidden)[0, -1]


@torch.inference_mode()
def test_tree_logits_equal_sequential_logits_and_commit_keeps_the_path(any_base):
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [7, 2, 9], [11]]
    tree = Tree.full([2, 1, 1])
    cache = any_base.new_cache(3, 64)
    state = prefill(any_base, cache, prompts, chunk=5)
    expected = any_base.hidden_states(torch.tensor([prompts[0][:-1]]))[0, -1]
    torch.testing.assert_close(state.hidden[0], expected, **CLOSE)

    history = [list(prompt) for prompt in prompts]
    generator = torch.Generator().manual_seed(5)
    for _ in range(2):
        tokens = torch.randint(1, 50, (3, tree.nodes), generator=generator)
        tokens[:, 0] = torch.tensor([row[-1] for row in history])
        draft = Draft.of(tokens, tree.parents.expand_as(tokens), tree.depth)
        logits = any_base.logits(verify(any_base, cache, draft))
        for b, row in enumerate(history):
            for node in range(tree.nodes):
                path = [tokens[b, j].item() for j in range(1, tree.nodes) if tree.ancestors[node, j]]
                expected = sequential_logits(any_base, row + path)
                torch.testing.assert_close(logits[b, node], expected, **CLOSE)
        leaf = tree.nodes - 1
        path = [j for j in range(tree.nodes) if tree.ancestors[leaf, j]]
        keep = torch.tensor([4, 2, 3])
        rows = torch.tensor([[path[i] if i < count else i for i in range(4)] for count in keep.tolist()])
        cache.commit(rows, keep)
        cache.grow(keep.tolist())
        assert cache.lengths.tolist() == cache.host_lengths
        for b, count in enumerate(keep.tolist()):
            history[b] += [tokens[b, j].item() for j in path[1:count]] + [13]


def test_rows_that_do_not_fit_are_refused():
    cache = SlotCache(1, 4, 1, "cpu")
    with pytest.raises(ValueError, match="ask for a larger capacity"):
        cache.begin(5)


def test_without_a_plan_attention_is_transformers_own(base, base_directory):
    ids = torch.randint(1, 200, (1, 12))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    plain = AutoModelForCausalLM.from_pretrained(base_directory, dtype=torch.float64, attn_implementation="eager")
    parts = [plain.model(ids[:, :5]).last_hidden_state, plain.model(ids[:, 5:]).last_hidden_state]
    torch.testing.assert_close(base.hidden_states(ids, positions), torch.cat(parts, dim=1), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_layers_compute_the_same(dtype):
    if not available(dtype):
        pytest.skip("this torch has no oneDNN packing")
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.SiLU(), torch.nn.Linear(256, 4, bias=False)).to(
        dtype
    )
    x = torch.randn(2, 3, 128, dtype=dtype)
    with torch.no_grad():
        expected = plain(x)
        assert pack_linears(plain) == 1, "the second layer is too small to be worth it"
        assert isinstance(plain[0], PackedLinear)
        assert not hasattr(plain[0], "weight"), "the plain copy is not kept"
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(plain(x), expected, atol=tolerance, rtol=tolerance)
