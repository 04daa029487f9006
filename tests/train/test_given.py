"""``medusa heads --answers``: answers that a server recorded, and heads whose training continues."""

from pathlib import Path

import pytest
import torch

from medusa import BaseModel, HeadsConfig
from medusa.data.sources import read_samples
from medusa.formats import load_heads, save_heads
from medusa.serve.recorder import Recorder
from medusa.train.own.answers import GIVEN, HELDOUT
from medusa.train.own.command import main
from medusa.train.own.estimate import make_plan
from medusa.train.own.given import KIND, answering, longest, read_given, write_given
from medusa.train.own.plan import Asked, Plan
from medusa.train.own.settings import Facts, continued_values, shape_values
from tests.train.jobs import metrics
from tests.train.test_own import measured

ASKED = Asked("base", 2.0, "", "", answers="traffic", heads="old")


@pytest.fixture(scope="session")
def base(base_directory: Path) -> BaseModel:
    return BaseModel.load(base_directory, dtype=torch.float32, device="cpu")


def record(directory: Path, exchanges: list[tuple[list[int], list[int]]]) -> Path:
    recorder = Recorder(directory, 1 << 20)
    for prompt, answer in exchanges:
        recorder.add(prompt, answer)
    recorder.close()
    return directory


def distinct(count: int) -> list[tuple[list[int], list[int]]]:
    return [([1, 100 + number], [7, 8, 9]) for number in range(count)]


def test_turns_of_a_conversation_are_one_and_what_repeats_is_told_once(base: BaseModel, tmp_path: Path) -> None:
    turns = [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6, 7]), ([1, 2, 3, 4, 5, 6, 7, 8], [9, 9])]
    branch = ([1, 2, 3, 4, 6], [6, 6])
    record(tmp_path, [turns[0], *distinct(38), turns[1], branch, turns[2], turns[0], *distinct(2)])
    found = read_given(str(tmp_path), base.tokenizer, base.vocab_size)
    told = [(sample.input_ids.tolist(), sample.loss_mask.int().tolist()) for sample in found]
    assert told[-4] == ([1, 2, 3, 4, 6, 6, 6], [0, 0, 0, 0, 0, 1, 1])
    assert told[-3] == ([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], [0, 0, 1, 1, 0, 1, 1, 0, 1, 1])
    assert len(found) == 40
    assert [ids[1] for ids, _ in told[-2:]] == [100, 101], "what was told again lately is late"


def test_too_few_are_refused(base: BaseModel, tmp_path: Path) -> None:
    record(tmp_path, distinct(39) * 2)
    with pytest.raises(
        ValueError, match="hold 39 different conversations with a prompt, and at least 40 are needed, 8 of which"
    ):
        read_given(str(tmp_path), base.tokenizer, base.vocab_size)


def test_texts_without_a_prompt_are_left_out_and_rows_hold_long_ones(base: BaseModel, tmp_path: Path) -> None:
    path = record(tmp_path / "traffic", [*distinct(38), ([1, 2], [3] * 240), ([2, 2], [3] * 240)])
    with (path / "more.jsonl").open("w") as file:
        file.write('{"input_ids": [1, 2, 3], "loss_mask": [1, 1, 1]}\n' * 2)
    found = read_given(str(path), base.tokenizer, base.vocab_size)
    assert len(found) == 40
    assert longest(found) == 242, "rows as long as this one cut few"


def plan_of(conversations: int, heldout: int) -> Plan:
    plan = make_plan(ASKED, measured(kind=KIND, most=conversations), 60.0, 1e12)
    assert plan.conversations == conversations
    return Plan(**{**vars(plan), "heldout": heldout})


def test_the_newest_are_divided_and_no_prompt_is_on_both_sides(base: BaseModel, tmp_path: Path) -> None:
    twice = [(prompt, [7, 8, 8 + again]) for again in range(2) for prompt, _ in distinct(50)]
    given = read_given(str(record(tmp_path / "traffic", twice)), base.tokenizer, base.vocab_size)
    write_given(plan_of(75, 15), given, tmp_path)
    sides = [read_samples(tmp_path / name, base.tokenizer) for name in (GIVEN, HELDOUT)]
    prompts = [{tuple(sample.prompt) for sample in side} for side in sides]
    assert not prompts[0] & prompts[1]
    assert len(sides[1]) == 15
    assert 74 <= len(sides[0]) <= 75, "one prompt may stand at the border"
    written = {tuple(sample.input_ids.tolist()) for side in sides for sample in side}
    assert written <= {tuple(sample.input_ids.tolist()) for sample in given[-90:]}
    again = [sample for sample in given if sample.prompt == given[0].prompt] * 50
    with pytest.raises(ValueError, match=r"answers \(traffic\) have 0 other prompts than the 15 held-out ones"):
        write_given(plan_of(75, 15), again, tmp_path)


def test_given_answers_take_no_time_and_all_of_them_are_learned_from(base: BaseModel, tmp_path: Path) -> None:
    given = read_given(str(record(tmp_path, distinct(150))), base.tokenizer, base.vocab_size)
    timed = answering(given)
    assert (timed.length, timed.prompt_tokens, timed.longest_prompt, timed.seconds) == (3, 2, 2, 0)
    found = measured(kind=KIND, answers=timed, prompts=None, most=142, given=given)
    plan = make_plan(ASKED, found, 60.0, 1e12)
    assert (plan.conversations, plan.recipe["optim.epochs"]) == (142, 4)
    assert plan.seconds["prompts"] == plan.seconds["answers"] == 0


def test_heads_that_go_on_keep_their_shape() -> None:
    shape = shape_values(Facts("cpu", 1, 135_000_000, 576, 30, 49_152, 2048), 700)
    sizes = {"num_layers": 2, "rank": 8, "draft_vocab_size": 999, "feature_layers": (10,)}
    heads = HeadsConfig(576, 49_152, 5, architecture="markov", **sizes)  # type: ignore[arg-type]
    values = shape | continued_values("old", heads, shape)
    assert {key: values[f"heads.{key}"] for key in ("architecture", "num_heads", "num_layers", "rank")} == {
        "architecture": "markov", "num_heads": 5, "num_layers": 2, "rank": 8,
    }  # fmt: skip
    assert (values["heads.draft_vocab"], values["heads.feature_layers"], values["heads.init_from"]) == (999, 1, "old")
    assert values["optim.lr"] == shape["optim.lr"] / 2
    with pytest.raises(ValueError, match=r"heads \(old\) are attention heads, whose training .* cannot continue"):
        continued_values("old", HeadsConfig(576, 49_152, architecture="attention"), shape)


def test_prompts_to_answer_and_answers_exclude_each_other() -> None:
    with pytest.raises(SystemExit):
        main(["--base", "embedded", "--answers", "few", "--prompts", "few"])


@pytest.mark.slow
def test_heads_learn_from_what_was_recorded(  # type: ignore[no-untyped-def]
    base, base_directory: Path, make_heads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    save_heads(make_heads(architecture="recurrent", base=str(base_directory)).float(), Path("old"))
    torch.manual_seed(0)
    exchanges = [(torch.randint(1, 250, (6,)).tolist(), torch.randint(1, 250, (20,)).tolist()) for _ in range(60)]
    record(Path("traffic"), exchanges)
    words = ["--base", str(base_directory), "--answers", "traffic", "--heads", "old", "--out", "new", "--hours", "1"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "heads before" in said
    assert "prompts " not in said, "nothing is asked"
    assert len(Path("new", GIVEN).read_text().splitlines()) == 52
    old, new = load_heads("old"), load_heads("new/heads")
    assert new.config.num_heads == old.config.num_heads
    assert any(not torch.equal(ours, theirs) for ours, theirs in zip(new.parameters(), old.parameters(), strict=True))
    steps = len(metrics(Path("new")))
    record(Path("traffic"), distinct(5))  # the server goes on; the run keeps what it began with
    assert main(words) == 0
    assert len(metrics(Path("new"))) == steps
    assert len(Path("new", HELDOUT).read_text().splitlines()) == 8
