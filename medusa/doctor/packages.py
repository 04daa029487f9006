"""Python, the packages that decoding needs, those of each extra, and whether the Hub can be reached."""

import importlib
import platform
import re
import sys
import time
import tomllib
from collections.abc import Iterator
from importlib import metadata

from medusa.base.names import default_base
from medusa.doctor.finding import Finding, install
from medusa.files import CLONE

NAME = "medusa-decoding"
LINE = re.compile(r"\s*([\w.-]+)\s*(?:\[[^]]*\])?([^;]*)(?:;.*extra == [\"']([\w-]+)[\"'])?")
"""A requirement: package, versions, and the extra that it is of."""
FAILURES = (ImportError, OSError, RuntimeError, ValueError, AttributeError)
"""What the import of a damaged package may raise."""
FOR_OTHERS = ("dev", "docs", "flash")
"""Extras that are no lack: for work on this package, and for GPUs."""
OLDEST = (3, 11)
"""Python."""


def python() -> Finding:
    """The interpreter."""
    version = platform.python_version()
    figures = {"version": version, "path": sys.executable, "system": platform.platform()}
    says = f"{version} on {platform.system()} {platform.machine()}, {sys.executable}"
    if sys.version_info < OLDEST:
        needed = ".".join(map(str, OLDEST))
        return Finding("python", "wrong", f"{says}: older than {needed}", f"python{needed} -m venv .venv", figures)
    return Finding("python", "ok", says, figures=figures)


def requirements() -> dict[str, dict[str, str]]:
    """Packages and the versions that fit ("" = any), by extra; those of the extra "" are always needed."""
    found: dict[str, dict[str, str]] = {}
    for line in _lines():
        if match := LINE.match(line):
            package, versions, extra = match.groups()
            found.setdefault(extra or "", {})[package] = versions.strip()
    return found


def _lines() -> list[str]:
    """Requirements as the installed package has them, or the clone that runs without being installed."""
    try:
        return metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        project = tomllib.loads((CLONE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        optional = project["optional-dependencies"].items()
        return [
            *project["dependencies"],
            *(f"{line}; extra == '{extra}'" for extra, lines in optional for line in lines),
        ]


def needed() -> Iterator[Finding]:
    """torch and transformers: that they can be imported, in a version that fits."""
    for package, versions in requirements().get("", {}).items():
        figures: dict[str, str] = {"needs": versions}
        again = install(f"'{package}{versions}'", options="--force-reinstall")
        try:
            version = figures["version"] = metadata.version(package)
            importlib.import_module(package)
        except metadata.PackageNotFoundError:
            remedy = "./launch.sh setup" if (CLONE / "launch.sh").is_file() else install(f"'{package}{versions}'")
            yield Finding(package, "wrong", "is not installed", remedy, figures)
        except FAILURES as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            yield Finding(package, "wrong", f"{version} cannot be imported: {reason}", again, figures)
        else:
            if fits(version, versions):
                yield Finding(package, "ok", version, figures=figures)
            else:
                yield Finding(package, "wrong", f"{version} does not fit ({versions})", again, figures)


def extras() -> Iterator[Finding]:
    """Which extras are installed; then those that are not, each with what it lacks."""
    lacking = {
        extra: [package for package, versions in packages.items() if not _installed(package, versions)]
        for extra, packages in requirements().items()
        if extra and extra not in FOR_OTHERS
    }
    if whole := [extra for extra, packages in lacking.items() if not packages]:
        yield Finding("extras", "ok", ", ".join(whole), figures={"installed": whole})
    for extra, packages in lacking.items():
        if packages:
            says = f"not installed: {', '.join(packages)}"
            yield Finding(f"[{extra}]", "missing", says, install(extra=extra), {"lacking": packages})


def _installed(package: str, versions: str) -> bool:
    try:
        return fits(metadata.version(package), versions)
    except metadata.PackageNotFoundError:
        return False


def fits(version: str, versions: str) -> bool:
    """Whether a version is one of "``>=2.11``", "``>=5.17,<6``" or "``==2.8.3``"; what follows "+" does not count."""

    def number(text: str) -> tuple[int, ...]:
        parts = [int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3]]
        return (*parts, *[0] * (3 - len(parts)))

    order = {">=": lambda a, b: a >= b, "==": lambda a, b: a == b, "<": lambda a, b: a < b}
    bounds = re.findall(r"(>=|==|<)\s*([\d.]+)", versions)
    return all(order[sign](number(version), number(bound)) for sign, bound in bounds)


def hub() -> Finding:
    """Whether the Hugging Face Hub answers within three seconds."""
    here = f"medusa chat --base {default_base()}"
    try:
        from huggingface_hub import constants, get_session

        from medusa.base.on_hub import TIMEOUT, one_sentence
    except FAILURES as error:
        return Finding("hub", "missing", f"cannot be asked: {error}", install("huggingface_hub"))
    begin = time.perf_counter()
    try:
        with one_sentence("offline"):
            get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except OSError as error:
        offline = constants.HF_HUB_OFFLINE
        says, remedy = ("HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE") if offline else (str(error), here)
        return Finding("hub", "missing", says, remedy, {"endpoint": constants.ENDPOINT})
    seconds = time.perf_counter() - begin
    says = f"{constants.ENDPOINT} answers in {seconds:.1f} s"
    return Finding("hub", "ok", says, figures={"endpoint": constants.ENDPOINT, "seconds": round(seconds, 3)})
