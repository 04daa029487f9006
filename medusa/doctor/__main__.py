"""``medusa doctor``: what this machine has, what will run fast on it, and what to do about the rest."""

import argparse
import logging
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from medusa import __version__
from medusa.doctor import machine, packages
from medusa.doctor.finding import Finding
from medusa.doctor.machine import Expectation
from medusa.files import header, write_json

DESCRIPTION = "Show what this machine has, what runs fast on it, and what to fix."
SAYS_AT = 24
"""Column at which what is said begins."""
DECODES = "Models can be decoded here."
FAILURES = (*packages.FAILURES, ArithmeticError, LookupError, TypeError)
"""A look that fails says so, and the others go on."""

Look = Callable[[], Finding | Iterable[Finding]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 if models can be decoded here, 1 if something must be mended first, 2 wrong use, 130 Ctrl-C.
    """
    parser = argparse.ArgumentParser(prog="medusa doctor", description=DESCRIPTION)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the findings as JSON")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    findings: list[Finding] = []
    print(f"medusa {__version__}\n")
    try:
        for finding in look():
            findings.append(finding)
            print(_shown(finding), flush=True)
        expected = machine.expectations([one for one in findings if "bytes_per_second" in one.figures])
        print(_outlook(expected, findings))
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            report = {"version": __version__, "findings": list(map(asdict, findings))}
            write_json(options.json, header("doctor") | report | {"expectations": list(map(asdict, expected))})
    except BrokenPipeError:
        return 1
    except OSError as error:
        print(f"--json ({options.json}): {error}; name a file that can be written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return int(any(finding.state == "wrong" for finding in findings))


def look() -> Iterator[Finding]:
    """All that can be found out, one after the other; without torch, what needs none."""
    yield from _each("python", packages.python)
    needed = list(_each("packages", packages.needed))
    yield from needed
    usable = not any(finding.state == "wrong" for finding in needed if finding.what == "torch")
    yield from _each("processor", machine.processor)
    builder = list(_each("compiler", machine.compiler))
    yield from builder
    if usable:
        if all(finding.state == "ok" for finding in builder):
            yield from _each("kernels", machine.kernels)
        yield from _each("memory", machine.memory)
        yield from _each("gpu", machine.gpus)
    yield from _each("disk", machine.disks)
    yield from _each("extras", packages.extras)
    yield from _each("hub", packages.hub)


def _each(what: str, look: Look) -> Iterator[Finding]:
    try:
        found = look()
        yield from [found] if isinstance(found, Finding) else found
    except FAILURES as error:
        yield Finding(what, "unknown", f"cannot be examined: {type(error).__name__}: {error}")


def _shown(finding: Finding) -> str:
    width = max(60, shutil.get_terminal_size((100, 24)).columns - 1)
    indent = " " * SAYS_AT
    first = f"  {finding.state:<8}{finding.what:<{SAYS_AT - 11}} "
    lines = [textwrap.fill(finding.says, width, initial_indent=first, subsequent_indent=indent, break_long_words=False)]
    if finding.remedy:  # a command is not wrapped, so that it can be copied
        lines.append(f"{indent}-> {finding.remedy}")
    return "\n".join(lines)


def _outlook(expected: Sequence[Expectation], findings: Sequence[Finding]) -> str:
    """What will run fast, and what must be mended."""
    lines = ["", "Tokens per second without drafts, at most, one text at a time:"] if expected else []
    for one in expected:
        speed = f"{one.tokens_per_second:7,.1f}" if one.fits else "does not fit"
        lines.append(f"  {one.base:<26}{one.bytes / machine.GB:6.1f} GB  {speed}")
    wrong = [finding.what for finding in findings if finding.state == "wrong"]
    end = f"No model can be decoded until this is fixed: {', '.join(wrong)}." if wrong else DECODES
    return "\n".join([*lines, "", end])


if __name__ == "__main__":
    sys.exit(main())
