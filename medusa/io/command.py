"""``medusa export``: write heads in another format, or push them to the Hub; ``medusa export inspect``: check them."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from medusa.base.names import DTYPES
from medusa.files import write_json
from medusa.formats import FORMATS

WITH_PUSH = ("private", "revision", "message")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit status: 0 done, 1 failure or problems found, 2 wrong use, 130 Ctrl-C.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        return _inspect(words[1:]) if words[:1] == ["inspect"] else _export(words)
    except (OSError, ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _export(words: Sequence[str]) -> int:
    options = _parsed(words)
    _prepare(options.json)
    import torch

    from medusa.io.export import export
    from medusa.io.hub import base_repository, push

    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    made = export(options.heads, options.format, options.out, options.base, dtype, options.push or "")
    base = made.heads.config.base
    report = {"kind": "export", "heads": options.heads, "format": options.format, "base": base, "out": options.out}
    print(f"{options.format}: {options.out}")
    if options.push:
        if not base_repository(base):
            note = f"base ({base or 'not named'}) is not on the Hub, so others cannot load it; give one with --base"
            print(note, file=sys.stderr)
        report["url"] = push(options.out, options.push, options.private or None, options.revision, options.message)
        print(report["url"])
    _publish(report, options.json)
    return 0


def _inspect(words: Sequence[str]) -> int:
    options = _inspect_parser().parse_args(words)
    _prepare(options.json)
    from medusa.io.hub import fetch_heads
    from medusa.io.inspect import inspect_heads

    report = inspect_heads(fetch_heads(options.directory))
    for name, value in _lines(report):
        print(f"{name:<16} {value}")
    _publish(report, options.json)
    return 1 if report["problems"] else 0


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    parser = _export_parser()
    options = parser.parse_args(words)
    alone = [f"--{name}" for name in WITH_PUSH if getattr(options, name) and not options.push]
    if alone:
        parser.error(f"{alone[0]} belongs to a push; give --push user/repo too")
    if options.push:
        from medusa.io.hub import is_repository

        if not is_repository(options.push):
            parser.error(f"--push ({options.push}) must be named with its owner; give user/repo")
    if Path(options.out).exists() and Path(options.heads).exists() and Path(options.out).samefile(options.heads):
        parser.error(f"--out ({options.out}) is the directory of the heads; give another directory")
    return options


def _export_parser() -> argparse.ArgumentParser:
    formats = "\n".join(f"  {name:<16} {form.summary}" for name, form in FORMATS.items())
    parser = argparse.ArgumentParser(
        "medusa export",
        description="Write heads in another format, and put them on the Hugging Face Hub.",
        epilog=f"formats:\n{formats}\n\nwhat heads are, and what is wrong with them:\n  medusa export inspect DIR",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--heads", required=True, metavar="DIR", help="heads in any format: a directory, or a Hub id")
    add("--format", required=True, choices=tuple(FORMATS), help="format to write, see below")
    add("--out", required=True, metavar="DIR", help="directory to write; a new one, or heads of this format to replace")
    add("--base", default="", metavar="NAME", help="base to name, directory or Hub id (default: the heads' own)")
    add("--dtype", default="auto", choices=DTYPES, help="of the written weights (default: auto, as they are stored)")
    add("--push", metavar="REPO", help="put the result on the Hub (user/repo, made where it is missing), with a card")
    add("--private", action="store_true", help="make a new repository private (default: as the owner's settings say)")
    add("--revision", metavar="BRANCH", help="push to this branch, made where it is missing (default: main)")
    add("--message", metavar="TEXT", help="of the push's one commit")
    add("--json", metavar="FILE", help="write what was done as JSON too")
    return parser


def _inspect_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "medusa export inspect",
        description="Tell what heads are, which formats can hold them, and what is wrong with them (exit status 1).",
    )
    parser.add_argument("directory", metavar="DIR", help="heads in any format: a directory, or a Hub id")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON too")
    return parser


def _lines(report: dict[str, Any]) -> list[tuple[str, object]]:
    """The report as names and values."""
    heads = report.get("heads") or {}
    exports = report.get("exports") or {}
    tensors = [
        ("tensor", f"{each['name']} {each['shape']} {each['dtype']} in {each['file']}") for each in report["tensors"]
    ]
    return [
        ("directory", report["directory"]),
        ("format", f"{report['format']} ({report['read_by']})" if report["format"] else "unknown"),
        *((name.removeprefix("num_").replace("_", " "), _shown(value)) for name, value in heads.items()),
        *tensors,
        ("parameters", f"{report['parameters']:,}"),
        ("size", f"{sum(report['files'].values()):,} bytes in {len(report['files'])} files"),
        *((f"as {name}", obstacle or "can be exported") for name, obstacle in exports.items()),
        *(("PROBLEM", problem) for problem in report["problems"]),
    ]


def _shown(value: object) -> object:
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else "none" if value is None else value


def _prepare(path: str | None) -> None:
    """Check the path of the report before the work starts."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)


def _publish(report: dict[str, Any], path: str | None) -> None:
    if path:
        write_json(Path(path), report)


if __name__ == "__main__":
    sys.exit(main())
