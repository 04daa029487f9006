"""Steps counted along a known text are the steps of real decoding."""

from pathlib import Path

import pytest
import torch

from benchmarks.study.evaluate import evaluate, evaluated, main
from benchmarks.study.texts import Questions, Texts, make_texts, read_texts
from benchmarks.study.transcript import Transcript, chain_acceptance, count_steps
from medusa import BaseModel, HeadsConfig, MedusaModel, Tree, build_heads
from medusa.drafters import HeadsDrafter, PlainDrafter
from medusa.formats import save_heads

PROMPTS = ((5, 9, 7, 30, 2), (40,), (8, 8, 8, 3, 17, 200, 64, 1), (11, 12))
HEADS = 3


@pytest.fixture(scope="module")
def exact(base_directory: Path) -> BaseModel:
    return BaseModel.load(base_directory, dtype=torch.float64, device="cpu")


def _model(base: BaseModel, architecture: str = "recurrent") -> MedusaModel:
    """Heads that are right now and then: what they guess is what the base said last, a little disturbed."""
    torch.manual_seed(1)
    heads = build_heads(HeadsConfig(base.hidden_size, base.vocab_size, HEADS, architecture=architecture))
    heads = heads.to(base.dtype)
    for parameter in heads.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return MedusaModel(base, heads.requires_grad_(False))


def _questions(base: BaseModel, **changes: object) -> Questions:
    asked = {
        "base": base.name, "nodes": (4, 16), "static_nodes": 9, "temperatures": (0.0, 1.0), "max_new_tokens": 40,
        "prompts": PROMPTS,
    }  # fmt: skip
    return Questions(**asked | changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def texts(exact: BaseModel) -> Texts:
    return make_texts(MedusaModel(exact), _questions(exact))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("architecture", ["medusa", "recurrent"])
def test_steps_are_those_of_decoding(exact: BaseModel, texts: Texts, architecture: str, temperature: float) -> None:
    model = _model(exact, architecture)
    transcript = Transcript.of(exact, PROMPTS, texts.answers[str(temperature)])
    drafters = {
        nodes: HeadsDrafter(model.heads, exact, nodes, host_decides=False) for nodes in (4, 16)
    } | {"static": HeadsDrafter(model.heads, exact, 9, Tree.full((4, 1)))}  # fmt: skip
    for name, drafter in drafters.items():
        decoded = model.generate(
            [list(prompt) for prompt in PROMPTS], max_new_tokens=40, temperature=temperature,
            seed=list(range(len(PROMPTS))), drafter=drafter,
        )  # fmt: skip
        assert [output.tokens for output in decoded] == texts.answers[str(temperature)]
        steps = count_steps(drafter, transcript).tolist()
        assert steps == [output.steps for output in decoded], name
        assert sum(steps) < sum(len(output.tokens) for output in decoded)


def test_plain_decoding_takes_a_step_for_every_token(exact: BaseModel, texts: Texts) -> None:
    answers = texts.answers["0.0"]
    transcript = Transcript.of(exact, PROMPTS, answers)
    assert count_steps(PlainDrafter(), transcript).tolist() == list(map(len, answers))


def test_acceptance_by_depth_is_counted_where_all_heads_before_were_right(exact: BaseModel, texts: Texts) -> None:
    model, answers = _model(exact), texts.answers["0.0"]
    chain = HeadsDrafter(model.heads, exact, HEADS + 1, Tree.chain(HEADS))
    transcript = Transcript.of(exact, PROMPTS, answers)
    tries, hits = chain_acceptance(chain, transcript, HEADS)
    expected = torch.zeros(2, len(PROMPTS), HEADS, dtype=torch.int64)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        text = [*prompt, *answer]
        for root in range(len(prompt) - 1, len(text) - 1):
            place = torch.tensor([row]), torch.tensor([root])
            drafted = chain.propose(transcript.state(*place)).tokens[0, 1:].tolist()
            for depth, (token, said) in enumerate(zip(drafted, text[root + 1 :], strict=False)):
                expected[0, row, depth] += 1
                if token != said:
                    break
                expected[1, row, depth] += 1
    assert torch.equal(torch.stack([tries, hits]), expected)
    assert hits.sum() > 0


def test_evaluation_of_saved_heads(exact: BaseModel, texts: Texts, tmp_path: Path) -> None:
    model = _model(exact)
    save_heads(model.heads, tmp_path / "heads")
    figures = evaluate(texts, tmp_path / "heads", static=True)
    assert figures["parameters"] == sum(parameter.numel() for parameter in model.heads.parameters())
    assert len(figures["tree"]) < texts.questions.static_nodes
    for temperature in ("0.0", "1.0"):
        found = figures["temperatures"][temperature]
        assert found["tokens"] == list(map(len, texts.answers[temperature]))
        assert list(found["steps"]) == ["dynamic 4", "dynamic 16", "static 9"]
        assert all(s <= t for steps in found["steps"].values() for s, t in zip(steps, found["tokens"], strict=True))


def test_texts_are_read_as_they_were_written(texts: Texts, tmp_path: Path) -> None:
    path = tmp_path / "texts.json"
    texts.write(path)
    assert read_texts(path) == texts
    assert read_texts(path).digest == texts.digest
    path.write_text('{"questions": {}}')
    with pytest.raises(ValueError, match="damaged"):
        read_texts(path)


def test_figures_of_other_texts_or_without_the_static_tree_are_made_again(
    exact: BaseModel, texts: Texts, tmp_path: Path
) -> None:
    save_heads(_model(exact).heads, tmp_path / "heads")
    texts.write(tmp_path / "texts.json")
    assert evaluated(tmp_path, texts, static=False) is None
    assert main([str(tmp_path / "texts.json"), str(tmp_path)]) == 0
    assert evaluated(tmp_path, texts, static=False)["texts"] == texts.digest
    assert evaluated(tmp_path, texts, static=True) is None
    other = Texts(texts.questions, {"0.0": texts.answers["1.0"]})
    assert evaluated(tmp_path, other, static=False) is None


def test_a_run_without_heads_is_one_message(texts: Texts, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    texts.write(tmp_path / "texts.json")
    assert main([str(tmp_path / "texts.json"), str(tmp_path)]) == 1
    assert len(caplog.records) == 1
    assert str(tmp_path / "heads") in caplog.text
