"""Requests that join and leave at random write what they write alone."""

import os
import random
from types import SimpleNamespace

import pytest
import torch

from medusa import BaseModel, EngineConfig, MedusaModel
from medusa.cache import BLOCK
from medusa.engine.graph import StepGraphs
from medusa.engine.logprobs import SCORED, LogprobReader
from medusa.sampling import SamplingParams, Speculation
from medusa.tree import Tree
from tests.medusa.kinds import REMEMBER
from tests.medusa.passes import finish
from tests.medusa.tape import Recorder

SCHEDULES = 5
"""``test_many_schedules`` runs more."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _anew(step):
    return step


@pytest.fixture(
    scope="module",
    params=[
        "cpu", "cpu, attention heads", "gpu", *(["gpu, triton"] if INTERPRETED else []),
        *(pytest.param(f"gpu, {name} heads", marks=pytest.mark.slow) for name in REMEMBER),
    ],
)  # fmt: skip
def speaker(request, base, base_directory, make_heads):
    """Under a CPU's rules (any shape, asking is free) and a GPU's (recorded steps in fixed buckets).

    With Triton's kernels, in its interpreter, steps in such buckets run anew in place of being repeated.
    """
    kinds = [{"architecture": name} for name in REMEMBER if name in request.param]
    options = kinds[0] | {"feature_layers": (1,), "own_lm_heads": True} if kinds else {}
    heads, record = make_heads(**options), Recorder()
    if "triton" in request.param:
        base, heads = BaseModel.load(base_directory, torch.float32, "cpu", attention="triton"), heads.float()
        record = _anew
    graphs = StepGraphs(base, record) if "gpu" in request.param else None
    return MedusaModel(base, heads, graphs)


def request(chance, vocab_size):
    """A prompt, and parameters of every kind whose text does not depend on the batch."""
    prompt = [chance.randrange(3, vocab_size) for _ in range(chance.choice([1, 2, 3, 5, 9, 20]))]
    temperature = chance.choice([0.0, 0.0, 0.7, 1.3])
    params = SamplingParams(
        max_new_tokens=chance.randrange(1, 14),
        temperature=temperature,
        top_k=chance.choice([0, 0, 5]),
        top_p=chance.choice([1.0, 0.8]),
        repetition_penalty=chance.choice([1.0, 1.2]),
        presence_penalty=chance.choice([0.0, 0.5]),
        frequency_penalty=chance.choice([0.0, -0.3]),
        logit_bias=chance.choice([None, {5: 2.0}]),
        seed=chance.randrange(100),
        ignore_eos=chance.random() < 0.3,
    )
    drafter = chance.choice(["heads", "prompt-lookup", "hybrid", *(["heads-sampled"] if temperature else [])])
    rules = ["greedy", None] if temperature == 0 else ["sampling", "speculative", "typical"]
    if temperature and drafter in ("prompt-lookup", "hybrid"):
        rules = ["sampling"]  # lookup learns from other requests, and under the other rules drafts change the text
    return prompt, params, Speculation(drafter, chance.choice(rules), nodes=chance.choice([1, 3, 6]))


def run(batch, asked, chance):
    """Requests that join at random, some of which are removed; others in the pool have its room now and then."""
    waiting, requests, removed, pool = list(asked), [], set(), batch.pool
    while waiting or len(batch):
        while waiting and chance.random() < 0.5:
            requests.append(batch.add(*waiting.pop(0), client=chance.choice("ab"), priority=chance.choice([0, 0, 1])))
        others = pool.take(pool.available) if pool.tokens and chance.random() < 0.7 else []
        batch.step()
        pool.release(others)
        growing = [number for number, request in enumerate(requests) if request.active]
        if growing and chance.random() < 0.05:
            removed.add(number := chance.choice(growing))
            batch.remove(requests[number])
    return requests, removed


def check(speaker, batch, seed):
    chance = random.Random(seed)
    asked = [request(chance, speaker.base.vocab_size) for _ in range(chance.randrange(2, 7))]
    texts = [speaker.generate(prompt, sampling=params, speculation=rest) for prompt, params, rest in asked]
    copies = chance.choice([0, 0, 2])  # n = 3
    requests, removed = run(batch, asked + asked[:1] * copies, chance)
    for number, (alone, joined) in enumerate(zip(texts + texts[:1] * copies, requests, strict=True)):
        output = joined.output
        if number in removed:
            assert output.finish_reason == "abort"
            assert output.tokens == alone.tokens[: len(output.tokens)]
        else:
            assert (output.tokens, output.finish_reason, output.text) == (alone.tokens, alone.finish_reason, alone.text)


def schedules(speaker, seeds):
    """With room for all, and with so little that requests lose theirs."""
    base, lost = speaker.base, 0
    for seed in seeds:
        pool = base.new_pool(7 * BLOCK) if seed % 2 else None
        batch = speaker.batch(pool, EngineConfig(chunk=4, max_requests=4, tree_reserve=2 * BLOCK))
        check(speaker, batch, seed)
        batch.pool.check_integrity()
        lost += batch.preemptions
    return lost


def test_requests_write_what_they_write_alone(speaker):
    """Recording steps anew for each batch takes half a second on a CPU: one of them, with little room."""
    schedules(speaker, range(SCHEDULES) if speaker.graphs is None else [1])


def test_a_request_that_lost_its_room_drafts_at_once_when_it_goes_on(speaker):
    """Where text depends on drafts, a step without one would show: these schedules have such requests."""
    if speaker.graphs is None:
        assert schedules(speaker, [5101, 5335]) > 0


@pytest.mark.slow
def test_many_schedules(speaker):
    """Here too fewer where steps are recorded."""
    assert schedules(speaker, range(SCHEDULES, 40) if speaker.graphs is None else [0, *range(SCHEDULES, 20)]) > 0


def test_long_prompts_do_not_hold_up_others(speaker):
    batch = speaker.batch(config=EngineConfig(chunk=4, pass_tokens=8))
    first = batch.add([5, 6], SamplingParams(max_new_tokens=30, ignore_eos=True), Speculation(nodes=1))
    batch.step()
    batch.add(list(range(3, 43)), SamplingParams(max_new_tokens=2, ignore_eos=True), Speculation(nodes=1))
    short = batch.add([7, 8, 9], SamplingParams(max_new_tokens=2, ignore_eos=True), Speculation(nodes=1))
    grown = len(first.output.tokens)
    batch.step()
    batch.step()
    assert len(first.output.tokens) >= grown + 2, "a step of those that decode beside each chunk"
    assert not short.active, "a long prompt leaves room in each pass"


def test_who_comes_next(speaker):
    """Priority, then the client with fewest requests under way, then who came first."""
    batch, params = speaker.batch(config=EngineConfig(max_requests=1)), SamplingParams(max_new_tokens=1)
    who = [("a1", "a", 0), ("a2", "a", 0), ("b1", "b", 0), ("c1", "c", 1), ("d1", "d", -1)]
    names = {batch.add([5, 6], params, client=client, priority=priority): name for name, client, priority in who}
    order = []
    while len(batch):
        order += [names[request] for request in batch.step()]
    assert order == ["d1", "a1", "a2", "b1", "c1"]


def test_a_client_with_few_requests_comes_before_one_with_many(speaker):
    batch, params = speaker.batch(config=EngineConfig(max_requests=3)), SamplingParams(max_new_tokens=9)
    many = [batch.add([5, 6, n], params, client="many") for n in range(3, 9)]
    few = batch.add([5, 6], params, client="few")
    batch.step()
    assert few.output.tokens and sum(bool(one.output.tokens) for one in many) == 2


def test_a_step_that_computes_prompts_drafts_nothing_where_sizes_are_left_open(base, make_heads):
    """Those that wait for their first token wait for its end; who asks for a size gets it."""
    speaker = MedusaModel(base, make_heads())
    batch = speaker.batch()
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    given = batch.add([5, 6, 7], params, Speculation(tree=Tree.chain(3)))
    left_open = batch.add([5, 6, 7], params, Speculation("heads"))
    for _ in range(6):
        batch.step()
    drafted = given.output.draft_tokens, left_open.output.draft_tokens
    batch.add([7, 8, 9], params)
    batch.step()
    assert (given.output.draft_tokens, left_open.output.draft_tokens) == (drafted[0] + 3, drafted[1])
    finish(batch)
    assert left_open.output.draft_tokens > drafted[1]


def test_requests_that_leave_free_the_cache_at_once(speaker):
    batch = speaker.batch(speaker.base.new_pool())
    requests = [batch.add([5, 6, 7 + n], SamplingParams(max_new_tokens=50, ignore_eos=True)) for n in range(3)]
    for _ in range(3):
        batch.step()
    batch.remove(requests[0])
    assert requests[0].sequence is None and batch.pool.held_tokens > 0
    for request in requests:
        batch.remove(request)
    assert batch.pool.held_tokens == 0 and len(batch) == 0 and batch.step() == {}


@pytest.mark.parametrize("step", [1, 2])
def test_a_batch_whose_step_fails_frees_its_cache(speaker, step):
    class Grammar:
        def forbid(self, tokens, parents, logits):
            steps.append(tokens)
            assert len(steps) < step, "broken"

        def advance(self, tokens):
            pass

    steps, batch = [], speaker.batch(speaker.base.new_pool())
    request = batch.add([5, 6, 7], constraint=Grammar())
    for _ in range(step - 1):
        batch.step()
    with pytest.raises(AssertionError, match="broken"):
        batch.step()
    assert request.active and batch.pool.held_tokens > 0
    batch.close()
    assert batch.pool.held_tokens == 0


def test_large_trees_wait_for_room(speaker):
    batch, params = speaker.batch(speaker.base.new_pool(22 * BLOCK)), SamplingParams(max_new_tokens=4, ignore_eos=True)
    requests = [batch.add([5 + n] * 20, params, Speculation("heads", nodes=40)) for n in range(10)]
    finish(batch)
    assert speaker.graphs is None or batch.preemptions > 0, "steps with fixed shapes reserve whole trees"
    assert [request.output.tokens for request in requests[:2]] == [
        speaker.generate([5 + n] * 20, sampling=params, nodes=1).tokens for n in range(2)
    ]


def test_log_probabilities_are_the_bases_own(speaker):
    prompt, params = [5, 6, 7], SamplingParams(max_new_tokens=12, temperature=0.8, seed=3, logprobs=3, top_p=0.9)
    outputs = [speaker.generate(prompt, sampling=params, nodes=nodes) for nodes in (1, 8)]
    text = torch.tensor([[*prompt, *outputs[0].tokens]])
    expected = speaker.base.logits(speaker.base.hidden_states(text)).log_softmax(-1)[0, len(prompt) - 1 :]
    for output in outputs:
        assert len(output.logprobs) == len(output.tokens)
        for place, (token, told) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
            assert told.logprob == pytest.approx(float(expected[place, token]), abs=1e-4)
            best = expected[place].topk(3)
            assert list(told.top) == best.indices.tolist()
            assert list(told.top.values()) == pytest.approx(best.values.tolist(), abs=1e-4)


def test_alternatives_do_not_depend_on_what_others_ask_for():
    logprobs = torch.zeros(1, 1000).index_fill(1, torch.arange(500, 510), 1.0).log_softmax(-1)
    alone, beside = LogprobReader([2]), LogprobReader([2, 20])
    for reader in (alone, beside):
        accepted = SimpleNamespace(path=torch.zeros(2, 1).long(), tokens=torch.full((2, 1), 7))
        reader.read(accepted, logprobs.expand(2, 1, 1000))
    first = alone.take()[0]
    assert first == beside.take()[0]
    assert list(first[0].top) == [500, 501], "of equally likely ones the lower ids, as in decoding"


def test_log_probabilities_of_prompts(speaker):
    """In chunks, with blocks that are known already, for requests that lose their room, and without new tokens."""
    params = SamplingParams(max_new_tokens=4, prompt_logprobs=2, ignore_eos=True)
    prompts = [[*range(3, 75), last] for last in (5, 6, 7)]
    batch = speaker.batch(speaker.base.new_pool(8 * BLOCK), EngineConfig(chunk=7, tree_reserve=2 * BLOCK))
    batch.add(prompts[0], SamplingParams(max_new_tokens=1))
    batch.step()
    scored = [batch.add(prompt, params) for prompt in prompts]
    alone = batch.add(prompts[0][:1], SamplingParams(max_new_tokens=0, prompt_logprobs=0))
    for number in range(200):
        others = batch.pool.take(batch.pool.available if 6 <= number < 12 else 0)
        batch.step()
        batch.pool.release(others)
    assert batch.preemptions > 0 and not len(batch)
    assert (alone.output.prompt_logprobs, alone.output.tokens, alone.output.finish_reason) == ([None], [], "length")
    for prompt, request in zip(prompts, scored, strict=True):
        expected = speaker.base.logits(speaker.base.hidden_states(torch.tensor([prompt])))[0].float().log_softmax(-1)
        first, *told = request.output.prompt_logprobs
        assert first is None and request.output.cached_tokens == 0
        for place, (token, each) in enumerate(zip(prompt[1:], told, strict=True)):
            assert each.logprob == pytest.approx(float(expected[place, token]), abs=1e-4)
            assert list(each.top) == expected[place].topk(2).indices.tolist()
        assert request.output.tokens == speaker.generate(prompt, max_new_tokens=4, ignore_eos=True).tokens


def test_a_prompt_as_long_as_the_context_can_be_scored(speaker, monkeypatch):
    prompt, logits, rows = [5, 6] * (speaker.base.context_length // 2), speaker.base.logits, []
    monkeypatch.setattr(speaker.base, "logits", lambda hidden: rows.append(len(hidden)) or logits(hidden))
    output = speaker.generate(prompt, max_new_tokens=0, prompt_logprobs=0)
    assert len(output.prompt_logprobs) == len(prompt) and (output.tokens, output.text) == ([], "")
    assert max(rows) <= SCORED < len(prompt), "never a row for each token at once"
    with pytest.raises(ValueError, match="leaves no room"):
        speaker.generate(prompt, max_new_tokens=1, prompt_logprobs=0)
    with pytest.raises(ValueError, match=r"max_new_tokens \(0\) must be at least 1"):
        speaker.generate(prompt, max_new_tokens=0)


def test_presence_and_frequency_penalties_count_the_completion_alone(speaker):
    """One token at a time by hand, from the base's logits."""
    prompt = [5, 6, 7]
    params = SamplingParams(max_new_tokens=12, presence_penalty=1.5, frequency_penalty=0.7, ignore_eos=True)
    text, new = list(prompt), []
    for _ in range(12):
        logits = speaker.base.logits(speaker.base.hidden_states(torch.tensor([text])))[0, -1].float()
        for token in set(new):
            logits[token] -= 1.5 + 0.7 * new.count(token)
        new.append(int(logits.argmax()))
        text.append(new[-1])
    for nodes in (1, 8):
        assert speaker.generate(prompt, sampling=params, nodes=nodes).tokens == new


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"presence_penalty": 3.0}, r"presence_penalty \(3.0\) must be between -2 and 2"),
        ({"logprobs": 21}, r"logprobs \(21\) must be between 0 and 20"),
        ({"sampling": SamplingParams(), "top_k": 3}, r"with its own fields \(top_k\)"),
        ({"sampling": [SamplingParams()] * 2}, r"sampling .* must be one, or one per prompt \(1\)"),
    ],
)
def test_wrong_parameters_are_named(speaker, options, message):
    with pytest.raises(ValueError, match=message):
        speaker.generate([5, 6], **options)


def test_a_base_that_somebody_trains_is_refused(speaker):
    speaker.base.model.train()
    try:
        with pytest.raises(ValueError, match=r"is in training mode: .*; call base.model.eval\(\)"):
            speaker.generate([5, 6])
    finally:
        speaker.base.model.eval()


@pytest.mark.parametrize("token", [-1, 10**6, "a"])
def test_a_refused_prompt_is_not_in_the_batch(speaker, token):
    batch = speaker.batch()
    with pytest.raises(ValueError, match=r"prompt: token id \(.*\) is not a number from 0 to"):
        batch.add([5, token])
    assert len(batch) == 0 and batch.step() == {}
