"""``medusa bench accept``: figures of real decoding from texts that are written once, and what they say in words."""

import json

import pytest
import torch

from medusa import MedusaModel
from medusa.benchmarks.__main__ import main
from medusa.benchmarks.accept.figures import estimates, figures, grouped
from medusa.benchmarks.accept.measure import FAR, LOW, NEAR, OUTSIDE, RIGHT, WIDTH, measure
from medusa.benchmarks.accept.shown import FEWEST_DRAFTS, _known, conclusion
from medusa.benchmarks.accept.texts import known_answers, usual_file

PROMPTS = [[5, 9, 7, 5, 9, 7], [30, 2] * 9, [8, 8, 8, 3]]


@pytest.fixture
def asked(model, base_directory, tmp_path):
    """Words of a command, of a model whose heads know a part of the vocabulary."""
    model.save_pretrained(tmp_path / "heads")
    (tmp_path / "x.jsonl").write_text(
        '{"category": "qa", "turns": ["why why why"]}\n{"category": "qa", "turns": ["how"]}\n{"prompt": "go on"}\n'
        f'{{"messages": [{{"role": "user", "content": "{"long " * 22}"}}]}}\n'
    )
    words = ["accept", "--heads", str(tmp_path / "heads"), "--base", str(base_directory), "--dtype", "float32"]
    return [*words, "--questions", str(tmp_path / "x.jsonl"), "--texts", str(tmp_path / "new" / "texts.jsonl")]


def test_figures_are_those_of_decoding(asked, base_directory, tmp_path, capsys):
    files = [
        f"--{name}={tmp_path / file}" for name, file in (("json", "a.json"), ("markdown", "a.md"), ("picture", "a.png"))
    ]
    words = ["--drafters", "heads,hybrid,early-exit", "--nodes", "3,6", "--max-new-tokens", "40"]
    assert main([*asked, *files, *words]) == 0
    report = json.loads((tmp_path / "a.json").read_text())
    assert (report["questions"], report["texts"]["written"], report["texts"]["own"]) == (4, 4, 1.0)
    model = MedusaModel.from_pretrained(tmp_path / "heads", base_directory, torch.float32)
    texts = [json.loads(line) for line in (tmp_path / "new" / "texts.jsonl").read_text().splitlines()]
    prompts = [text["input_ids"][: text["loss_mask"].index(1)] for text in texts]
    outputs = [model.generate(prompt, max_new_tokens=40, nodes=6, drafter="heads") for prompt in prompts]
    whole, *groups = report["drafters"]["heads"]
    tokens, steps = sum(len(o.tokens) for o in outputs), sum(o.steps for o in outputs)
    assert whole["tokens_per_step"]["tree"]["6"]["value"] == pytest.approx(tokens / steps)
    assert [row["group"] for row in groups if row["of"] == "category"] == ["qa", "prompts"]
    assert sum(row["questions"] for row in groups if row["of"] == "prompt tokens") == 4
    for rows in report["drafters"].values():
        for row in rows:
            assert row["first_right"]["value"] + sum(row["first_wrong"].values()) == pytest.approx(1)
        places = sum(row["places"] for row in rows if row["of"] == "place in the answer")
        assert places == rows[0]["places"] == report["texts"]["tokens"] - 4
    shown = " ".join(capsys.readouterr().out.split())
    assert report["conclusions"]["hybrid"] in shown.replace("│ ", "")
    assert "| all, chains | 4 |" in (tmp_path / "a.md").read_text()
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_texts_are_written_once(model, tmp_path):
    path = tmp_path / "texts.jsonl"
    first, written = known_answers(model, PROMPTS[:2], path, 12)
    assert written == 2
    assert first == [output.tokens for output in model.generate(PROMPTS[:2], max_new_tokens=12, nodes=1)]
    content = path.read_text()
    assert known_answers(model, PROMPTS[:2], path, 12) == (first, 0)
    assert known_answers(model, PROMPTS[:2], path, 5) == ([answer[:5] for answer in first], 0)
    path.write_text(content + content[:30])  # killed in the middle of a line
    longer, written = known_answers(model, PROMPTS, path, 12)
    assert (longer[:2], written) == (first, 1)
    assert path.read_text().startswith(content)
    assert known_answers(model, PROMPTS, path, 12) == (longer, 0)
    path.write_text(path.read_text().removesuffix("\n"))  # others' files may end so
    assert known_answers(model, PROMPTS, path, 12) == (longer, 0)
    longest, written = known_answers(model, PROMPTS, path, 30)
    assert written == sum(len(answer) == 12 and answer[-1] != 0 for answer in longer) > 0
    assert known_answers(model, PROMPTS, path, 30) == (longest, 0)


def test_other_files_get_no_answers(model, tmp_path):
    with pytest.raises(ValueError, match=r"texts .*lack 3 answers, and JSON lines alone get more"):
        known_answers(model, PROMPTS, tmp_path / "texts.parquet", 4)


def test_answers_of_one_token_say_nothing(base):
    counts = measure(MedusaModel(base), ["prompt-lookup"], [4], PROMPTS, [[7], [7, 8], [7]]).drafters["prompt-lookup"]
    (row, place) = figures(counts, grouped({"a": [0, 2]}, [6, 18, 4])[1:])
    assert (row["group"], row["places"], place["places"]) == ("0 to 127", 1, 1)
    with pytest.raises(ValueError, match=r"answers \(3\) have one token each"):
        figures(measure(MedusaModel(base), ["prompt-lookup"], [4], PROMPTS, [[7]] * 3).drafters["prompt-lookup"], [])


def test_depths_without_figures_are_told(capsys):
    def estimate(of, value):
        return {"of": of, "value": value, "low": value, "high": value}

    right, none, rare = estimate(FEWEST_DRAFTS, 0.5), estimate(FEWEST_DRAFTS, 0.0), estimate(FEWEST_DRAFTS - 1, 0.5)
    assert _known([right, none, right]) == [right, none], "no draft is right down to a depth below"
    assert _known([none, rare]) == [none]
    assert _known([rare, right]) == _known([None]) == []


def test_texts_of_another_base_are_told(asked, tmp_path, caplog):
    assert main([*asked, "--nodes", "3", "--max-new-tokens", "6"]) == 0
    path = tmp_path / "new" / "texts.jsonl"
    texts = [json.loads(line) for line in path.read_text().splitlines()]
    for text in texts:
        text["input_ids"][-1] = (text["input_ids"][-1] + 1) % 50 + 1
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    assert main([*asked, "--nodes", "3", "--max-new-tokens", "6"]) == 0
    assert "so these are not its greedy answers; remove the file" in caplog.text


def test_each_base_has_a_file_of_its_own(model, tiny_model):
    assert usual_file(model) != usual_file(tiny_model)
    assert usual_file(model) == usual_file(MedusaModel(model.base))


def test_sizes_without_a_guess_are_refused(asked, capsys):
    assert main([*asked, "--nodes", "1,4"]) == 1
    assert "nodes (1) leave no guess to try" in capsys.readouterr().err


def test_bases_that_verify_nothing_are_refused(asked, monkeypatch, capsys, model):
    plain = MedusaModel(model.base.with_traits(decoding="plain"), model.heads)
    monkeypatch.setattr("medusa.benchmarks.accept.command.named_model", lambda *_, **__: plain)
    assert main(asked) == 1
    assert "decodes plainly and verifies no drafts" in capsys.readouterr().err


def test_what_heads_cannot_say_is_told_apart(base, make_heads):
    heads = make_heads(draft_vocab_size=WIDTH)
    heads.draft_ids.copy_(torch.arange(WIDTH) * 3)
    answers = [[1, 2, 4, 5, 7], [0, 3, 6, 9, 45], [1, 3, 4, 6, 7]]
    measured = measure(MedusaModel(base, heads), ["heads"], [4], PROMPTS, answers)
    firsts = measured.drafters["heads"].firsts.sum(1)
    assert firsts[:, OUTSIDE].tolist() == [4, 0, 2]  # the first token of an answer is not drafted
    assert firsts[:, LOW].tolist() == [0, 0, 0], "all that they know are among the first guesses"
    assert firsts[:, [RIGHT, NEAR, FAR]].sum(1).tolist() == [0, 4, 2]


def test_full_trees_leave_nothing_out(model):
    answers = [model.generate(prompt, max_new_tokens=20, ignore_eos=True).tokens for prompt in PROMPTS]
    found = [measure(model, ["heads"], [32], PROMPTS, answers, full).drafters["heads"] for full in (False, True)]
    (usual, chain), (full, same) = (counts.steps[:, :, 1, 0].sum(0).tolist() for counts in found)
    assert full < usual < chain, "random heads are sure of little"
    assert same == chain


def test_what_a_drafter_learns_stays_in_its_run(base):
    answers = [[1, 2, 3, 4, 5, 6, 7, 8, 9]] * 2
    (ngram,) = measure(MedusaModel(base), ["ngram"], [4, 9], PROMPTS[:1] * 2, answers).drafters.values()
    tokens_per_step = (ngram.steps[:, :, 0, 0] / ngram.steps[:, :, 1, 0]).tolist()
    assert tokens_per_step[0] == [1.0] * 4, "nothing is known of the first text"
    assert min(tokens_per_step[1]) > 1.5, "and each run has learned from it"


def test_intervals_are_of_sums_by_questions():
    above, below = torch.tensor([[4, 1, 0], [6, 1, 0], [5, 1, 0]]), torch.tensor([[2, 2, 0], [2, 2, 0], [2, 2, 0]])
    first, same, nothing = estimates(above, below)
    assert (first["value"], first["low"], first["high"]) == pytest.approx((2.5, 2.0, 3.0))
    assert same == {"value": 0.5, "low": 0.5, "high": 0.5, "of": 6}
    assert nothing is None
    (rare,) = estimates(torch.tensor([[1], [0]]), torch.tensor([[1], [0]]))
    assert rare["low"] == rare["high"] == 1.0, "draws without anything below say nothing"


def row(of, group, right, spread=0.02, questions=9, chain=(0.5, 0.5), **wrong):
    names = ("second to fourth", "fifth to sixteenth", "lower", "outside of the vocabulary")
    shares = dict(zip(names, wrong.get("wrong", (0.1, 0.1, 0.1, 0.1)), strict=True))
    first = {"value": right, "low": right - spread, "high": right + spread}
    values = [{"value": value, "low": value, "high": value, "of": 99} for value in chain]
    acceptance = {"acceptance": {"chain": {8: values}}}
    return {"of": of, "group": group, "questions": questions, "first_right": first, "first_wrong": shares} | acceptance


def test_words_follow_from_the_figures():
    whole = row("all", "all", 0.6, chain=(0.6, 0.4), wrong=(0.02, 0.02, 0.06, 0.3))
    groups = [row("category", "maths", 0.7), row("category", "german", 0.3, wrong=(0, 0, 0.2, 0.5))]
    lengths = [row("prompt tokens", "0 to 127", 0.62), row("prompt tokens", "128 to 255", 0.58, spread=0.1)]
    said = conclusion([whole, *groups, *lengths])
    assert "right at 60% of the places" in said
    assert "75% outside of the vocabulary. Most often it is outside of the vocabulary: a larger draft" in said
    assert "differ most by category: 0.70 (maths; 10% outside" in said
    assert "against 0.30 (german; 50% outside of the vocabulary)" in said
    assert "at 0.60 0.40: deeper guesses are worse." in said
    alike = conclusion([row("all", "all", 0.6), *lengths, row("category", "one question", 0.1, questions=1)])
    assert "No category, length of prompt or place in the answer differs" in alike
    assert "at 0.50 0.50: deeper guesses are no worse, so the first one is what to improve." in alike
