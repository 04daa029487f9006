"""Dockerfile and compose.yaml agree with each other, with the command line, and with the clone."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import yaml

from medusa.__main__ import COMMANDS
from medusa.serve.server import build_parser

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def dockerfile() -> list[tuple[str, str]]:
    """Instructions and what stands behind them, a pair per line."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    pairs = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(instruction, rest.strip()) for instruction, rest in pairs]


@pytest.fixture(scope="module")
def service() -> dict:
    """The service of compose.yaml, its variables at their defaults."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / "compose.yaml").read_text())
    assert "$" not in text
    return yaml.safe_load(text)["services"]["medusa"]


def the(dockerfile, instruction):
    (found,) = (rest for name, rest in dockerfile if name == instruction)
    return found


def test_what_is_copied_exists_and_is_sent_to_the_builder(dockerfile):
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source for name, rest in dockerfile if name == "COPY" for source in shlex.split(rest)[:-1]}
    assert {Path(source).parts[0] for source in copied} == sent
    assert not [source for source in copied if not (ROOT / source).exists()]
    assert {"pyproject.toml", "constraints.txt"} <= copied


def test_what_is_installed_is_declared(dockerfile):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (install, again) = (rest for name, rest in dockerfile if name == "RUN" and "pip install" in rest)
    extras = re.search(r"\.\[([\w,]+)\]", install).group(1).split(",")
    assert "serve" in extras
    assert set(extras) <= set(project["optional-dependencies"])
    assert "-c constraints.txt" in install
    assert "--no-deps" in again
    assert {project["readme"], *project["license-files"]} <= {word for _, rest in dockerfile for word in rest.split()}


def test_the_entrypoint_is_a_command_with_flags_that_it_knows(dockerfile):
    program, command, *flags = json.loads(the(dockerfile, "ENTRYPOINT"))
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts[program] == "medusa.__main__:main"
    assert COMMANDS[command].module == "serve.server"
    args = build_parser().parse_args(flags + json.loads(the(dockerfile, "CMD")))
    assert (args.host, args.base) == ("0.0.0.0", "smollm2")


def test_one_port(dockerfile, service):
    port = build_parser().parse_args([]).port
    assert the(dockerfile, "EXPOSE") == str(port)
    assert f"http://127.0.0.1:{port}/health" in the(dockerfile, "HEALTHCHECK")
    assert service["ports"] == [f"127.0.0.1:{port}:{port}"]
    assert "healthcheck" not in service


def test_nobody_is_root(dockerfile):
    names = [name for name, _ in dockerfile]
    assert the(dockerfile, "USER") not in ("root", "0")
    assert "RUN" not in names[names.index("USER") :]


def test_streams_end_before_the_container_does(dockerfile, service):
    flags = json.loads(the(dockerfile, "ENTRYPOINT"))[2:] + service["command"]
    assert int(service["stop_grace_period"].removesuffix("s")) > build_parser().parse_args(flags).drain


def test_a_gpu_the_keys_and_the_caches_reach_the_container(dockerfile, service):
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert {"MEDUSA_API_KEYS", "MEDUSA_ADMIN_KEY"} <= set(service["environment"])
    assert f"cache:{the(dockerfile, 'VOLUME')}" in service["volumes"]
