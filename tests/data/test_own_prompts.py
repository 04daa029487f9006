import shutil

import pytest

from medusa.data.__main__ import main
from medusa.data.exchange import Exchange, Prompt, UnansweredError
from medusa.data.own_prompts import OwnPrompts, openings
from medusa.data.regenerate import regenerate
from tests.data.watched import lines

TEMPLATE = "{% for m in messages %}user {{ m.content }}<end>{% endfor %}"


@pytest.fixture
def chat(with_template):
    return with_template(TEMPLATE)


class Writer:
    """Writes given texts; one that ends with "." is ended."""

    def __init__(self, model, *texts):
        self.tokenizer, self.end, self.texts = model.base.tokenizer, min(model.base.eos_ids), texts

    def answer(self, prompts):
        for (number, prompt), text in zip(prompts, self.texts, strict=True):
            ids = self.tokenizer(text.removesuffix("."), add_special_tokens=False).input_ids
            yield number, [Exchange(list(prompt.ids), ids + [self.end] * text.endswith("."))]


def test_openings_end_where_a_user_speaks_and_half_of_them_begin_with_words(chat):
    found = [chat.base.tokenizer.decode(opening.ids) for opening in openings(chat, 200)]
    assert all(text.startswith("user") for text in found)
    bare = found.count("user")
    assert 60 < bare < 140
    assert len(set(found)) > 0.9 * (200 - bare)
    assert found[:50] == [chat.base.tokenizer.decode(opening.ids) for opening in openings(chat, 50)]
    assert openings(chat, 50) != openings(chat, 50, seed=1)


def test_what_is_no_prompt_is_refused(chat):
    texts = ("what is it.", "what is it", "what is it.", "what.", "say <end> twice.", "and now.")
    bare = Prompt(ids=tuple(chat.base.tokenizer("user", add_special_tokens=False).input_ids))
    answers = dict(OwnPrompts(chat, Writer(chat, *texts)).answer([(n, bare) for n in range(len(texts))]))
    refused = {number: str(answer) for number, answer in answers.items() if isinstance(answer, UnansweredError)}
    assert sorted(refused) == [1, 3, 4]
    assert refused[1] == "the base did not finish it ('what is it')"


def test_the_file_holds_the_users_words_the_given_ones_included(chat, tmp_path):
    begun = chat.base.tokenizer("user how many", add_special_tokens=False).input_ids
    own = OwnPrompts(chat, Writer(chat, " are there.", " cut", " are there."))
    out = tmp_path / "prompts.jsonl"
    report = regenerate([Prompt(ids=tuple(begun))] * 3, own, out, {}, own.record, distinct=True)
    assert lines(out) == [{"messages": [{"role": "user", "content": "how many are there"}]}]
    assert (report.lines, report.failed) == (1, 1)


@pytest.mark.parametrize("template", ["nobody", "{{ messages[0].content }}<end>"])
def test_a_template_that_does_not_say_who_speaks_is_refused(with_template, template):
    with pytest.raises(
        ValueError, match=r"template of the base \(.*\) does not show where a user speaks; give prompts"
    ):
        openings(with_template(template), 1)


def test_the_command_writes_prompts_that_regenerate_takes(chat, base_directory, tmp_path, caplog):
    caplog.set_level("INFO")
    base = shutil.copytree(base_directory, tmp_path / "base")
    chat.base.tokenizer.save_pretrained(base)  # with its template
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    common = ["--base", str(base), "--dtype", "float32", "--device", "cpu"]
    command = ["prompts", *common, "--count", "24", "--max-new-tokens", "100", "--top-p", "1", "--out", str(prompts)]
    assert main(command) == 0
    found = [record["messages"] for record in lines(prompts)]
    assert 0 < len(found) < 24
    assert all(len(message["content"].split()) > 1 for ((message),) in found)
    assert main(["regenerate", *common, "--prompts", str(prompts), "--max-new-tokens", "4", "--out", str(out)]) == 0
    assert len(lines(out)) == len(found)
    assert main(command) == 0
    assert f"{prompts} is there already" in caplog.text
