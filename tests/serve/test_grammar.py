"""What follows a schema or a grammar, whatever drafts: valid, and equal to plain decoding under the same grammar."""

import functools
import json
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from jsonschema import validate

from medusa import MedusaModel, SamplingParams, Speculation
from medusa.serve.api.messages import Tool
from medusa.serve.api.tools import Calls
from medusa.serve.grammar import Following, Grammars
from tests.medusa.passes import finish
from tests.serve.live import serving

PLAIN, TREES = Speculation(nodes=1), Speculation("hybrid", nodes=8)
SHORT = {"type": "string", "maxLength": 6}
LEAVES = (
    SHORT,
    {"type": "integer", "minimum": -20, "maximum": 300},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["red", "green", 3, None]},
    {"const": "größe ☃"},
    {"type": "string", "pattern": "^[a-f]{1,4}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {"anyOf": [{"type": "boolean"}, {"enum": ["x"]}]},
    {"type": "integer", "enum": [1, 22, 333]},
    {"type": ["boolean", "null"]},
)


def object_of(properties, required):
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def schema_of(number, depth=2):
    """A schema of its own for every number, whose texts are bounded."""
    chance = random.Random(number)

    def make(depth):
        kind = chance.randrange(4) if depth else 0
        if kind == 0:
            return chance.choice(LEAVES)
        if kind == 1:
            least = chance.randrange(3)
            return {"type": "array", "items": make(depth - 1), "minItems": least, "maxItems": least + 1}
        names = [f"k{index}" for index in range(chance.randrange(1, 4))]
        required = [name for name in names if chance.random() < 0.7]
        return object_of({name: make(depth - 1) for name in names}, required)

    return object_of({"answer": make(depth)}, ["answer"])


@pytest.fixture(scope="module")
def grammars(base):
    return Grammars(base)


def write(speaker, cases, prompts=None):
    """Completions of (constraint, params, speculation) that decode together."""
    batch = speaker.batch()
    prompts = prompts or [[5, 6, 7 + number] for number in range(len(cases))]
    completions = [
        batch.add(prompt, params, how, constraint=constraint and constraint())
        for prompt, (constraint, params, how) in zip(prompts, cases, strict=True)
    ]
    finish(batch)
    return [completion.output for completion in completions]


def params_of(number, space, longest=230):
    """Greedy, or sampled; without spaces, which random weights would write on and on."""
    forbidden = dict.fromkeys(space, -100.0)
    return SamplingParams(longest, temperature=0.9 * (number % 2), seed=number, logit_bias=forbidden)


@pytest.fixture(scope="module")
def space(base):
    return [token for text in (" ", "\n", "\t", "\r") for token in base.tokenizer(text).input_ids]


@pytest.mark.parametrize(
    ("numbers", "least"),
    [((0, 9, 11, 13, 24), 5), pytest.param(range(14, 38), 23, marks=pytest.mark.slow)],
    ids=["every leaf", "more"],
)
def test_what_ends_follows_its_schema_whatever_drafts(speaker, grammars, space, numbers, least):
    ended = 0
    for number in numbers:
        schema, params = schema_of(number), params_of(number, space)
        constraint = grammars.json_schema(schema)
        plain, trees = (write(speaker, [(constraint, params, how)])[0] for how in (PLAIN, TREES))
        assert plain.tokens == trees.tokens, schema
        if trees.finish_reason == "eos":
            validate(json.loads(trees.text), schema)
            ended += 1
    assert ended >= least


@pytest.mark.slow
def test_schemas_with_real_weights(smollm2_directory):
    model = MedusaModel.from_pretrained("data/pretrained/smollm2", base=smollm2_directory)
    grammars, drafted = Grammars(model.base), 0
    for number in (0, 13):
        schema = schema_of(number)
        question = model.chat_prompt([{"role": "user", "content": f"Answer as JSON that follows {json.dumps(schema)}"}])
        constraint = grammars.json_schema(schema)
        ways = (PLAIN, TREES, Speculation())
        outputs = [write(model, [(constraint, SamplingParams(200), how)], [question])[0] for how in ways]
        assert outputs[0].tokens == outputs[1].tokens == outputs[2].tokens
        assert outputs[0].finish_reason == "eos", outputs[0].text
        validate(json.loads(outputs[0].text), schema)
        drafted += len(outputs[1].tokens) - outputs[1].steps
    assert drafted > 0


def test_rows_with_and_without_grammars_share_a_batch(speaker, grammars, space):
    cases = [
        (grammars.json_schema(schema_of(1)), params_of(0, space), TREES),
        (None, SamplingParams(30, temperature=0.9, seed=2), TREES),
        (grammars.grammar('root ::= ("ab" | "c"){3,9}'), params_of(1, space, 40), TREES),
        (None, SamplingParams(30), PLAIN),
        (grammars.json_schema({"type": "object"}), params_of(3, space, 40), PLAIN),
    ]
    together = write(speaker, cases)
    for number, case in enumerate(cases):
        (alone,) = write(speaker, [case], [[5, 6, 7 + number]])
        assert together[number].tokens == alone.tokens
    assert set(together[2].text) <= set("abc")


def test_masks_of_trees_are_those_of_their_paths(grammars, base):
    make = grammars.json_schema(schema_of(3))
    letters = {letter: base.tokenizer(letter).input_ids[0] for letter in '{"answerk01:[]}truefalse, x9'}
    for number in range(30):
        chance = random.Random(number)
        text = '{"answer'[: chance.randrange(9)]
        committed = [letters[letter] for letter in text]
        size = chance.randrange(1, 9)
        parents = [0, *(chance.randrange(node) for node in range(1, size))]
        tokens = [committed[-1] if committed else 7, *(chance.choice([*letters.values()]) for _ in parents[1:])]
        following, logits = make(), torch.zeros(size, base.vocab_size)
        following.advance(committed)
        following.forbid(tokens, parents, logits)
        for node in range(size):
            path, at = [], node
            while at:
                path, at = [tokens[at], *path], parents[at]
            alone: Following = make()
            alone.advance(committed)
            if all(alone._matcher.accept_token(token) for token in path):
                expected = torch.zeros(1, base.vocab_size, dtype=torch.float64)
                alone.forbid([0], [0], expected)
                assert torch.equal(logits[node].double(), expected[0])
                assert expected.min() == -torch.inf


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "banana"}, 'Unsupported type "banana"'),
        ({"not": {}}, r"schema: keyword \(not\) is not supported"),
        ({"properties": {"a": {"items": {"uniqueItems": True}}}}, r"schema.properties.a.items: .* \(uniqueItems\)"),
        ({"anyOf": [{"format": "zip"}]}, r"schema.anyOf.0: format \(zip\) is not supported"),
        ({"type": "string", "pattern": "a", "minLength": 1}, "minLength is not supported beside a pattern"),
        ({"type": "number", "multipleOf": 2}, "multipleOf is supported for integers only"),
        ({"allOf": [{}, {}]}, "allOf of several"),
        ({"type": "array", "minItems": 2, "maxItems": 1}, "minItems is greater than maxItems"),
        ({"type": "string", "pattern": "(" * 99 + "a" + ")" * 99}, "pattern has more than 2048 characters or 32"),
        ({"type": "string", "pattern": "a" * 3000}, "pattern has more than"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no text follows it"),
        ({"type": "object", "required": ["b"]}, r"required \(b\) is not supported without its schema"),
        ({"$ref": "https://example.com/a.json"}, "not within the schema"),
        ({"$ref": "#/$defs/n", "minimum": 5, "$defs": {"n": {"type": "integer"}}}, "minimum is not supported beside"),
        ({"anyOf": [{"type": "null"}], "properties": {}}, "properties is not supported beside anyOf"),
        ({"anyOf": []}, "anyOf of nothing"),
        ({"type": "integer", "allOf": [{"enum": [1]}]}, "type is not supported beside allOf of other types"),
        ({"type": "string", "enum": ["a", 1]}, "values of another type"),
        ({"minimum": 5}, "minimum is not supported without a type"),
        ({"type": "integer", "minimum": 0, "multipleOf": 5}, "beside one bound alone"),
        ({"type": "integer", "multipleOf": 1.5}, r"multipleOf \(1.5\) is not a whole number"),
        ({"type": "string", "maxLength": -1}, "a negative length"),
        ({"properties": {"a": {}}, "patternProperties": {"^a": {}}}, "patternProperties is not supported beside"),
        ({"properties": {"a": {}}, "propertyNames": {"enum": ["b"]}}, "propertyNames is not supported beside"),
        ({"type": "string", "pattern": 'say "x"'}, "pattern with quotes, backslashes or control characters"),
        ({"type": "string", "pattern": r"a\nb"}, "pattern with quotes, backslashes or control characters"),
        ({"type": "string", "pattern": "[a-z]?" * 200}, "pattern has more than 64 optional or repeated parts"),
        ({"enum": ["a" * 40_000]}, r"schema \(40\d+ characters\) exceeds the limit"),
        (functools.reduce(lambda inner, _: {"items": inner}, range(40), {}), "nested more than 32 times"),
    ],
)
def test_schemas_that_would_not_be_followed_are_refused(grammars, schema, message):
    with pytest.raises(ValueError, match=message):
        grammars.json_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": r'^[^"\\]+$'},
        {"type": "string", "pattern": r"\d{4}-\d\d"},
        {"type": "integer", "minimum": 0, "maximum": 20, "multipleOf": 5},
        {"type": ["integer", "null"], "enum": [1, 2.0, None]},
        {"type": "object", "anyOf": [{"type": "object", "properties": {"a": {"const": 1, "title": "A"}}}]},
        {"allOf": [{"$ref": "#/$defs/a"}], "description": "a", "default": 1, "$defs": {"a": {"type": "integer"}}},
        {"type": "object", "additionalProperties": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
    ],
)
def test_schemas_as_clients_write_them_are_taken(grammars, schema):
    assert grammars.json_schema(schema)()


def test_rules_that_would_take_minutes_are_refused(grammars):
    with pytest.raises(ValueError, match="more than 64 optional or repeated parts; divide it"):
        grammars.grammar("root ::= " + '"a"? ' * 200)
    rules = "".join(f'r{number} ::= "a"? "b"?\n' for number in range(100))
    assert grammars.grammar(rules + 'root ::= r1 "c"')()


@pytest.mark.parametrize("text", ["", "root ::= x", 'other ::= "a"', "root := 5", "root ::= root"])
def test_grammars_that_cannot_be_read_are_refused(grammars, text):
    with pytest.raises(ValueError, match=r"grammar cannot be used: .*; correct it"):
        grammars.grammar(text)


def test_arguments_follow_their_schema_once_a_call_begins(base, grammars):
    days = {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"]}
    calls = Calls([Tool(type="function", function={"name": "weather", "parameters": days, "strict": True})])
    begun = calls.structure(free=True)["tags"][0]["begin"]

    def next_letters(text, free):
        """What may follow."""
        tokens = base.tokenizer(text).input_ids
        following = grammars.structure(calls.structure(free), calls.schemas, free)()
        following.advance(tokens)
        logits = torch.zeros(1, base.vocab_size)
        following.forbid(tokens[-1:], [0], logits)
        return {base.tokenizer.decode([token]) for token in logits[0].isfinite().nonzero()[:, 0].tolist()}

    assert {"a", "<", "{", "<end>"} <= next_letters("Let me look. ", free=True)
    assert next_letters(f"So: {begun}", free=True) <= {"{", " ", "\n", "\r", "\t"}
    assert next_letters(begun + '{"days": ', free=True) - set(" \n\r\t") == {"1", "2"}
    assert next_letters("<", free=False) == {"t"}, "nothing else stands before a call"
    assert "\t" not in next_letters(begun, free=False), "control characters would spoil strings of limited length"
    closed = begun + '{"days": 1}}\n</tool_call>'
    assert {"<end>", "\n"} == next_letters(closed, free=False), "another one may follow"


def test_an_ambiguous_grammar_ends_its_own_request_and_holds_up_no_other(speaker, monkeypatch):
    slow = {"type": "grammar", "grammar": 'root ::= s "\\n"\ns ::= s s s | s s | [a-z]'}
    chat = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100, "temperature": 0}
    chat["logit_bias"] = {str(speaker.base.tokenizer("\n").input_ids[0]): -100}
    monkeypatch.setattr("medusa.serve.grammar.SLOW", 0.0)
    with serving(speaker) as live, ThreadPoolExecutor() as pool:
        other = pool.submit(httpx.post, f"{live.url}/v1/chat/completions", json=chat)
        refused = httpx.post(f"{live.url}/v1/chat/completions", json=chat | {"response_format": slow}, timeout=60)
        assert (refused.status_code, other.result().status_code) == (400, 200)
        assert "takes too long to follow, as ambiguous ones do" in refused.json()["error"]["message"]
        assert live.engine._pool.held_tokens == 0
