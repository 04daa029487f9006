"""What import-linter cannot say: no circle of files, the ground floor's packages, and that declared names exist."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from medusa.__main__ import COMMANDS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

GROUND_FLOOR = {"medusa", "torch", "transformers", "safetensors", "huggingface_hub", "numpy", "tqdm"}
GROUND_FLOOR |= {
    "jinja2",
    "tokenizers",
}  # transformers cannot render a chat template without the former, and brings the latter
LINKED = ("data", "train", "serve", "benchmarks")
"""Folders of the top level that are packages of `medusa` by a link."""
OPTIONAL = {"flash_attn", "gguf", "peft", "triton"}


@cache
def imported(source: Path) -> list[str]:
    """What a file imports anywhere, inside functions and for type checkers too: modules, with the names out of them."""
    found = []
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_ground_floor_needs_torch_and_transformers_only():
    foreign = {
        f"{source.relative_to(ROOT)} imports {package}"
        for source in (ROOT / "medusa").rglob("*.py")
        if source.relative_to(ROOT / "medusa").parts[0] not in LINKED
        for package in {name.partition(".")[0] for name in imported(source)} - sys.stdlib_module_names
        if package not in GROUND_FLOOR | OPTIONAL
    }
    assert not foreign


@pytest.mark.parametrize(("script", "target"), PROJECT["scripts"].items())
def test_console_script_has_its_function(script, target):
    module, _, function = target.partition(":")
    assert function in functions(module), script


@pytest.mark.parametrize("name", COMMANDS)
def test_command_has_its_function(name):
    assert "main" in functions(f"medusa.{COMMANDS[name].module}")


def functions(module):
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("package", LINKED)
def test_folders_of_the_top_level_are_packages_of_medusa_only(package):
    link = ROOT / "medusa" / package
    assert (link / "__init__.py").exists()
    assert link.resolve() == (ROOT / package).resolve()


def test_no_circle_of_files():
    files = {}
    for package in ("medusa", *(f"medusa/{name}" for name in LINKED)):
        for source in (ROOT / package).rglob("*.py"):
            files[".".join(source.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = source
    assert "medusa.train.trainer" in files
    graph = {}
    for file, source in files.items():
        modules = {name if name in files else name.rpartition(".")[0] for name in imported(source)}
        graph[file] = (modules & files.keys()) - {file}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("files import each other: " + " > ".join(error.args[1]))


@pytest.mark.parametrize("package", ["acceptance", "attention"])
def test_acceptance_and_attention_know_no_drafter(package):
    for source in (ROOT / "medusa" / package).glob("*.py"):
        assert "medusa.drafters" not in source.read_text(), source


def test_what_starts_at_once_does_not_import_torch():
    modules = ("medusa.train.recipe_file", "medusa.train.__main__", "medusa.benchmarks.gpu.__main__")
    script = "import sys; " + "; ".join(f"import {module}; assert 'torch' not in sys.modules" for module in modules)
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
