"""``medusa heads``: how time is divided, what is asked, what a stop leaves, and one whole run (slow)."""

import copy
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from rich.console import Console
from transformers import AutoModelForCausalLM, Lfm2Config, MistralConfig, OPTConfig

from medusa import BaseModel, MedusaModel
from medusa.data.chat_prompts import chat_prompts
from medusa.data.exchange import Prompt, Settings
from medusa.files import header, write_json
from medusa.formats import save_heads
from medusa.train.own import asked, measure, result
from medusa.train.own.answers import HELDOUT, TRAIN, answer, answered
from medusa.train.own.command import main
from medusa.train.own.estimate import make_plan
from medusa.train.own.measure import Measured
from medusa.train.own.plan import FEWEST, FILE, Asked, Costs, Plan, divide, held_out, worth
from medusa.train.own.screen import Screen, clock
from medusa.train.own.settings import Facts, cache_values, shape_values
from medusa.train.own.training import full_recipe, write_recipe
from medusa.train.own.trial import Answering, Single, Training, answering, training
from medusa.train.recipe_file import read_recipe
from medusa.train.run_directory import RunDirectory
from tests.train.jobs import ROOT, assert_same_run, metrics, run, until

ASKED = Asked("base", 2.0, "", "")
CHAT_TEMPLATE = "{% for m in messages %}user {{ m.content }}<end>{% endfor %}"
SMALL = Facts("cpu", 1, 135_000_000, 576, 30, 49_152, 2048)


@pytest.fixture(scope="session")
def base(base_directory: Path) -> BaseModel:
    return BaseModel.load(base_directory, dtype=torch.float32, device="cpu")


def costs(**values: float) -> Costs:
    return Costs(**{"prompt": 0.0, "answer": 1.0, "first": 1.0, "later": 0.5} | values, fixed={})  # type: ignore[arg-type]


@pytest.mark.parametrize(("layers", "form"), [("conv", "native"), ("full_attention", "custom-generate")])
def test_the_heads_are_exported_in_a_format_for_their_base(  # type: ignore[no-untyped-def]
    layers: str, form: str, make_heads, base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = {**SIZES, "num_key_value_heads": 2, "bos_token_id": None, "max_position_embeddings": 256}
    config = Lfm2Config(**shape, layer_types=[layers, "full_attention"])  # type: ignore[arg-type]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    base.tokenizer.save_pretrained(tmp_path / "base")
    save_heads(make_heads(base=str(tmp_path / "base")).float(), tmp_path / "heads")
    turns = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "def"}]
    (tmp_path / HELDOUT).parent.mkdir()
    (tmp_path / HELDOUT).write_text(json.dumps({"messages": turns}) + "\n")
    plan, said = SimpleNamespace(asked=Asked(str(tmp_path / "base"), 2.0, "", ""), compared=1), StringIO()
    monkeypatch.setattr(result, "COMPARED_TOKENS", 2)
    result.compare(plan, tmp_path, lambda *_: None)  # type: ignore[arg-type]
    result.show(plan, tmp_path, Console(file=said, width=200))  # type: ignore[arg-type]
    assert f"--format {form} --out" in said.getvalue()


@pytest.mark.parametrize(("template", "command"), [(True, "chat"), (False, "serve")])
def test_the_next_command_is_one_that_the_base_can_take(template: bool, command: str, tmp_path: Path) -> None:
    ways = {name: {"tokens": 2, "steps": 1, "seconds": 1.0} for name in result.WAYS}
    write_json(tmp_path / result.FILE, {**header("comparison"), "prompts": 1, "ways": ways, "chat": template})
    said = StringIO()
    result.show(SimpleNamespace(asked=ASKED), tmp_path, Console(file=said, width=200))  # type: ignore[arg-type]
    assert f"use them:    medusa {command} --heads {tmp_path / 'heads'}" in said.getvalue()


def test_the_next_commands_take_a_path_with_spaces(tmp_path: Path) -> None:
    ways = {name: {"tokens": 2, "steps": 1, "seconds": 1.0} for name in result.WAYS}
    (out := tmp_path / "my runs").mkdir()
    write_json(out / result.FILE, {**header("comparison"), "prompts": 1, "ways": ways})
    said = StringIO()
    result.show(SimpleNamespace(asked=ASKED), out, Console(file=said, width=200))  # type: ignore[arg-type]
    use, export = said.getvalue().splitlines()[-2:]
    assert shlex.split(use)[5] == str(out / "heads")
    assert shlex.split(export)[-1] == str(out / "export")


def test_dear_answers_are_passed_over_more_often() -> None:
    cheap = divide(3600, costs(answer=0.1), 10**6)
    dear = divide(3600, costs(answer=20.0), 10**6)
    assert cheap[1] < dear[1] == 4
    for count, epochs in (cheap, dear):
        answer = 0.1 if epochs == cheap[1] else 20.0
        assert 3500 < count * (answer + 1 + 0.5 * (epochs - 1)) <= 3600


def test_all_prompts_of_a_short_list_are_answered_and_passed_over_most_often() -> None:
    assert divide(3600, costs(), 100) == (100, 4)


def test_what_is_fixed_comes_first_and_too_little_time_is_refused_with_what_is_needed() -> None:
    fixed = costs()._replace(fixed={"training": 3000.0})
    assert divide(3600, fixed, 10**6)[0] < divide(3600, costs(), 10**6)[0]
    with pytest.raises(
        ValueError, match=rf"too short here for {FEWEST} answers, which take 0\.85 hours.*raise --hours"
    ):
        divide(3000, fixed, 10**6)


def test_the_time_that_is_said_to_be_needed_is_enough() -> None:
    answers = costs(answer=10.0, first=2.0, later=0.1)._replace(fixed={"training": 100.0})
    with pytest.raises(ValueError, match="raise --hours") as refused:
        divide(300, answers, 10**6)
    more = float(str(refused.value).rpartition(" ")[2])
    assert divide(300 + 3600 * more, answers, 10**6)[0] >= FEWEST


def test_a_pass_is_worth_less_than_the_one_before() -> None:
    gains = [worth(count + 1) - worth(count) for count in range(4)]
    assert gains == sorted(gains, reverse=True)
    assert gains[0] == 1


@pytest.mark.parametrize(
    "facts",
    [SMALL, replace(SMALL, parameters=9_000_000, num_layers=2, vocab_size=4096, context=256),
     replace(SMALL, device="cuda", processes=4, parameters=8_000_000_000, vocab_size=128_256)],
)  # fmt: skip
def test_settings_make_a_recipe_for_every_size(facts: Facts, tmp_path: Path) -> None:
    recipe = full_recipe({**shape_values(facts, 700), **cache_values(1e9, 1e12, facts)}, tmp_path)
    assert recipe.heads.feature_layers < facts.num_layers
    assert recipe.heads.draft_vocab < facts.vocab_size
    assert recipe.data.row_tokens in (min(1024, facts.context), 2048)
    assert recipe.optim.rows_per_step >= facts.processes


def test_hidden_states_that_do_not_fit_are_not_kept() -> None:
    assert cache_values(1e9, 1e10, SMALL)["cache.mode"] == "offline"
    assert cache_values(9e9, 1e10, SMALL)["cache.mode"] == "online"


def measured(**values: object) -> Measured:
    texts = [(range(50), range(100))]
    answers = Answering(1e-4, 5e-3, 64, 100.0, 0.5, texts)
    known = {
        "facts": SMALL, "kind": asked.CHAT, "dtype": "bfloat16", "turns": 1.0, "most": 10**6, "loading": 10.0,
        "answers": answers, "prompts": replace(answers, length=40.0, ends=0.8),
        "alone": Single(1e-3, 0.01), "training": Training(1e-3, 1e-3),
        "shape": {"base.name": "base", "base.dtype": "bfloat16", **shape_values(SMALL, 210)},
    }  # fmt: skip
    return Measured(**known | values)  # type: ignore[arg-type]


def test_a_plan_fits_the_time_and_comes_back_from_its_file(tmp_path: Path) -> None:
    plan = make_plan(ASKED, measured(), 60.0, 1e12)
    assert 0.95 * 7140 < sum(plan.seconds.values()) <= 7140
    assert plan.heldout == held_out(plan.conversations)
    assert plan.written > 0.5 * plan.conversations
    assert 0 < plan.reading < plan.seconds["training"]
    plan.save(tmp_path)
    assert Plan.load(tmp_path, ASKED) == plan
    assert Plan.load(tmp_path / "other", ASKED) is None
    with pytest.raises(
        ValueError, match=r"content of base \(ab\) differs from that of the run .*\(none\); give another"
    ):
        Plan.load(tmp_path, replace(ASKED, content_of_base="ab"))
    with pytest.raises(ValueError, match=r"hours \(3\.0\) differs from that of the run .*\(2\.0\); give another --out"):
        Plan.load(tmp_path, replace(ASKED, hours=3.0))
    (tmp_path / FILE).write_text((tmp_path / FILE).read_text().replace('"written"', '"writ"'))
    with pytest.raises(ValueError, match=r"lacks a value \('written'\)"):
        Plan.load(tmp_path, ASKED)


def test_the_plan_of_another_process_is_not_replaced(tmp_path: Path) -> None:
    plan = make_plan(ASKED, measured(), 60.0, 1e12)
    plan.save(tmp_path)
    with pytest.raises(ValueError, match=r"--out \(.*\) holds a run that another process has just begun; give another"):
        plan.save(tmp_path)


def test_without_room_on_the_disk_each_pass_over_the_answers_is_one_of_the_base() -> None:
    roomy, narrow = make_plan(ASKED, measured(), 60.0, 1e12), make_plan(ASKED, measured(), 60.0, 1e6)
    assert (roomy.recipe["cache.mode"], narrow.recipe["cache.mode"]) == ("offline", "online")
    assert sum(narrow.seconds.values()) <= 7140
    assert narrow.reading == narrow.state_bytes == 0
    assert narrow.conversations * narrow.recipe["optim.epochs"] < roomy.conversations * roomy.recipe["optim.epochs"]


def prompt_file(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": f"say {n}"}) + "\n" for n in range(count)))
    return path


def test_prompts_of_a_file_are_those_that_differ_in_an_order_of_their_own(tmp_path: Path) -> None:
    path = prompt_file(tmp_path / "prompts.jsonl", 50)
    found = asked.read_prompts(str(path))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*reversed(lines), *lines]))
    assert asked.read_prompts(str(path)) == found
    assert len(found) == 50
    with pytest.raises(ValueError, match=r"hold 39 different ones, and at least 40 are needed"):
        asked.read_prompts(str(prompt_file(path, 39)))


def plan_of(kind: str, conversations: int = 20, written: int = 0) -> Plan:
    plan = make_plan(ASKED, measured(kind=kind), 60.0, 1e12)
    return replace(plan, conversations=conversations, heldout=8, written=written, answer_tokens=12)


def test_prompts_of_a_file_are_divided(with_template, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    found = [Prompt((({"role": "user", "content": f"say {n}"},),)) for n in range(40)]
    plain = with_template(None)
    train, heldout = asked.division(plan_of(asked.FROM_FILE), plain, tmp_path, found)
    assert (len(train), len(heldout)) == (20, 8)
    assert plain.base.tokenizer.decode(heldout[0].ids) == "say 0", "text, where there is no chat template"
    train, heldout = asked.division(plan_of(asked.FROM_FILE), with_template("{{ 1 }}"), tmp_path, found)
    assert train + heldout == found[8:28] + found[:8]


def test_a_base_without_a_template_writes_beginnings_of_texts(with_template, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model, plan, told = with_template(None), plan_of(asked.TEXT, 12, 30), list[float]()
    assert asked.kind_of(model, "") == asked.TEXT
    asked.write_prompts(plan, model, tmp_path, lambda done, _: told.append(done))
    assert told[0] == 0
    assert told[-1] == 1
    train, heldout = asked.division(plan, model, tmp_path, [])
    assert (len(train), len(heldout)) == (12, 8)
    assert all(prompt.ids and not model.base.eos_ids & {*prompt.ids} for prompt in train + heldout)
    assert len({prompt.ids for prompt in train + heldout}) == 20


def test_a_chat_base_writes_half_of_its_prompts(with_template, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = with_template(CHAT_TEMPLATE)
    plan = plan_of(asked.CHAT, 20, 24)
    assert asked.kind_of(model, "") == asked.CHAT
    (tmp_path / asked.WRITTEN).write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": f"own {n % 10}"}]}) + "\n" for n in range(24))
    )
    train, heldout = asked.division(plan, model, tmp_path, [])
    sides = [[prompt.asked[0][0]["content"] for prompt in side] for side in (train, heldout)]
    assert [len(side) for side in sides] == [20, 8]
    assert [sum(text.startswith("own ") for text in side) for side in sides] == [6, 4]
    assert not {*sides[0]} & {*sides[1]}
    made = [prompt.turns[0] for prompt in chat_prompts("train", 40)]
    (tmp_path / asked.WRITTEN).write_text(
        "".join(json.dumps({"messages": [{"role": "user", "content": text}]}) + "\n" for text in made[:30])
    )
    train, heldout = asked.division(plan, model, tmp_path, [])
    assert len({prompt.asked[0][0]["content"] for prompt in train + heldout}) == 28, "it wrote what templates say too"
    assert asked.beginnings(with_template("nobody"), asked.CHAT, 3) == [], "it shows no place where a user speaks"


def test_a_chat_base_that_ends_no_prompt_is_asked_what_is_made_from_templates(  # type: ignore[no-untyped-def]
    with_template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(asked, "CHAT_SETTINGS", Settings(1))  # cut off behind one token
    model, plan = with_template(CHAT_TEMPLATE), plan_of(asked.CHAT, 20, 6)
    asked.write_prompts(plan, model, tmp_path, lambda *_: None)
    assert "got no answer at all" in caplog.text
    train, heldout = asked.division(plan, model, tmp_path, [])
    assert (len(train), len(heldout)) == (20, 8)


def test_a_trial_of_answers_counts_those_that_do_not_end(base: BaseModel) -> None:
    model = MedusaModel(base)
    prompts = [Prompt(ids=(5, 6, 7 + n)) for n in range(8)]
    found = answering(model, prompts, [Settings(20), Settings(20, 1.0)], most=0.2)
    assert found.together == 8
    assert found.prompt_tokens == found.longest_prompt == 3
    assert 1 <= found.length <= 20
    assert 0 <= found.ends <= 1
    assert found.token > 0
    assert found.prompt_token > 0
    cut = answering(model, prompts, [Settings(20)], most=0.0)
    assert all(len(answer) == 1 for _, answer in cut.texts), "no time beyond the first tokens"


def test_a_trial_of_training_makes_steps(base_directory: Path, tmp_path: Path) -> None:
    facts = replace(SMALL, hidden_size=32, num_layers=2, vocab_size=257, context=256, parameters=10**4)
    values = {"base.name": str(base_directory), "base.dtype": "float32", **shape_values(facts, 100)}
    found = training(full_recipe(values, tmp_path), [([1, 2, 3], [*range(4, 60)])] * 40)
    assert found.row_token > 0
    assert found.position > 0


SIZES = {"vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": 0}
ODD = {
    "opt": (OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=256), torch.float32),
    "windows": (MistralConfig(**SIZES, intermediate_size=64, sliding_window=16, max_position_embeddings=256,
                              num_key_value_heads=2, bos_token_id=None), torch.float16),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_bases_without_a_template_are_measured_and_answer(
    name: str, base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "WRITE_SECONDS", 0.1)
    config, dtype = ODD[name]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(tmp_path / "base")
    plain = copy.deepcopy(base.tokenizer)
    plain.chat_template = None
    plain.save_pretrained(tmp_path / "base")
    asks = Asked(str(tmp_path / "base"), 1.0, "", "")
    found = measure.measure(asks, [], tmp_path, 1, time.monotonic())
    assert found.kind == asked.TEXT
    plan = make_plan(asks, found, 60.0, 1e12)
    assert plan.recipe["base.dtype"] == "float32", "no half precision on a CPU where memory suffices"
    plan, told = replace(plan, conversations=12, heldout=8, written=30, answer_tokens=8), list[float]()
    model = measure.load(asks.base, plan.dtype)
    asked.write_prompts(plan, model, tmp_path, lambda *_: None)
    sides = asked.division(plan, model, tmp_path, [])
    assert not answered(plan, tmp_path)
    answer(plan, model, tmp_path, *sides, lambda done, _: told.append(done))
    assert answered(plan, tmp_path)
    assert told == sorted(told)
    assert told[-1] == 1
    written = [len((tmp_path / name).read_text().splitlines()) for name in (f"{TRAIN}/greedy.jsonl", HELDOUT)]
    assert written == [6, 8]


def test_the_recipe_is_written_once(tmp_path: Path) -> None:
    plan = make_plan(ASKED, measured(), 60.0, 1e12)
    path = write_recipe(plan, tmp_path)
    recipe = read_recipe(path)
    assert (recipe.run, recipe.heads.num_heads, recipe.optim.epochs) == (str(tmp_path), 4, plan.recipe["optim.epochs"])
    assert recipe == full_recipe(plan.recipe, tmp_path)
    path.write_text("mine")
    assert write_recipe(plan, tmp_path).read_text() == "mine"


def test_the_last_whole_line_tells_how_far_training_is(tmp_path: Path) -> None:
    path, run = tmp_path / "metrics.jsonl", RunDirectory(tmp_path)
    assert run.last_record() == {}
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert run.last_record() == {"step": 2}


def test_a_file_gets_lines_and_no_bars() -> None:
    console = Console(file=StringIO(), width=100)
    with Screen(console).stage("answers", 75) as tell:
        tell(0.5, "half")
    assert console.file.getvalue().split() == ["answers", "done", "0:00"]  # type: ignore[attr-defined]
    assert [clock(seconds) for seconds in (5, 75, 3725)] == ["0:05", "1:15", "1:02:05"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--base", "no/such/base", "--hours", "0.1"], "no/such/base"),
        (["--prompts", "missing.jsonl"], "sample file (missing.jsonl) does not exist"),
        (["--prompts", "few.jsonl"], "hold 3 different ones"),
        (["--answers", "missing"], "sample file (missing) does not exist"),
        (["--answers", "few.jsonl", "--heads", "none/of/these"], "none/of/these"),
        (["--out", "few.jsonl"], "--out (few.jsonl) is a file; give a directory"),
        (["--out", "other"], "holds a run that this command did not begin"),
    ],
)
def test_bad_input_is_one_sentence_before_any_work(
    words: list[str], message: str, base_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(measure, "training", lambda *_: pytest.fail("it works"))
    if "--base" not in words:
        monkeypatch.setattr(measure, "load", lambda *_: pytest.fail("it works"))
    prompt_file(tmp_path / "few.jsonl", 3)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/recipe.yaml").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main([*([] if "--base" in words else ["--base", str(base_directory)]), *words]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("hours", ["0", "-1", "nan", "two", "1e9"])
def test_hours_are_a_positive_number(hours: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as wrong:
        main(["--base", "embedded", f"--hours={hours}"])
    assert wrong.value.code == 2
    assert f"value ({hours}) must be a number of hours above 0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_was_killed_ends_like_one_that_was_not_and_its_recipe_trains(
    base_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "WRITE_SECONDS", 0.1)
    prompts, whole, killed = prompt_file(tmp_path / "prompts.jsonl", 48), tmp_path / "whole", tmp_path / "killed"
    words = ["--base", str(base_directory), "--prompts", str(prompts), "--hours", "1", "--out"]
    assert main([*words, str(whole)]) == 0
    said = capsys.readouterr().out
    assert "over plain" in said
    assert f"medusa chat --heads {whole / 'heads'}" in said
    assert (whole / "heads/README.md").is_file()

    killed.mkdir()
    shutil.copy(whole / FILE, killed / FILE)  # what was measured, and so decided
    plan = json.loads((killed / FILE).read_text())
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen([sys.executable, "-m", "medusa", "heads", *words, killed], cwd=ROOT, env=environment)
    part = killed / "data/train/greedy.jsonl.part"
    until(lambda: part.exists() and part.read_text().count("\n") > 3)
    job.kill()
    job.wait()
    assert part.exists()

    def stop() -> None:
        until(lambda: len(metrics(killed)) > 3)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    assert main([*words, str(killed)]) == 143
    assert not (killed / "heads").exists()
    assert main([*words, str(killed)]) == 0
    assert f"{killed}: going on with the run" in "".join(capsys.readouterr().out.splitlines())
    for name in ("heldout.jsonl", "train/greedy.jsonl", "train/drawn.jsonl"):
        assert (killed / "data" / name).read_bytes() == (whole / "data" / name).read_bytes()
    assert_same_run(killed, whole, tolerance=1e-5)

    recipe = yaml.safe_load((whole / "recipe.yaml").read_text())
    assert recipe["optim"]["epochs"] == plan["recipe"]["optim.epochs"]
    assert run(whole / "recipe.yaml", tmp_path / "again") == 0
    assert_same_run(tmp_path / "again", whole, tolerance=1e-5)
