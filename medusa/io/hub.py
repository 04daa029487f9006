"""Heads on the Hugging Face Hub: download by name, and push.

huggingface_hub handles access tokens (``hf auth login``, or HF_TOKEN); nothing here reads or shows one.
"""

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError

from medusa.base.merged import is_adapter
from medusa.base.names import GGUF, is_path, near
from medusa.base.on_hub import HUB_NAME, at_hand, is_hub_id, one_sentence
from medusa.files import peek_object
from medusa.formats.base import CONFIG
from medusa.formats.draft import is_draft
from medusa.formats.native import FORMAT
from medusa.io.published import published_file

CARD = "README.md"
CARD_MARK = "<!-- Written by medusa export. The next push writes it again, unless this line is removed. -->"
READ = ("*.json", "*.safetensors", "*.pt", "pytorch_model.bin", "custom_generate/*")
"""Files of heads in any format; a repository may also hold a base, whose files are not needed here."""
WRITTEN = (
    "heads.safetensors", "medusa_lm_head.*", "model.safetensors", "pytorch_model.bin", "lm_head.safetensors",
    "provenance.json", "calibration.json", "adapter/*", "custom_generate/*",
)  # fmt: skip
"""Files that pushes of any format write; a push deletes those that the new heads do not have."""


def fetch_heads(name: str | Path, revision: str | None = None) -> Path:
    """The directory of heads: a local directory, or "user/heads" of the Hub, downloaded to huggingface_hub's cache.

    Args:
        name: A directory, or a Hub id; a ``Path`` is always a directory.
        revision: Branch, tag or commit on the Hub; None = its main branch.

    Raises:
        OSError: There are no such heads, neither here nor on the Hub, or the Hub cannot be reached; one sentence.
    """
    if Path(name).is_dir():
        return Path(name)
    if isinstance(name, Path) or not is_repository(name):
        raise FileNotFoundError(
            f"heads directory ({name}) does not exist{near(str(name))}; train heads first or give another path, or a"
            " Hub id (user/heads)"
        )
    if (found := at_hand(name, "heads", revision)) != name:
        return Path(found)
    with one_sentence(f"heads ({name}) are not a directory here, and the Hub does not provide them"):
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(READ)))


def is_model(name: str | Path, revision: str | None = None) -> bool:
    """Whether a name means a whole model and not heads: a directory, a GGUF file, a short name or a Hub id.

    Raises:
        OSError: It is a Hub id with an owner, and the Hub does not answer; one sentence.
    """
    path, text = Path(name), str(name)
    if path.is_dir():
        config = peek_object(path / CONFIG) or {}
        whole = "model_type" in config and not _is_of_heads(config)
        return whole or is_adapter(path) or any(path.glob(f"*{GGUF}"))
    if path.suffix == GGUF or isinstance(name, Path) or is_path(text):
        return path.suffix == GGUF
    if not is_repository(text) or "gguf" in text.lower():  # heads on the Hub have an owner
        return True
    if (found := at_hand(text, "model", revision)) != text:
        return is_model(Path(found))
    with one_sentence(f"{CONFIG} of the model ({name}) is not given by the Hugging Face Hub"):
        try:
            return is_model(Path(hf_hub_download(text, CONFIG, revision=revision)).parent)
        except EntryNotFoundError:  # adapters have none
            return True


def push(
    directory: str | Path,
    repo: str,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
) -> str:
    """Push the heads of a directory to a repository of the Hub, in one commit; it is created if it does not exist.

    Pushing again commits only changes. Files of an earlier push that these heads do not have are deleted; other files
    stay, also a model card that somebody wrote by hand. JSON files are sent without local paths and command lines, see
    `published_file`.

    Args:
        directory: Directory of heads in any format, with their card; hidden files are left out.
        repo: "user/heads".
        private: Whether a new repository is private; None = its owner's setting, which is public by default.
        revision: Branch to commit to; it is created if it does not exist; None = main.
        message: Message of the commit.

    Returns:
        Address of the repository's page.

    Raises:
        ValueError: The repository must be private but exists and is public, it holds something else than heads, or its
            name lacks the owner.
        OSError: The Hub refuses, or cannot be reached; one sentence.
    """
    if not is_repository(repo):
        raise ValueError(f"repository ({repo}) must be named with its owner; give user/heads")
    api = HfApi()
    with one_sentence(f"heads cannot be pushed to the Hub ({repo})"):
        url = api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise ValueError(
                f"repository ({url}) exists and is public, which private does not change; make it private in its"
                " settings, or push to another one"
            )
        if revision and not revision.startswith("refs/"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        files = _files(Path(directory))
        there = api.list_repo_files(repo, revision=revision)
        known = {CONFIG, CARD}.intersection(there)
        theirs = {name: Path(api.hf_hub_download(repo, name, revision=revision)) for name in known}
        if CONFIG in theirs and not _is_of_heads(peek_object(theirs[CONFIG]) or {}):
            raise ValueError(f"repository ({url}) holds another model, which heads would damage; push to another one")
        if CARD in theirs and CARD_MARK not in theirs[CARD].read_text(encoding="utf-8"):
            files.pop(CARD, None)
        pushed = there if CONFIG in there else ()  # without a config these are not files of a push
        stale = [name for name in pushed if name not in files and any(fnmatch(name, pattern) for pattern in WRITTEN)]
        api.create_commit(  # upload_folder may cut a push into several commits
            repo,
            [CommitOperationAdd(name, published_file(path)) for name, path in files.items()]
            + [CommitOperationDelete(name) for name in stale],
            commit_message=message or "Draft heads",
            revision=revision,
        )
    return f"{url}/tree/{revision}" if revision else str(url)


def is_repository(name: str) -> bool:
    """Whether a name can be a repository's, with its owner."""
    return "/" in name and bool(HUB_NAME.fullmatch(name))


def base_repository(base: str) -> str:
    """The repository of a base on the Hub, without the type of a GGUF file after a colon; "" for other bases."""
    repository = base.partition(":")[0]
    return repository if is_hub_id(repository) else ""


def _files(directory: Path) -> dict[str, Path]:
    """Files by their names in the repository, without hidden ones."""
    names = {path.relative_to(directory): path for path in sorted(directory.rglob("*")) if path.is_file()}
    return {name.as_posix(): path for name, path in names.items() if not any(part[0] == "." for part in name.parts)}


def are_heads(name: str | Path) -> bool:
    """Whether a name is that of a directory of heads."""
    return _is_of_heads(peek_object(Path(name) / CONFIG) or {})


def _is_of_heads(config: dict[str, Any]) -> bool:
    """Whether a ``config.json`` belongs to heads, in any format."""
    known = "medusa_num_heads" in config or config.get("model_type") == "medusa" or config.get("format") == FORMAT
    return known or bool(is_draft(config))
