"""What the documents name exists: commands, modules, files and links."""

import ast
import functools
import re
import shlex
import subprocess
import tomllib
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import medusa

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
PACKAGES = ("medusa", "data", "train", "serve", "benchmarks")

MADE_BY_RUNNING = ("runs/", ".venv/", ".cache/", "wandb/")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TREE_LINE = re.compile(r"^([\s│├└─]*)([\w.*{}/-]+(?:(?:, | \+ )[\w.*{}-]+\.\w+)*)(?:\s|$)")
PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")


def blocks(text, *languages):
    """Contents of the fenced blocks in one of the languages ("" where none is given)."""
    return [body for language, body in FENCE.findall(text) if language in languages]


def commands(text):
    """Command lines of the shell blocks, comments and prompts removed, continued lines joined."""
    for block in blocks(text, "bash", "sh", "shell", "console", ""):
        for line in block.replace("\\\n", " ").splitlines():
            try:
                words = shlex.split(line.removeprefix("$ "), comments=True)
            except ValueError:
                continue
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words and re.fullmatch(r"\./launch\.sh|\.ci/run|(?:\S+/)?python3?|medusa-\w+", words[0]):
                yield words


@functools.cache
def launch_commands():
    """The commands that `./launch.sh help` lists."""
    text = subprocess.run([ROOT / "launch.sh", "help"], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"^  (?:\(none\), )?([a-z-]+)  ", text, re.MULTILINE))


def tree_files(block):
    """Paths of a drawn file tree: directories end in a slash, what is inside is indented."""
    folders: list[tuple[int, Path]] = []
    first, *rest = block.splitlines()
    is_root = first.endswith("/") and not exists(first)
    for line in rest if is_root else [first, *rest]:
        if not (match := TREE_LINE.match(line)):
            continue
        indent = len(match[1])
        while folders and folders[-1][0] >= indent:
            folders.pop()
        parent = folders[-1][1] if folders else Path()
        names = re.split(r", | \+ ", match[2])
        yield from (parent / name for name in names)
        if match[2].endswith("/"):
            folders.append((indent, parent / match[2]))


def named_paths(text):
    """Paths of the repository in inline code, and relative links."""
    prose = FENCE.sub("", text)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
        if "://" not in link and not link.startswith("mailto:"):
            yield link
    top_level = {path.name for path in ROOT.iterdir()}
    for code in re.findall(r"`([^`\n]+)`", prose):
        name = code.partition("::")[0].removeprefix("./")
        if not PATH.fullmatch(name) or name.startswith(MADE_BY_RUNNING):
            continue
        if "/" in name and name.partition("/")[0] in top_level:
            yield name
        elif "/" not in name and re.search(r"\.(md|py|sh|toml)$", name):
            yield f"**/{name}"


def anchors(text):
    """Anchors of a page's headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@functools.cache
def file_names():
    """Names of all files of the repository; hidden folders hold those of others."""
    return {
        path.name
        for one in ROOT.iterdir()
        if not (one.is_dir() and one.name.startswith("."))
        for path in [one, *one.rglob("*")]
    }


def exists(pattern, base=ROOT):
    pattern = str(pattern).rstrip("/")
    if pattern.startswith("**/"):
        return any(fnmatchcase(name, pattern.removeprefix("**/")) for name in file_names())
    return any(base.glob(pattern))


@pytest.fixture(params=DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def document(request):
    return request.param


def test_readme_shows_the_two_commands():
    shown = [words[:2] for words in commands((ROOT / "README.md").read_text())]
    assert ["./launch.sh"] in shown
    assert ["./launch.sh", "test"] in shown


def test_commands_exist(document):
    known = launch_commands()
    for words in commands(document.read_text()):
        if words[0] == "./launch.sh":
            assert len(words) == 1 or words[1] in known, words
        elif words[0].startswith("medusa-"):
            assert words[0] in SCRIPTS, words
        elif "-m" in words:
            assert find_spec(words[words.index("-m") + 1]), words
        for word in words[1:]:
            if re.search(r"\.(ya?ml|py|toml)$", word) and not word.startswith(MADE_BY_RUNNING) and "/" in word:
                assert exists(word), words


def test_python_snippets_import_what_exists(document):
    for snippet in blocks(document.read_text(), "python", "py"):
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] in PACKAGES:
                module = import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_file_tree_is_true(document):
    for block in blocks(document.read_text(), "", "text", "tree"):
        if not re.search(r"^[\s│├└─]*[\w.-]+/(\s|$)", block, re.MULTILINE):
            continue
        for path in tree_files(block):
            assert str(path).startswith(MADE_BY_RUNNING) or exists(path), path


def test_named_paths_exist(document):
    missing = [
        name for name in named_paths(document.read_text()) if not (exists(name) or exists(name, document.parent))
    ]
    assert not missing


def test_linked_headings_exist(document):
    for name, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([\w-]+)\)", document.read_text()):
        page = document.parent / name if name else document
        assert anchor in anchors(page.read_text()), f"{name}#{anchor}"


def test_the_api_page_has_all_public_names():
    shown = re.findall(r"^::: (medusa[\w.]*)\.(\w+)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    assert sorted(name for _, name in shown) == sorted(medusa.__all__)
    assert all(getattr(import_module(module), name) is getattr(medusa, name) for module, name in shown)
