"""What import-linter cannot say: no circle of files, the ground floor's packages, and that declared names exist."""

import ast
import sys
import tomllib
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

GROUND_FLOOR = {"medusa", "torch", "transformers", "safetensors", "huggingface_hub", "numpy", "tqdm"}
GROUND_FLOOR |= {"jinja2"}  # transformers cannot render a chat template without it
PACKAGES = ("medusa", "data", "train", "serve", "benchmarks")
OPTIONAL = {"flash_attn", "peft", "triton"}


def imported_packages(source: Path):
    """Top-level names of everything that a file imports, the standard library aside."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        yield from {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def test_ground_floor_needs_torch_and_transformers_only():
    foreign = {
        f"{source.relative_to(ROOT)} imports {package}"
        for source in (ROOT / "medusa").rglob("*.py")
        for package in imported_packages(source)
        if package not in GROUND_FLOOR | OPTIONAL
    }
    assert not foreign


@pytest.mark.parametrize(("script", "target"), PROJECT["scripts"].items())
def test_console_script_has_its_function(script, target):
    module, _, function = target.partition(":")
    tree = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, script


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_typed_and_regular(package):
    assert (ROOT / package / "py.typed").exists()
    assert (ROOT / package / "__init__.py").exists()


def imported_files(source: Path, files: dict[str, Path]):
    """Modules of ours that a file imports anywhere: inside functions and for type checkers too."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in files else str(node.module) for name in whole]
        else:
            continue
        yield from (name for name in names if name in files and files[name] != source)


def test_no_circle_of_files():
    sources = [source for package in PACKAGES for source in (ROOT / package).rglob("*.py")]
    files = {
        ".".join(source.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): source for source in sources
    }
    try:
        TopologicalSorter({name: set(imported_files(source, files)) for name, source in files.items()}).prepare()
    except CycleError as error:
        pytest.fail("files import each other: " + " > ".join(error.args[1]))


@pytest.mark.parametrize("package", ["acceptance", "attention"])
def test_acceptance_and_attention_know_no_drafter(package):
    for source in (ROOT / "medusa" / package).glob("*.py"):
        assert "medusa.drafters" not in source.read_text(), source
