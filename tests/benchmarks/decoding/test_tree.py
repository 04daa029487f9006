"""medusa-bench tree: its figures, its files, its picture; and what it is made to show."""

import json
from itertools import pairwise

import pytest
import torch

from benchmarks.decoding.__main__ import main
from benchmarks.decoding.tree import measure_trees, tokens_per_step
from benchmarks.decoding.tree_picture import layout
from benchmarks.replay.trace import load_trace
from data import EMBEDDED, resolve_base_name
from data.prompts import embedded_prompts
from medusa import Calibration, HeadsConfig, MedusaModel, Tree, build_heads, load_tree
from medusa.budget.calibrate import calibrate
from medusa.budget.tree_search import grow_tree
from medusa.io.tree_file import save_tree

QUESTIONS = ["abab", "hello", "xyz", "what", "1 2 3", "why not"]


@pytest.fixture
def heads_directory(model, tmp_path):
    return str(model.save_pretrained(tmp_path / "heads"))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    return str(path)


@pytest.fixture
def words(heads_directory, prompts, base_directory):
    words = ["--heads", heads_directory, "--base", str(base_directory), "--dtype", "float32", "--prompts", prompts]
    return [*words, "--max-new-tokens", "12"]


def test_trees_are_searched_measured_drawn_and_written(model, words, tmp_path, capsys):
    files = ["--json", f"{tmp_path}/new/x.json", "--picture", f"{tmp_path}/x.png", "--out", f"{tmp_path}/tree.json"]
    assert main(["tree", *words, "--count", "2", "--calibrate", "4", "--nodes", "1,4,9", "--keep", "4", *files]) == 0
    report = json.loads((tmp_path / "new" / "x.json").read_text())
    chats = [model.chat_prompt([{"role": "user", "content": text}]) for text in QUESTIONS]
    calibration = calibrate(model, chats[2:], max_new_tokens=12)
    for row, nodes in zip(report["rows"], (1, 4, 9), strict=True):
        grown = grow_tree(calibration.accuracies, nodes)
        outputs = model.generate(chats[:2], max_new_tokens=12, tree=grown.tree)
        static = sum(len(output.tokens) for output in outputs) / sum(output.steps for output in outputs)
        assert (row["nodes"], row["static_nodes"]) == (nodes, grown.tree.nodes)
        assert row["predicted"] == pytest.approx(grown.tokens_per_step, abs=1e-4)
        assert row["static"] == pytest.approx(static, abs=1e-4)
        assert row["dynamic_over_static"] == pytest.approx(row["dynamic"] / row["static"], abs=1e-3)
    assert report["rows"][0]["static"] == report["rows"][0]["dynamic"] == 1.0
    kept = grow_tree(calibration.accuracies, 4).tree
    assert load_tree(tmp_path / "tree.json") == kept == Tree(tuple(map(tuple, report["tree"]["paths"])))
    details = json.loads((tmp_path / "tree.json").read_text())
    assert details["calibration"]["samples"] == list(calibration.samples)
    assert details["calibration"]["provenance"]["data"]["answers"] == 4
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "dynamic / static" in capsys.readouterr().out


def test_a_calibration_beside_the_heads_is_taken(model, words, heads_directory, tmp_path):
    Calibration((100,) * 3, ((60, 20), (0, 0), (0, 0)), {"heads": "3 of mine"}).save(
        f"{heads_directory}/calibration.json"
    )
    files = ["--json", str(tmp_path / "x.json")]
    assert main(["tree", *words, "--count", "6", "--nodes", "8", *files]) == 0
    report = json.loads((tmp_path / "x.json").read_text())
    assert (report["heads"], report["prompts"]) == ("3 of mine", 6)
    assert (report["rows"][0]["static_nodes"], report["rows"][0]["predicted"]) == (3, 1.8)


def test_prompts_are_not_calibrated_on_and_measured_too(words, prompts, capsys):
    assert main(["tree", *words, "--count", "6"]) == 1
    assert f"prompts ({prompts}) are all measured and none is left to calibrate on" in capsys.readouterr().err


def test_traces_are_recorded_with_static_trees(words, tmp_path, capsys):
    save_tree(Tree.full((3, 2)), tmp_path / "tree.json")
    tree, out = ["--tree", str(tmp_path / "tree.json")], ["--count", "2", "--out", str(tmp_path / "trace.json")]
    assert main(["trace", *words, *tree, *out]) == 0
    provenance = load_trace(tmp_path / "trace.json").provenance
    assert (provenance["drafter"], provenance["nodes"]) == ("static tree", 10)
    assert main(["trace", *words, *tree, *out, "--nodes", "8"]) == 1
    assert "tree needs heads and takes the place of nodes" in capsys.readouterr().err


def test_nodes_of_a_row_stand_apart_and_parents_above_their_children():
    paths = list(grow_tree([[0.5, 0.2, 0.1, 0.05]] * 4, 40).tree.paths)
    places = layout(paths)
    for depth in range(5):
        row = sorted(places[path] for path in places if len(path) == depth)
        assert all(right - left >= 1 for left, right in pairwise(row))
    for path in places:
        below = [places[child] for child in paths if child[:-1] == path]
        assert not below or places[path] == (min(below) + max(below)) / 2


@pytest.fixture(scope="module")
def learned():
    """The embedded base with heads that learned for some seconds from what it says, and other answers of it."""
    torch.manual_seed(0)
    plain = MedusaModel.from_pretrained(None, base=resolve_base_name(EMBEDDED), dtype=torch.float32, device="cpu")
    base, num_heads = plain.base, 3
    prompts = embedded_prompts(plain, "train", 24)
    hidden, path, labels = [], [], []
    for prompt, output in zip(prompts, plain.generate(prompts, max_new_tokens=64, nodes=1), strict=True):
        text = torch.tensor([*prompt, *output.tokens])
        ahead = text.unfold(0, num_heads, 1)
        count = len(ahead) - 2
        with torch.no_grad():
            hidden.append(base.hidden_states(text[None])[0, :count])
        path.append(ahead[1 : count + 1])
        labels.append(ahead[2 : count + 2])
    hidden_MD, path_MK, labels_MK = torch.cat(hidden), torch.cat(path), torch.cat(labels)
    config = HeadsConfig(base.hidden_size, base.vocab_size, num_heads, architecture="recurrent", base=base.name)
    heads = build_heads(config)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=1e-3)
    for rows in torch.randint(len(hidden_MD), (60, 96)):
        features_KMD = heads(hidden_MD[rows], path_MK[rows], base)
        logits = torch.nn.functional.linear(features_KMD, base.lm_head_weight)  # packed layers have no gradient
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels_MK[rows].T.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return MedusaModel(base, heads.requires_grad_(False)), embedded_prompts(plain, "heldout", 24)


@pytest.mark.slow
def test_trees_of_trained_heads_give_what_is_predicted(learned):
    """Dynamic trees within 3 % of static ones: heads that learned for seconds are too sure of themselves for more."""
    model, prompts = learned
    calibration = calibrate(model, prompts[12:], max_new_tokens=48)
    assert calibration.accuracies[0][0] > 0.15, "these heads learned something"
    rows = measure_trees(model, calibration, prompts[:12], 40, sizes=(4, 16))
    for row in rows:
        assert row["static_nodes"] == row["dynamic_nodes"] == row["nodes"]
        assert row["dynamic"] > 0.97 * row["static"] > 1.1
        assert row["predicted"] == pytest.approx(row["static"], rel=0.2)
    # The search pays: a tree of as many nodes that nobody searched is worse.
    star = Tree(tuple((rank,) for rank in range(15)))
    assert rows[1]["static"] > tokens_per_step(model, prompts[:12], 40, tree=star)
