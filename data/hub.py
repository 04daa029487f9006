"""Records of data sets on the Hugging Face Hub, and of data sets that `datasets` saved to disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from medusa.data.files import SUFFIXES, Placed

SAVED = ("state.json", "dataset_dict.json")
"""Files that identify a directory of `save_to_disk`."""


class HubData:
    """One split of a data set."""

    def __init__(self, name: str, split: str, subset: str, streaming: bool) -> None:
        self._name, self._split, self._subset, self._streaming = name, split, subset, streaming

    def records(self) -> Iterator[Placed]:
        """All records; the data set is downloaded first, or records are read as they arrive when streaming.

        Raises:
            ValueError: the data set or its split cannot be found or read.
        """
        for number, record in enumerate(self._opened(), start=1):
            yield f"{self._name} [{self._split}], record {number}", dict(record)

    def fingerprint(self) -> str:
        """A digest that changes with the content, from the repository's revision or the saved table."""
        if isinstance(self._builder, str):
            return str(self._opened()._fingerprint)
        return f"{self._builder.hash}/{self._builder.config_id}/{self._split}"

    @cached_property
    def _builder(self) -> Any:
        """The builder of `datasets`; for a saved data set, its directory."""
        if is_saved(Path(self._name)):
            return self._name
        with _one_sentence(self._name):
            from datasets import load_dataset_builder

            return load_dataset_builder(self._name, self._subset or None)

    def _opened(self) -> Any:
        builder = self._builder
        with _one_sentence(self._name):
            from datasets import DatasetDict, load_from_disk

            if isinstance(builder, str):
                saved = load_from_disk(builder)
                return saved[self._split] if isinstance(saved, DatasetDict) else saved
            if self._streaming:
                return builder.as_streaming_dataset(split=self._split)
            builder.download_and_prepare()
            return builder.as_dataset(split=self._split)


def means_files(name: str) -> bool:
    """Whether a source means files, existing or not, and not a data set of the Hub or a saved one."""
    path = Path(name)
    named_as_file = path.suffix in SUFFIXES or path.is_absolute() or len(path.parts) > 2  # the Hub's are OWNER/NAME
    return (path.exists() or named_as_file) and not is_saved(path)


def is_saved(path: Path) -> bool:
    """Whether `datasets` saved the directory."""
    return any((path / name).is_file() for name in SAVED)


@contextmanager
def _one_sentence(name: str) -> Iterator[None]:
    """Raise errors of `datasets` for a missing name, subset or split as one sentence."""
    try:
        yield
    except ImportError as error:
        raise ValueError(f"data ({name}) needs a package ({error}); pip install 'medusa-decoding[train]'") from error
    except Exception as error:
        from datasets.exceptions import DatasetsError

        if not isinstance(error, ValueError | OSError | KeyError | DatasetsError):
            raise
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"data ({name}) is not a file here, and cannot be read as a data set of the Hub ({reason}); correct its "
            "name, subset or split, or download it to a directory"
        ) from error
