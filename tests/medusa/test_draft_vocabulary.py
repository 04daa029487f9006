"""Heads that can draft a part of the vocabulary: they read a part of the output layer, and the text stays."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medusa import BaseModel, MedusaModel
from medusa.drafters import HeadsDrafter, PlainDrafter, SampledHeadsDrafter
from medusa.formats import load_heads, save_heads
from medusa.heads.frozen import freeze
from tests.medusa.kinds import MEMORYLESS
from tests.medusa.states import decode_state
from tests.medusa.test_conformance import tiny
from tests.medusa.trees import LOPSIDED

PART = 60
PROMPTS = [[5, 6, 7, 5, 6, 8, 5], [40], [9, 9, 9]]


def in_part(heads):
    """The same heads with a random part of the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(heads.config.vocab_size, generator=generator)
    heads.draft_ids.copy_(order[: len(heads.draft_ids)].sort().values)
    return heads


@pytest.fixture
def heads(make_heads):
    return in_part(make_heads(draft_vocab_size=PART))


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "cohere", "gptj"])
def test_logits_of_some_tokens_are_those_of_the_base(family, pack):
    """With a soft cap (gemma2), a scale (cohere), and a bias (gptj)."""
    base, _ = tiny(family)
    if (bias := base.model.get_output_embeddings().bias) is not None:
        torch.nn.init.normal_(bias)
    tokens, hidden = torch.tensor([3, 4, 17, 49]), 9 * torch.randn(2, 5, base.hidden_size).to(base.dtype)
    expected = base.logits(hidden)[..., tokens]
    torch.testing.assert_close(base.logits_of(tokens, pack)(hidden), expected)


def test_an_offloaded_output_layer_is_read_as_a_whole():
    accelerate = pytest.importorskip("accelerate")
    base, _ = tiny("llama")
    tokens, hidden = torch.tensor([3, 4, 17, 49]), torch.randn(2, base.hidden_size).to(base.dtype)
    expected = base.logits(hidden)[:, tokens]
    accelerate.cpu_offload(base.model, execution_device=base.device)
    assert base.lm_head_weight.device.type == "meta"
    torch.testing.assert_close(base.logits_of(tokens, pack=True)(hidden), expected)


def test_a_gradient_passes_through_the_logits_of_some_tokens():
    base, _ = tiny("gemma2")
    hidden, tokens = torch.randn(3, base.hidden_size).to(base.dtype).requires_grad_(), torch.tensor([3, 49])
    (ours,) = torch.autograd.grad(base.logits_of(tokens)(hidden).sum(), hidden)
    (theirs,) = torch.autograd.grad(base.logits(hidden)[:, tokens].sum(), hidden)
    torch.testing.assert_close(ours, theirs)


def test_columns_and_token_ids_are_inverse(heads):
    columns = heads.columns(torch.arange(heads.config.vocab_size))
    assert heads.token_ids(torch.arange(PART)).tolist() == heads.draft_ids.tolist()
    assert (columns >= 0).nonzero()[:, 0].tolist() == heads.draft_ids.tolist()
    assert columns[columns >= 0].tolist() == list(range(PART))
    assert (heads.columns(torch.tensor([-100])) < 0).all()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("architecture", MEMORYLESS)
def test_a_level_gives_the_logits_of_the_part(base, make_heads, architecture, own, frozen):
    options = {"architecture": architecture, "own_lm_heads": own}
    heads, whole = in_part(make_heads(draft_vocab_size=PART, **options)), make_heads(**options)
    state = heads.state_dict()
    if own:
        assert heads.lm_heads.shape == (3, PART, base.hidden_size)
        state["lm_heads"] = whole.lm_heads.index_copy(1, heads.draft_ids, heads.lm_heads)
    ids = state.pop("draft_ids")
    whole.load_state_dict(state)
    if frozen:
        heads = freeze(heads, base)
    hidden, tokens = torch.randn(2, base.hidden_size).to(base.dtype), torch.tensor([[3], [200]])
    (part, _), (all_of_it, _) = (
        h.level(0, h.begin(hidden, base), torch.zeros_like(tokens), tokens, base) for h in (heads, whole)
    )
    assert part.shape == (2, 1, PART)
    torch.testing.assert_close(part, all_of_it[..., ids])


@pytest.mark.parametrize(("drafter", "temperature"), [("heads", 0.0), ("heads-sampled", 1.0), ("static", 1.0)])
def test_text_is_that_of_plain_decoding(base, heads, drafter, temperature):
    model, options = MedusaModel(base, heads), {"max_new_tokens": 12, "temperature": temperature, "seed": 2}
    if drafter == "heads-sampled":
        drafter = SampledHeadsDrafter(heads, base, 12, 1.0)
    how = {"tree": LOPSIDED} if drafter == "static" else {"drafter": drafter}
    plain = model.generate(PROMPTS, drafter=PlainDrafter(), **options)
    outputs = model.generate(PROMPTS, **how, **options)
    assert [o.tokens for o in outputs] == [o.tokens for o in plain]
    assert any(token not in heads.draft_ids for output in outputs for token in output.tokens)


class Reads(TorchDispatchMode):
    """Adds up the bytes of matrices that torch's products read."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.bytes += max(leaf.numel() * 4 for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor))
        return function(*arguments, **(options or {}))


@pytest.fixture
def bytes_read(base_directory, make_heads, monkeypatch):
    """Bytes of matrices that a draft of such heads reads."""
    monkeypatch.setattr("medusa.cpu.native.available", lambda: False)
    base = BaseModel.load(base_directory, dtype=torch.float32, device="cpu")

    def of(num_heads=3, **options):
        drafter = HeadsDrafter(freeze(make_heads(num_heads, **options).float(), base), base, 9, host_decides=False)
        with Reads() as reads:
            drafter.propose(decode_state([[3], [1, 4]], base))
        return reads.bytes

    return of


def test_a_draft_reads_a_part_of_the_output_layer(bytes_read, base):
    whole, part = (bytes_read(architecture="hydra", draft_vocab_size=size) for size in (0, PART))
    levels, row = 3, 4 * base.hidden_size
    assert whole - part == levels * row * (base.vocab_size - PART)


@pytest.mark.parametrize(("architecture", "once"), [("medusa", True), ("markov", True), ("hydra", False)])
def test_heads_that_read_the_output_layer_once_for_all_levels(bytes_read, base, architecture, once):
    three, four = (bytes_read(num_heads, architecture=architecture, rank=2) for num_heads in (3, 4))
    assert (four - three < 4 * base.lm_head_weight.numel()) == once


@pytest.mark.parametrize("damaged", [-1, 3, 1000])
def test_ids_that_are_no_part_of_the_vocabulary_are_one_clear_error(heads, tmp_path, damaged):
    heads.draft_ids[-1] = damaged
    save_heads(heads, tmp_path)
    with pytest.raises(ValueError, match="draft_ids are not ascending token ids below 257; copy or train it again"):
        load_heads(tmp_path)


@pytest.mark.parametrize("size", [-1, 258])
def test_a_part_larger_than_the_vocabulary_is_refused(make_heads, size):
    with pytest.raises(
        ValueError, match=rf"draft_vocab_size \({size}\) must be from 0 to the vocabulary's size \(257\)"
    ):
        make_heads(draft_vocab_size=size)
