"""A wheel, built as a release is and installed outside of the clone: all commands run, without a compiler."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import httpx
import huggingface_hub.constants
import pytest

from medusa.cpu import build, flavours

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None or not [*flavours.able()], reason="no g++, or no flavour for it"),
]

ROOT = Path(__file__).parents[1]
LINKED = ("data", "train", "serve", "benchmarks")
"""Folders of the top level that are packages of `medusa` by a link."""
GENERATE = """
import sys
from medusa import MedusaModel
from medusa.__main__ import main
from medusa.cpu import native
model = MedusaModel.from_pretrained("smollm2", device="cpu")
out = model.generate(model.chat_prompt([{"role": "user", "content": "Say hello."}]), max_new_tokens=8)
print(native.kernels()._name, model.heads.config.architecture, out.text, sep="|")
few = ["--count", "1", "--max-new-tokens", "4", "--rounds", "1", "--methods", "heads"]
heads = ["--heads", sys.argv[1], "--format", "custom-generate"]
sys.exit(main(["bench", "run", *few]) or main(["export", *heads, "--out", "exported"]))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution and the wheel, with kernels for this processor only."""
    pytest.importorskip("auditwheel")
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, ROOT / "tools" / "wheel.py", "--here", "--out", out], check=True)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


class Installed:
    """An environment that has this wheel, sees the packages that it needs, and finds no compiler and no Hub."""

    def __init__(self, wheel: Path, directory: Path, base: Path):
        environment = directory / "environment"
        venv.create(environment, symlinks=True)
        self.bin, self.home = environment / "bin", directory / "home"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.bin / "python"]
        subprocess.run([*pip, "install", "-q", "--no-index", "--no-deps", wheel], check=True)
        (self.packages,) = environment.glob("lib/python*/site-packages")
        # Of a path file's lines only paths are followed, not the path files there: the clone stays out.
        (self.packages / "others.pth").write_text(sysconfig.get_path("purelib"))
        bases = self.home / "cache" / "medusa" / "bases"
        bases.mkdir(parents=True)
        (bases / base.name).symlink_to(base)

    def start(self, *words: str | Path) -> subprocess.Popen[str]:
        environment = {
            "PATH": str(self.bin), "HOME": str(self.home), "XDG_CACHE_HOME": str(self.home / "cache"),
            "HF_HOME": huggingface_hub.constants.HF_HOME, "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        }  # fmt: skip
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        command = [self.bin / words[0], *words[1:]]
        return subprocess.Popen(command, cwd=self.home, env=environment, text=True, **pipes)

    def run(self, *words: str | Path, typed: str = "") -> str:
        """What a command writes."""
        process = self.start(*words)
        out, errors = process.communicate(typed, timeout=600)
        assert process.returncode == 0, errors
        return out


@pytest.fixture(scope="module")
def installed(built, smollm2_directory, tmp_path_factory):
    return Installed(built[1], tmp_path_factory.mktemp("elsewhere"), Path(smollm2_directory))


def files(package):
    """What the wheel should hold of one of the clone's packages."""
    place = Path("medusa") if package == "medusa" else Path("medusa", package)
    found = (path.relative_to(ROOT / package) for path in (ROOT / package).rglob("*") if path.is_file())
    return {str(place / path) for path in found if not {"embedded", "__pycache__"} & {*path.parts}}


def test_wheel_and_source_distribution_hold_all_of_medusa_and_nothing_else(built):
    sdist, wheel = built
    assert re.search(r"-py3-none-manylinux_\d+_\d+_\w+\.whl$", wheel.name)
    expected = set().union(*map(files, ("medusa", *LINKED))) - {"medusa/benchmarks/peers/setup.sh"}  # it is for clones
    with tarfile.open(sdist) as archive:
        assert expected <= {name.partition("/")[2] for name in archive.getnames()}
    kernels = next(iter(flavours.able())).library(build.SOURCE.relative_to(ROOT))
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith("/")}
    assert held == expected | {str(kernels)}


def test_what_runs_in_one_process_finds_its_files_and_the_kernels_of_the_wheel(installed):
    out = installed.run("python", "-c", GENERATE, installed.packages / "medusa" / "data" / "pretrained" / "smollm2")
    kernels, architecture, text = out.split("|", 2)
    assert Path(kernels).parent == installed.packages / "medusa" / "cpu" / "kernels"
    assert architecture == "recurrent"
    assert "SmolLM2-135M-Instruct" in text, "the base of a benchmark that is told none"
    assert not list((installed.home / "cache" / "medusa").glob("kernels*"))
    assert (installed.home / "exported" / "custom_generate" / "generate.py").is_file()


def test_chat_through_a_pipe(installed):
    assert installed.run("medusa", "chat", "--max-new-tokens", "4", typed="Say hello.\n").strip()


def test_serve(installed):
    process = installed.start("medusa", "serve", "--base", "smollm2", "--port", "0")
    try:
        while not (found := re.search(r"ready at (http://\S+)", line := process.stderr.readline())):
            assert line, "it ends before it is ready"
        body = {"model": "smollm2", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
        answer = httpx.post(f"{found[1]}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["usage"]["completion_tokens"] > 0
        assert "<title>" in httpx.get(f"{found[1]}/").text
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_other_commands(installed):
    assert "usage: medusa COMMAND" in installed.run("medusa", "--help")
    assert "not needed: the kernels came compiled" in installed.run("medusa", "doctor")
