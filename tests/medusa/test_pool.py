"""Blocks of a shared pool: found by content, never lost, and no bit of a text depends on where they are."""

import copy
import gc
import random
import weakref

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from medusa import BaseModel, EngineConfig, MedusaModel
from medusa.cache import BLOCK, BlockPool, CachedSequence, PoolFullError
from medusa.loading.self_test import fuse
from medusa.sampling import SamplingParams, Speculation
from medusa.tree import Draft
from tests.medusa.passes import finish

CPU = torch.device("cpu")
ENDLESS = {"ignore_eos": True}


@pytest.fixture(scope="module", params=["eager", "fused", pytest.param("reference", marks=pytest.mark.slow)])
def paged(request, base_directory):
    """The small base in float32, by each way of reading blocks."""
    attention = "reference" if request.param == "reference" else "auto"
    base = BaseModel.load(base_directory, torch.float32, "cpu", pack=True, attention=attention)
    if request.param != "reference" and base.attention.name != "exact":
        pytest.skip("there is no C++ compiler here")
    return fuse(base) if request.param == "fused" else base


@pytest.fixture(scope="module")
def model(paged, make_heads):
    return MedusaModel(paged, make_heads().float(), draft_model=paged)


def text(chance, length, vocab_size=250):
    return [chance.randrange(3, vocab_size) for _ in range(length)]


def write(pool, tokens):
    """What a text leaves behind that has ended."""
    sequence = CachedSequence(pool)
    sequence.reserve(len(tokens))
    sequence.length = len(tokens)
    sequence.remember(tokens)
    sequence.close()


# The pool.


def test_the_block_that_was_not_used_for_longest_goes_first_and_the_last_of_a_text_before_its_beginning():
    pool = BlockPool(1, CPU, 4 * BLOCK)
    old, new = [1] * 2 * BLOCK, [2] * 2 * BLOCK
    write(pool, old)
    write(pool, new)
    again = CachedSequence(pool)
    assert again.recall(old) == 2 * BLOCK
    again.close()
    pool.release(pool.take(1))
    assert (pool.known(old), pool.known(new)) == (2 * BLOCK, BLOCK)
    held = pool.take(2)
    assert (pool.known(old), pool.known(new)) == (2 * BLOCK, 0)
    with pytest.raises(PoolFullError, match=r"KV cache \(128 positions\) is full: 64 are held, 96 more needed"):
        pool.take(3)
    pool.release(held)
    assert (pool.held_tokens, len(pool._index.idle)) == (0, 2)
    pool.check_integrity()


def test_texts_that_differ_in_one_token_or_in_what_stands_before_are_different():
    pool = BlockPool(1, CPU)
    write(pool, [1] * BLOCK + [2] * BLOCK)
    assert pool.known([1] * BLOCK + [2] * BLOCK) == 2 * BLOCK
    assert pool.known([2] * BLOCK) == 0
    assert pool.known([1] * (BLOCK - 1)) == pool.known([1] * (BLOCK - 1) + [3]) == 0


def test_equal_texts_share_the_blocks_of_the_first():
    pool = BlockPool(1, CPU)
    one, other = CachedSequence(pool), CachedSequence(pool)
    for sequence in (one, other):
        sequence.reserve(2 * BLOCK)
        sequence.length = 2 * BLOCK
        sequence.remember([7] * 2 * BLOCK)
    assert pool.held_tokens == 2 * BLOCK
    assert torch.equal(*(pool.tables.of([sequence.line])[0, :2] for sequence in (one, other)))


class Other:
    """Another model over the same texts."""

    def new_pool(self):
        return BlockPool(1, CPU)


def test_what_is_dropped_gives_its_blocks_back():
    pool = BlockPool(1, CPU, 4 * BLOCK)
    sequence = CachedSequence(pool)
    sequence.follower(Other()).reserve(5)
    sequence.reserve(3 * BLOCK)
    gone = weakref.ref(sequence)
    gc.disable()
    del sequence
    gc.enable()
    assert gone() is None, "without looking for cycles"
    assert pool.available == 4
    pool.check_integrity()


def test_lost_blocks_are_noticed():
    pool = BlockPool(1, CPU)
    sequence = CachedSequence(pool)
    sequence.reserve(BLOCK)
    pool.check_integrity()
    del pool._users[1]
    with pytest.raises(AssertionError, match="blocks are lost"):
        pool.check_integrity()
    pool._users[1] = 1


def test_a_pool_frees_its_memory_at_once(model):
    pool = model.base.new_pool()
    batch = model.batch(pool)
    batch.add([5, 6, 7], SamplingParams(max_new_tokens=3, **ENDLESS))
    finish(batch)
    memory = weakref.ref(pool.arenas[0].keys)
    gc.disable()
    del pool, batch
    freed = memory() is None
    gc.enable()
    assert freed


def test_a_pool_of_another_base_is_refused(model):
    with pytest.raises(ValueError, match="belongs to another base"):
        model.base.plan([(Draft.chain(torch.tensor([[5]])), [CachedSequence(BlockPool(2, CPU, owner=object()))])])


def test_without_a_limit_memory_grows_for_what_is_held_alone(model):
    pool = model.base.new_pool()
    for seed in range(6):
        batch = model.batch(pool)
        batch.add(text(random.Random(seed), 120), SamplingParams(max_new_tokens=4, **ENDLESS), Speculation(nodes=1))
        finish(batch)
    assert pool.bytes <= (120 + 4 + 3 * BLOCK) * sum(arena.block_bytes for arena in pool.arenas) / BLOCK


def test_memory_is_that_of_the_tokens_held(model):
    """64 requests of 100 to 2,000 positions; lengths alone matter, so nothing is computed."""
    base, chance = model.base, random.Random(0)
    pool, sequences = base.new_pool(), []
    pool.arenas[0].allocate(pool.cache.blocks, *2 * [torch.zeros(1, 2, 1, 8)])
    for _ in range(64):
        sequences.append(CachedSequence(pool))
        sequences[-1].reserve(chance.randrange(100, 2000))
    held = pool.held_tokens
    position = pool.arenas[0].block_bytes / BLOCK
    assert held * position <= pool.bytes <= 1.15 * held * position


def test_growth_moves_what_there_is(base, model, monkeypatch):
    """A pool without a limit that begins with two blocks."""
    prompts = [[5, 6, 7], list(range(3, 80))]
    expected = [out.tokens for out in model.generate(prompts, max_new_tokens=30, **ENDLESS)]
    monkeypatch.setattr("medusa.cache.pool.RESERVED", 2 * BLOCK)
    assert [out.tokens for out in model.generate(prompts, max_new_tokens=30, **ENDLESS)] == expected


# Passes.


def test_a_text_of_a_thousand_tokens(tokenizer):
    """Against transformers' own pass over all of it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048, eos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    base = BaseModel(LlamaForCausalLM(config).double(), tokenizer)
    out = MedusaModel(base).generate([5, 6, 7], max_new_tokens=1000, drafter="prompt-lookup", nodes=16)
    logits = base.logits(base.hidden_states(torch.tensor([[5, 6, 7, *out.tokens]])))[0]
    assert logits[2:-1].argmax(-1).tolist() == out.tokens


# Batches.


def requests(chance, count):
    """Prompts that share beginnings, most of them longer than a block."""
    roots = [text(chance, chance.choice([40, 70, 100])) for _ in range(2)]
    for _ in range(count):
        prompt = chance.choice(roots)[: chance.randrange(1, 100)] + text(chance, chance.choice([0, 1, 3, 40]))
        params = SamplingParams(
            max_new_tokens=chance.randrange(1, 50), temperature=chance.choice([0.0, 1.0]), seed=chance.randrange(9)
        )
        drafter = chance.choice(["heads", "prompt-lookup", "hybrid", "draft-model", "early-exit"])
        yield prompt, params, Speculation(drafter, nodes=chance.choice([1, 3, 6]))


def check(model, pool, seed, alone):
    """The number of tokens that were found in the pool; ``alone`` keeps each request's text without drafts."""
    chance, batches = random.Random(seed), [model.batch(pool) for _ in range(2)]
    waiting, started = list(requests(chance, 6)), []
    while waiting or any(map(len, batches)):
        while waiting and chance.random() < 0.4:
            batch = chance.choice(batches)
            started.append((batch, waiting[0], batch.add(*waiting.pop(0))))
        for batch in batches:
            batch.step()
        growing = [(batch, one) for batch, _, one in started if one.active]
        if growing and chance.random() < 0.03:
            batch, one = chance.choice(growing)
            batch.remove(one)
    for number, (_, (prompt, params, _), request) in enumerate(started):
        if number not in alone:
            alone[number] = model.generate(prompt, sampling=params, nodes=1).tokens
        tokens, expected = request.output.tokens, alone[number]
        assert tokens == (expected[: len(tokens)] if request.output.finish_reason == "abort" else expected)
    return sum(request.output.cached_tokens for *_, request in started)


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 8), marks=pytest.mark.slow)], ids=str)
def test_requests_write_what_they_write_alone_and_no_block_is_lost(model, seeds):
    pools = [model.base.new_pool(tokens) for tokens in (None, 480)]
    found = 0
    for seed in seeds:
        alone = {}
        for pool in pools:
            found += check(model, pool, seed, alone)
            assert pool.held_tokens == 0
            pool.check_integrity()
    assert found > 0


def computed(monkeypatch):
    """Rows that passes of the base compute, pass by pass."""
    rows, run = [], BaseModel.run

    def count(base, pool, plan):
        rows.append(plan.rows)
        return run(base, pool, plan)

    monkeypatch.setattr(BaseModel, "run", count)
    return rows


def test_equal_prompts_that_come_together_are_computed_once(model, monkeypatch):
    prompt, rows = list(range(3, 103)), computed(monkeypatch)
    batch = model.batch()
    params = SamplingParams(max_new_tokens=1, **ENDLESS)
    asked = [batch.add(prompt, params, Speculation(nodes=1)) for _ in range(8)]
    finish(batch)
    known = (len(prompt) - 1) // BLOCK * BLOCK
    assert [one.output.cached_tokens for one in asked] == [0, *[known] * 7]
    assert sum(rows) == len(prompt) + 7 * (len(prompt) - known)
    assert len({tuple(one.output.tokens) for one in asked}) == 1


def test_a_prompt_in_chunks_is_found_as_far_as_it_has_come(model):
    prompt, params = list(range(3, 203)), SamplingParams(max_new_tokens=5, **ENDLESS)
    batch = model.batch(config=EngineConfig(chunk=BLOCK))
    first = batch.add(prompt, params)
    for _ in range(3):
        batch.step()
    second = batch.add([*prompt[: 2 * BLOCK + 5], 9, 9], params)
    batch.remove(first)
    finish(batch)
    assert second.output.cached_tokens == 2 * BLOCK
    assert second.output.tokens == model.generate([*prompt[: 2 * BLOCK + 5], 9, 9], sampling=params).tokens


def test_a_pool_of_a_tenth_of_what_is_wanted_ends_every_request(model):
    """Requests lose their room and go on later with the text that they have where there is room; none starves."""
    chance = random.Random(3)
    params = [SamplingParams(max_new_tokens=50, seed=n, temperature=n % 2, **ENDLESS) for n in range(12)]
    prompts = [text(chance, 20) for _ in params]
    pool = model.base.new_pool(12 * (20 + 50 + 2 * BLOCK) // 10)
    batch = model.batch(pool, EngineConfig(chunk=BLOCK, tree_reserve=2 * BLOCK))
    requests = [batch.add(*one, Speculation("hybrid", nodes=6)) for one in zip(prompts, params, strict=True)]
    finish(batch)
    assert batch.preemptions > 3
    expected = [output.tokens for output in model.generate(prompts, sampling=params)]
    assert [request.output.tokens for request in requests] == expected
    assert batch.pool.held_tokens == 0


def test_what_never_fits_is_refused(model):
    batch = model.batch(model.base.new_pool(512))
    with pytest.raises(ValueError, match=r"prompt and completion \(\d+ positions .* exceed the KV cache \(512 pos"):
        batch.add(text(random.Random(0), 100), SamplingParams(max_new_tokens=20), Speculation(nodes=200))


def test_an_error_in_a_step_loses_no_block(model, monkeypatch):
    pool = model.base.new_pool(1024)
    batch = model.batch(pool)
    request = batch.add(list(range(3, 80)), SamplingParams(max_new_tokens=50, **ENDLESS))
    batch.step()
    assert pool.held_tokens > 0
    monkeypatch.setattr("medusa.engine.steps.decode_step", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        batch.step()
    gone = weakref.ref(batch)
    del batch, request
    assert gone() is None
    assert pool.held_tokens == 0


def test_a_copy_of_the_base_shares_its_pools(model):
    batch = model.batch(copy.copy(model.base).new_pool())
    assert len(batch.add([5, 6], SamplingParams(max_new_tokens=2)).prompt) == 2
