"""Chat prompts: varied, different, the same every time, and none that is held out is trained on."""

import json
import re
from collections import Counter

import pytest

from medusa.data.chat_prompts import LISTS, chat_prompts


@pytest.fixture(scope="module")
def prompts():
    return chat_prompts("train", 3000)


def test_prompts_are_different_and_of_all_kinds(prompts):
    assert len(prompts) == len({prompt.turns[0] for prompt in prompts}) == 3000
    counts = Counter(prompt.kind for prompt in prompts)
    assert set(counts) == set(json.loads((LISTS / "templates.json").read_text())) and min(counts.values()) > 100


def test_every_slot_is_filled(prompts):
    texts = [turn for prompt in [*prompts, *chat_prompts("heldout", 1000)] for turn in prompt.turns]
    assert not [text for text in texts if re.search(r"[{}]", text)]


def test_the_list_is_a_pure_function_of_split_and_seed():
    assert chat_prompts("train", 50, seed=3) == chat_prompts("train", 80, seed=3)[:50]
    assert chat_prompts("train", 50, seed=3) != chat_prompts("train", 50, seed=4)


def test_held_out_prompts_are_never_trained_on(prompts):
    heldout = {prompt.turns[0] for prompt in chat_prompts("heldout", 300)}
    trained = {prompt.turns[0] for prompt in [*prompts, *chat_prompts("train", 3000, seed=1)]}
    assert not heldout & trained


def test_a_name_stays_the_same_within_a_prompt_and_a_second_one_is_another(prompts):
    for prompt in prompts:
        if match := re.search(r"(\w+) is \d+ years older than (\w+)\.", prompt.turns[0]):
            assert match[1] != match[2]
        if match := re.search(r"^(\w+) has \d+ .* Then (\w+) gives", prompt.turns[0]):
            assert match[1] == match[2]


def test_asked_turns_are_messages(prompts):
    prompt = next(prompt for prompt in prompts if len(prompt.turns) == 2)
    assert [[message["role"] for message in turn] for turn in prompt.asked] == [["user"], ["user"]]
