"""Finds the GGUF file for the name of a base: a file, a directory that holds one, or a repository on the Hub."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from medusa.base.names import GGUF

PREFERRED = "Q4_K_M"
"""The type that is chosen in a repository if the name gives none, as in llama.cpp."""
HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?::([\w.-]+))?")
"""A repository, and part of a file's name: ``owner/name:Q4_K_M``."""
PART = re.compile(r"-(\d{5})-of-\d{5}$")
"""End of the file name, before the suffix, of a model that was split into several files."""
OTHERS = ("mmproj", "imatrix")
"""Parts of names of GGUF files that are not language models: image projectors, and importance statistics."""
WEIGHTS = ("*.safetensors", "*.bin")
"""Weight files of directories that transformers reads directly."""


def find(name: str, download: bool = True) -> Path | None:
    """Find the GGUF file for the name of a base; None if the name does not refer to one.

    The Hub is asked for a repository's files only if the name ends with ``:`` and a type, or contains "gguf".

    Args:
        name: A path, or a Hub id.
        download: Download the file if it is not on this machine.

    Raises:
        OSError: The file is not on this machine and may not be downloaded, or the Hub cannot be reached.
        ValueError: There are several files, no file of that type, or the file is one part of a split model.
    """
    path = Path(name)
    if path.is_dir():
        if any(next(path.glob(pattern), None) for pattern in WEIGHTS):
            return None
        models = _models(str(file.relative_to(path)) for file in path.glob(f"*{GGUF}"))
        return _whole(path / _only(models, f"base directory ({name})", "give the path of one")) if models else None
    if path.is_file():
        return _whole(path) if path.suffix == GGUF else None
    match = HUB_NAME.fullmatch(name)
    if not match or not (match[2] or "gguf" in name.lower()):
        return None
    return _on_hub(name, match[1], match[2] or "", download)


def _models(names: Iterable[str]) -> list[str]:
    """The files that are models; the first part of each split model."""
    models = [name for name in names if name.endswith(GGUF) and not any(word in name.lower() for word in OTHERS)]
    return sorted(name for name in models if (part := PART.search(Path(name).stem)) is None or part[1] == "00001")


def _only(models: list[str], what: str, remedy: str) -> str:
    if len(models) > 1:
        raise ValueError(f"{what} holds several GGUF files ({', '.join(models)}); {remedy}")
    return models[0]


def _whole(file: Path) -> Path:
    if PART.search(file.stem):
        raise ValueError(
            f"GGUF file ({file}) is a part of a model, and models are read from one file; join the parts with"
            " llama.cpp's `llama-gguf-split --merge`, or give another file"
        )
    return file


def _on_hub(name: str, repository: str, kind: str, download: bool) -> Path | None:
    from huggingface_hub import hf_hub_download

    names = _files(name, repository, download)
    models = _models(names)
    if not kind and (not models or any(one.endswith(".safetensors") for one in names)):
        return None
    wanted = re.compile(rf"(?<![A-Za-z0-9]){re.escape(kind or PREFERRED)}(?![A-Za-z0-9_])", re.IGNORECASE)
    chosen = [model for model in models if wanted.search(model)] or ([] if kind else models)
    if not chosen:
        raise ValueError(f"base ({name}) has no GGUF file of that type; its files are: {', '.join(models) or 'none'}")
    file = _only(chosen, f"base ({name})", f"name one of them, as {repository}:{Path(chosen[-1]).name}")
    _whole(Path(file))  # before gigabytes are downloaded
    with _hub_errors(name, download):
        return Path(hf_hub_download(repository, file, local_files_only=not download))


def _files(name: str, repository: str, download: bool) -> list[str]:
    """The files of a repository on the Hub; if the Hub is not asked or does not answer, those on this machine."""
    from huggingface_hub import list_repo_files
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    from medusa.base.on_hub import reach

    with _hub_errors(name, download):
        try:
            if download:
                reach()
                return list(list_repo_files(repository))
        except (HTTPError, OSError, RuntimeError):
            with suppress(OSError):
                return _kept(repository)
            raise
        return _kept(repository)


def _kept(repository: str) -> list[str]:
    """The files of a repository that are on this machine."""
    from huggingface_hub import snapshot_download

    directory = Path(snapshot_download(repository, local_files_only=True))
    return [path.relative_to(directory).as_posix() for path in directory.rglob("*")]


@contextmanager
def _hub_errors(name: str, download: bool) -> Iterator[None]:
    """Raise errors of the Hub as one sentence."""
    from medusa.base.on_hub import one_sentence

    if download:
        with one_sentence(f"base ({name}) is not on this machine, and the Hugging Face Hub does not provide it"):
            yield
        return
    try:
        yield
    except OSError as error:
        raise OSError(f"base ({name}) is not a file on this machine, and none is downloaded; give a path") from error
