"""Masks of templates that do not mark the assistant's text themselves; those of real models are in test_golden.py."""

import re

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from medusa.data.chat import NoAnswerError, documents, question, render

ASKED, SAID = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}
CHATML = (
    "{% for m in messages %}{{ '<start>' + m.role + '\n' + m.content + '<end>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
)

MARKED = CHATML.replace(
    "{{ '<start>' + m.role + '\n' + m.content + '<end>\n' }}",
    "{{ '<start>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<end>' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<end>' }}{% endif %}{{ '\n' }}",
)


def byte_tokenizer(template: str | None, merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    words = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    raw = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=list(merges)))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<start>", special=True), AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, chat_template=template, name_or_path="tiny")


def said(tokenizer: PreTrainedTokenizerFast, ids: list[int], mask: list[int]) -> str:
    return tokenizer.decode([token for token, mark in zip(ids, mask, strict=True) if mark])


def test_marks_in_the_template_and_comparison_agree() -> None:
    turns = [ASKED, SAID, {"role": "tool", "content": "é ∑ 漢"}, {"role": "assistant", "content": "ünï 漢字 \n"}]
    ids, mask = render(byte_tokenizer(CHATML), turns)
    with_marks = render(byte_tokenizer(MARKED), turns)
    assert with_marks == ([*ids, *byte_tokenizer(None)("\n").input_ids], [*mask, 0]), (
        "only the last line end is left out"
    )
    assert said(byte_tokenizer(CHATML), ids, mask) == "there<end>ünï 漢字 \n<end>"


def test_unanswered_and_unasked_turns_are_left_out() -> None:
    tokenizer = byte_tokenizer(CHATML)
    assert documents(tokenizer, [SAID, ASKED, SAID, ASKED]) == documents(tokenizer, [ASKED, SAID])
    for turns in ([], [ASKED], [SAID], [{"role": "system", "content": "x"}, SAID, ASKED]):
        with pytest.raises(NoAnswerError, match="has no answer; give it a user turn"):
            documents(tokenizer, turns)


def test_a_question_ends_with_the_generation_prompt() -> None:
    tokenizer = byte_tokenizer(CHATML)
    system = {"role": "system", "content": "be short"}
    ids, mask = question(tokenizer, [system, ASKED, SAID, ASKED])
    assert tokenizer.decode(ids) == "<start>system\nbe short<end>\n<start>user\nhi<end>\n<start>assistant\n"
    assert not any(mask)
    with pytest.raises(NoAnswerError, match="has no question; give it a user turn"):
        question(tokenizer, [system, SAID])


def test_an_answer_without_words_ends_its_turn() -> None:
    tokenizer = byte_tokenizer(CHATML)
    assert said(tokenizer, *render(tokenizer, [ASKED, {"role": "assistant", "content": ""}])) == "<end>"


def test_an_answer_that_ends_in_another_special_token_ends_its_turn_too() -> None:
    template = CHATML.replace("m.content + '<end>", "m.content + ('<start>' if m.tool_calls else '') + '<end>\n<start>")
    tokenizer = byte_tokenizer(template)
    called = {**SAID, "tool_calls": [{"name": "f"}]}
    assert said(tokenizer, *render(tokenizer, [ASKED, called])) == "there<start><end>"
    assert said(tokenizer, *render(tokenizer, [ASKED, SAID])) == "there<end>"
    twice = {**SAID, "content": "there<end>"}
    assert said(tokenizer, *render(tokenizer, [ASKED, twice])) == "there<end>", "it has ended already"


def test_a_template_without_special_tokens() -> None:
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    ids, mask = render(tokenizer, [ASKED, SAID, ASKED, SAID])
    assert said(tokenizer, ids, mask) == "there\nthere\n"
    assert tokenizer.decode(ids) == "user: hi\nassistant: there\nuser: hi\nassistant: there\n"


def test_a_token_across_the_edge_of_an_answer_is_not_trained_on() -> None:
    tokenizer = byte_tokenizer(CHATML, merges=(("Ċ", "t"),))  # the line end of the prompt and the answer's first letter
    assert said(tokenizer, *render(tokenizer, [ASKED, SAID])) == "here<end>"


@pytest.mark.parametrize("marked", [False, True])
def test_offsets_without_spaces_leave_no_space_out(marked: bool) -> None:
    """GPT-NeoX's and Cohere's tokenizers cut spaces off the offsets of their tokens."""
    template = MARKED if marked else CHATML
    turns = [ASKED, {"role": "assistant", "content": " def f():\n    return 1 \n  "}, ASKED, SAID]
    exact, trimmed = byte_tokenizer(template), byte_tokenizer(template)
    trimmed.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert said(trimmed, *render(trimmed, turns)) == " def f():\n    return 1 \n  <end>there<end>"
    assert render(trimmed, turns) == render(exact, turns)


def test_a_slow_tokenizer_is_exact_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = render(byte_tokenizer(CHATML), [ASKED, SAID, ASKED, SAID])
    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", property(lambda _: False))
    assert render(byte_tokenizer(CHATML), [ASKED, SAID, ASKED, SAID]) == fast
    with pytest.raises(ValueError, match=r"\(tiny\) joins text across the edge of an answer \('there<end>'\)"):
        render(byte_tokenizer(CHATML, merges=(("Ċ", "t"),)), [ASKED, SAID])


def test_a_prompt_that_is_no_beginning_of_an_answer_is_refused() -> None:
    tokenizer = byte_tokenizer(CHATML.replace("<start>assistant\n", "<start>assistant\n<think>"))
    with pytest.raises(ValueError, match=r"\('user: hi / assistant: there'\): the chat template renders"):
        render(tokenizer, [ASKED, SAID])


def test_a_question_that_its_answer_changes_is_rendered_as_it_was_asked() -> None:
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{% if m.role == 'user' %}{{ ('now: ' if loop.last else '') + m.content + '<start>' }}"
        "{% else %}{{ m.content + '<end>' }}{% endif %}{% endfor %}"
    )
    ids, mask = render(tokenizer, [ASKED, SAID])
    assert tokenizer.decode(ids) == "now: hi<start>there<end>"
    assert said(tokenizer, ids, mask) == "there<end>"
    with pytest.raises(ValueError, match="so the assistant's tokens are unknown"):
        render(tokenizer, [ASKED, {"role": "assistant", "content": "no <start> please"}])


def test_a_mask_of_everything_or_nothing_is_shown() -> None:
    everything = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    nothing = "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}"
    for template, word in ((everything, "all"), (nothing, "none")):
        pattern = f"has {word} of its 7 tokens marked as the assistant's in 'hithere'; correct"
        with pytest.raises(ValueError, match=re.escape(pattern)):
            render(byte_tokenizer(template), [ASKED, SAID])


def test_no_template_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokenizer \(tiny\) has no chat template; set one"):
        render(byte_tokenizer(None), [ASKED, SAID])
