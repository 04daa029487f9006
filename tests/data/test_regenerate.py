import errno
import json
from contextlib import closing
from functools import partial

import pytest

from medusa import Speculation
from medusa.data.__main__ import main
from medusa.data.exchange import Exchange, Prompt, Settings, samples
from medusa.data.local import LocalAnswerer, sampling_params
from medusa.data.prompts import conversations, fitting
from medusa.data.regenerate import Part, regenerate
from medusa.data.sources import Source
from medusa.io.settings_file import save_settings
from tests.data.watched import Watched, lines


@pytest.fixture
def prompts(base):
    return [
        Prompt(ids=tuple(base.tokenizer(text).input_ids))
        for text in ("def f", "a", "import os, sys", "x = 1", "class B")
    ]


@pytest.fixture
def run(model, tmp_path):
    """Answer in this process; returns the samples."""

    def run(prompts, name="a.jsonl", batch=2, model=model, watch=Watched, **settings):
        chosen = Settings(**{"max_new_tokens": 8} | settings)
        fit = fitting(model, prompts, chosen.max_new_tokens)
        regenerate(fit, watch(LocalAnswerer(model, chosen, batch)), tmp_path / name, vars(chosen))
        return lines(tmp_path / name)

    return run


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3, "top_p": 0.5}])
def test_answers_are_the_bases_own_and_only_they_are_supervised(model, prompts, run, settings):
    samples = run(prompts, **settings)
    shortest_first = sorted((list(prompt.ids) for prompt in prompts), key=len)
    settings.pop("seed", None)
    for number, (prompt, sample) in enumerate(zip(shortest_first, samples, strict=True)):
        seed = sampling_params(Settings(seed=3), number).seed
        answer = model.generate(prompt, max_new_tokens=8, nodes=1, seed=seed, **settings).tokens
        assert sample == {"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * len(answer)}


def test_another_seed_draws_other_texts():
    drawn = [{sampling_params(Settings(seed=seed), number).seed for number in range(99)} for seed in (0, 1)]
    assert len(drawn[0] | drawn[1]) == 198


def test_a_full_disk_is_named(prompts, run, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Part, "add", full)
    with pytest.raises(OSError, match=r"disk of .* is full; free space, then the same command continues"):
        run(prompts)


def chats(tmp_path, *turns):
    """A file of one conversation with recorded answers, read again without them."""
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    return list(conversations(Source(str(tmp_path / "chats.jsonl"))))


def test_every_user_turn_is_answered_behind_the_bases_own_answers(model, run, tmp_path):
    long = chats(tmp_path, ("user", "ab"), ("assistant", "RECORDED"), ("user", "cd"), ("assistant", "X"), ("user", "e"))
    short = chats(tmp_path, ("system", "s"), ("user", "q"), ("assistant", "RECORDED"))
    found = run([*long, *short])
    read = model.chat_prompt([{"role": "user", "content": "ab"}])
    history = [{"role": "user", "content": "ab"}]
    for question in ("cd", "e", None):
        output = model.generate(read, max_new_tokens=8, nodes=1)
        (sample,) = [s for s in found if s["input_ids"][: len(read) + len(output.tokens)] == read + output.tokens]
        assert sample["loss_mask"][len(read) :][: len(output.tokens)] == [1] * len(output.tokens)
        if question:
            history += [{"role": "assistant", "content": output.text}, {"role": "user", "content": question}]
            read = model.chat_prompt(history)
    assert "RECORDED" not in "".join(model.base.tokenizer.decode(sample["input_ids"]) for sample in found)
    assert model.base.tokenizer.decode(found[-1]["input_ids"]).startswith("s<end>q<end>")


def test_a_conversation_ends_where_the_context_does(model, run, tmp_path):
    samples = run(chats(tmp_path, ("user", "ab"), ("assistant", ""), ("user", "x" * 300)))
    assert len(samples) == 1
    assert sum(samples[0]["loss_mask"]) <= 8


ALTERNATING = (
    "{% for m in messages %}{% if m.role != ('user', 'assistant')[loop.index0 % 2] %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}<end>{% endfor %}"
)


def test_conversations_that_the_template_refuses_are_left_out_and_named(with_template, run, tmp_path, caplog):
    model = with_template(ALTERNATING)
    twice = {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
    later = {"messages": [
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "X"}, *twice["messages"],
    ]}  # fmt: skip
    good = {"prompt": "good"}
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in (good, twice, later, twice)))
    found = run(list(conversations(Source(str(path)))), model=model)
    texts = [model.base.tokenizer.decode(sample["input_ids"]) for sample in found]
    assert [text.partition("<end>")[0] for text in texts] == ["c", "good"]
    assert f"2 of 4 prompts are refused and left out; the first: {path}, line 2: chat template" in caplog.text
    assert f"1 conversations end before a turn that has no answer; the first: {path}, line 3: chat" in caplog.text
    assert "roles must alternate" in caplog.text


def test_a_template_that_refuses_everything_ends_at_once(with_template, run, tmp_path):
    model = with_template("{{ raise_exception('no') }}")
    with pytest.raises(ValueError, match=r"prompts \(1\) are all refused; the first: .*line 1: chat template"):
        run(chats(tmp_path, ("user", "ab")), model=model)


def test_exchanges_join_while_each_prompt_begins_with_all_that_was_said():
    told = [Exchange([1, 2], [3]), Exchange([1, 2, 3, 4], [5, 6])]
    assert samples(told) == [{"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 0, 1, 0, 1, 1]}]
    rewritten = [*told, Exchange([1, 2, 9, 4, 5, 6], [7])]
    assert samples(rewritten)[1:] == [{"input_ids": [1, 2, 9, 4, 5, 6, 7], "loss_mask": [0, 0, 0, 0, 0, 0, 1]}]
    assert told[0] == ([1, 2], [3]), "what it is given stays"


def test_a_stopped_run_goes_on_and_gives_the_same_file(prompts, run, tmp_path):
    whole = run(prompts, "whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run(prompts, "cut.jsonl", watch=partial(Watched, stop_after=2))
    part = tmp_path / "cut.jsonl.part"
    part.write_text(part.read_text() + '{"prompt": 1, "sam')
    watched = []
    assert run(prompts, "cut.jsonl", watch=lambda answerer: watched.append(Watched(answerer)) or watched[0]) == whole
    assert len(watched[0].asked) == 3, "the first two were not answered again"
    assert not part.exists()


def test_prompts_without_room_for_an_answer_are_left_out(run, prompts, tmp_path, caplog):
    assert len(run([*prompts, Prompt(ids=(5,) * 250)])) == len(prompts)
    assert "1 of 6 prompts leave no room for 8 tokens" in caplog.text
    with pytest.raises(ValueError, match=r"prompts \(1\) leave no room for 8 tokens"):
        run([Prompt(ids=(5,) * 250)])
    with pytest.raises(ValueError, match=r"prompts \(0\) hold nothing"):
        regenerate([], None, tmp_path / "none.jsonl", {})


@pytest.mark.parametrize("changed", [{"seed": 1}, {"top_p": 0.5}, {"first": 7}])
def test_an_unfinished_file_of_other_prompts_or_settings_is_refused(prompts, run, changed):
    with pytest.raises(KeyboardInterrupt):
        run(prompts, watch=partial(Watched, stop_after=0))
    first = changed.pop("first", None)
    with pytest.raises(ValueError, match=r"a.jsonl.part\) was begun with other prompts or settings; remove it"):
        run([Prompt(ids=(first,)), *prompts[1:]] if first else prompts, **changed)


def test_a_damaged_unfinished_file_is_said(tmp_path):
    part = Part(tmp_path / "a.part", {})
    part.close()
    (tmp_path / "a.part").write_text('{}\n{"prompt": 1}\nnonsense\n')
    with pytest.raises(ValueError, match=r"a.part\) is damaged \(b'nonsense.*remove it"):
        Part(tmp_path / "a.part", {})


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"prompt": "hi"}, "hi<end>"),
        ({"prompt": "hi", "response": None}, "hi<end>"),
        ({"prompt": [{"role": "user", "content": "hi"}]}, "hi<end>"),
        ({"instruction": "hi", "input": "you"}, "hi\n\nyou<end>"),
        ({"conversations": [{"from": "human", "value": "yo"}, {"from": "gpt", "value": "x"}]}, "yo<end>"),
        ({"system": "s", "conversations": [{"from": "human", "value": "yo"}]}, "s<end>yo<end>"),
        ({"messages": [{"role": "user", "content": "yo"}]}, "yo<end>"),
    ],
)
def test_prompts_come_from_conversations_with_or_without_answers(model, tmp_path, record, prompt):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(record) + "\n")
    (found,) = conversations(Source(str(path)))
    assert model.base.tokenizer.decode(model.chat_prompt(found.asked[0])) == prompt


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "a document"}, "no prompt; give messages that begin with a user turn, or prompt"),
        ({"messages": [{"role": "user"}]}, r"content \(None\) is not text"),
    ],
)
def test_lines_that_are_no_conversation_are_named(tmp_path, record, message):
    path = tmp_path / "chats.jsonl"
    path.write_text('{"prompt": "fine"}\n' + json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=f"chats.jsonl, line 2: {message}"):
        list(conversations(Source(str(path))))


def test_conversations_without_a_question_are_passed_over_and_counted(tmp_path, caplog):
    path, asked = tmp_path / "chats.jsonl", {"prompt": "fine"}
    nobody = [{"messages": []}, {"messages": [{"role": "assistant", "content": "x"}]}]
    path.write_text("".join(json.dumps(record) + "\n" for record in [*nobody, asked]))
    assert len(list(conversations(Source(str(path))))) == 1
    assert caplog.messages == [f"2 of 3 records are skipped; the first: {path}, line 1: it has no user turn"]
    path.write_text(json.dumps(nobody[0]) + "\n")
    with pytest.raises(
        ValueError, match=r"none of its 1 records has a question to answer .*line 1: it has no user turn"
    ):
        list(conversations(Source(str(path))))


@pytest.mark.parametrize(
    ("turns", "asked"),
    [
        ("s u a u a", ["s u", "u"]),
        ("u a u", ["u", "u"]),
        ("a u a", ["u"]),
        ("u u a a s u", ["u u", "s u"]),
        ("s a u", ["s u"]),
        ("u a t u a", ["u"]),
    ],
)
def test_questions_are_what_stands_between_answers(tmp_path, turns, asked):
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    (prompt,) = chats(tmp_path, *((roles[turn], "text") for turn in turns.split()))
    assert [" ".join(message["role"][0] for message in group) for group in prompt.asked] == asked


def test_answers_are_on_the_disk_before_the_unfinished_file_goes(tmp_path, monkeypatch):
    out, flushed = tmp_path / "out.jsonl", []
    with closing(Part(tmp_path / "out.jsonl.part", {})) as part:
        part.add(0, [{"input_ids": [1, 2], "loss_mask": [0, 1]}])
        monkeypatch.setattr("os.fsync", lambda file: flushed.append(sorted(path.name for path in tmp_path.iterdir())))
        assert part.finish(out, distinct=False) == (1, 1)
    assert len(flushed) == 1 and "out.jsonl.part" in flushed[0] and "out.jsonl" not in flushed[0]
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_two_processes_do_not_write_one_file(tmp_path):
    path = tmp_path / "a.jsonl.part"
    part = Part(path, {"base": "a"})
    part.add(3, [{"loss_mask": [1]}])
    with pytest.raises(ValueError, match=r"part\) is written by another process; wait for it"):
        Part(path, {"base": "a"})
    part.close()
    again = Part(path, {"base": "a"})
    assert list(again.lines) == [3]
    again.close()


def test_the_command_line_writes_a_file_once(base_directory, tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"prompt": "hi", "response": "there"}) + "\n")
    out = tmp_path / "out.jsonl"
    words = ["regenerate", "--base", str(base_directory), "--prompts", str(path), "--out", str(out)]
    assert main([*words, "--max-new-tokens", "5"]) == 0
    assert len(lines(out)) == 1
    out.write_text("kept")
    assert main(words) == 0
    assert out.read_text() == "kept"


def test_whoever_guesses_the_answers_are_the_same(base_directory, tmp_path, model):
    path, out = tmp_path / "chats.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"hi {n}", "response": ""}) + "\n" for n in range(3)))
    save_settings(Speculation(drafter="draft-model+prompt-lookup", nodes=4), tmp_path / "tuned.json")
    model.save_pretrained(tmp_path / "heads")
    words = ["regenerate", "--prompts", str(path), "--out", str(out), "--max-new-tokens", "12", "--dtype", "float32"]
    named, small = ["--base", str(base_directory)], ["--draft-model", str(base_directory)]
    found = []
    tuned = [*named, *small, "--settings", str(tmp_path / "tuned.json")]
    for flags in (named, tuned, ["--heads", str(tmp_path / "heads")]):
        assert main([*words, *flags]) == 0
        found.append(out.read_text())
        out.unlink()
    assert found[0] == found[1] == found[2]
    assert main([*words, *named, "--settings", str(tmp_path / "tuned.json")]) == 1, "there is no draft model"
    assert main([*words, *named, *small, "--endpoint", "http://localhost:1/v1"]) == 2


def test_wrong_use_and_failures_have_their_exit_status(tmp_path, capsys):
    with pytest.raises(SystemExit) as wrong:
        main(["regenerate", "--out", "x", "--count", "0"])
    assert wrong.value.code == 2
    assert "at least 1" in capsys.readouterr().err
    for temperature in ("-1", "nan"):
        with pytest.raises(SystemExit) as wrong:
            main(["regenerate", "--out", "x", "--temperature", temperature])
        assert wrong.value.code == 2
    assert main(["regenerate", "--base", str(tmp_path / "no" / "base"), "--out", str(tmp_path / "x")]) == 1
