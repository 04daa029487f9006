"""What import-linter cannot say: which packages the ground floor may import; and that declared names exist."""

import ast
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

GROUND_FLOOR = {"medusa", "torch", "transformers", "safetensors", "huggingface_hub", "numpy", "tqdm"}
GROUND_FLOOR |= {"jinja2"}  # transformers cannot render a chat template without it
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


@pytest.mark.parametrize("package", ["medusa", "data", "train", "serve"])
def test_package_is_typed_and_regular(package):
    assert (ROOT / package / "py.typed").exists()
    assert (ROOT / package / "__init__.py").exists()
