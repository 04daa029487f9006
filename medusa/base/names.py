"""Names of bases: short names that work everywhere, and paths that heads store."""

import difflib
from collections.abc import Iterable
from pathlib import Path

SMOLLM2, HUB_ID = "smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"
"""A small real chat model, and its name on the Hub."""
EMBEDDED = "embedded"
"""A small base that the repository holds; wheels leave out its 20 megabytes."""
GGUF = ".gguf"
"""End of the names of GGUF files."""
DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Names of a base's dtypes; auto = the checkpoint's, or a faster one on this machine."""
SHIPPED = (Path(__file__).parents[1] / "data").resolve()
"""The data folder: of the repository, through a link in the package, or of the installed package."""


def full_name(name: str) -> str:
    """The Hub id for "smollm2", the directory for "embedded"; any other name as it is.

    Raises:
        FileNotFoundError: This installation lacks the embedded base, as wheels do.
    """
    if name != EMBEDDED:
        return HUB_ID if name == SMOLLM2 else name
    if default_base() != EMBEDDED:
        raise FileNotFoundError(
            f"embedded base ({_embedded()}) is missing: only clones of the repository have it; run this in one, name"
            f" its data/embedded/base as the base, or name another base, as {SMOLLM2}"
        )
    return str(_embedded())


def default_base() -> str:
    """The default base of commands: "embedded", or "smollm2" if this installation lacks that."""
    return EMBEDDED if (_embedded() / "config.json").is_file() else SMOLLM2


def is_embedded(base: str | Path) -> bool:
    """Whether a base is the embedded one, by its short name or its directory."""
    return str(base) == EMBEDDED or Path(base).resolve() == _embedded().resolve()


def _embedded() -> Path:
    return SHIPPED / EMBEDDED / "base"


def shipped_heads(base: str) -> str:
    """The directory of the heads that ship with this package for a base, by its short name or Hub id; "" = none."""
    directory = SHIPPED / "pretrained" / SMOLLM2
    return str(directory) if base in (SMOLLM2, HUB_ID) and directory.is_dir() else ""


def resolve_base(name: str, heads_directory: str | Path | None = None) -> str:
    """Resolve the name of a base: a path relative to the heads that name it, any other path, or a Hub id.

    Raises:
        FileNotFoundError: The name looks like a local path that does not exist.
    """
    places = [] if heads_directory is None else [Path(heads_directory) / name]
    for place in (*places, Path(full_name(name))):
        if is_at(place):
            return str(place.resolve())
    if not is_path(name):
        return full_name(name)
    if heads_directory is None or Path(name).is_absolute():
        raise FileNotFoundError(f"base directory ({name}) does not exist{near(name)}; give another path, or a Hub id")
    theirs = Path(heads_directory).resolve()
    raise FileNotFoundError(
        f"base ({name}) is not where these heads name it, neither from their directory ({theirs}) nor from here"
        f" ({Path.cwd()}); give the base too, or put it there"
    )


def is_at(place: Path) -> bool:
    """Whether a base can be here: a directory, or a GGUF file."""
    return place.is_dir() or (place.suffix == GGUF and place.is_file())


def is_path(name: str) -> bool:
    """Whether a name can only be a local path."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def near(name: str, others: Iterable[str] = ()) -> str:
    """A suggestion of similar short names, neighbouring paths or ``others``: "; did you mean X?", or ""."""
    place = Path(name)
    beside = [path.name for path in place.parent.iterdir()] if place.parent.is_dir() else []
    found = [str(place.with_name(one)) for one in _like(place.name, beside)] if place.name else []
    found += _like(name, [SMOLLM2, EMBEDDED, *others])
    return f"; did you mean {' or '.join(dict.fromkeys(found))}?" if found else ""


def _like(name: str, others: Iterable[str]) -> list[str]:
    return [other for other in difflib.get_close_matches(name, others, n=2, cutoff=0.75) if other != name]
