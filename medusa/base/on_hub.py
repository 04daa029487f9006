"""The Hugging Face Hub, asked for what is not on this machine; where it does not give that, one sentence says why.

Tokens are the business of huggingface_hub (``hf auth login``, or HF_TOKEN); nothing here reads or shows one.
"""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import HfApi, constants, get_session, try_to_load_from_cache
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from medusa.base.names import near

logger = logging.getLogger(__name__)

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
TIMEOUT = 3.0
"""Seconds that the Hub has for its first answer; downloads ask again and again, with pauses."""
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def is_hub_id(name: str) -> bool:
    """Whether a name that is no directory here can be one of the Hub's."""
    return bool(HUB_NAME.fullmatch(name)) and not Path(name).is_dir()


def at_hand(name: str, what: str, revision: str | None = None) -> str:
    """What to load for a Hub id: the id where the Hub has it, else the directory that is kept of it on this machine.

    Args:
        name: A Hub id.
        what: "base" or "heads", for errors.
        revision: Branch, tag or commit; None = the main branch.

    Raises:
        OSError: The Hub does not have it, or does not answer, and nothing is kept; one sentence.
    """
    try:
        refusal = f"{what} ({name}) is not on this machine, and the Hugging Face Hub does not provide it"
        with one_sentence(refusal, near(name, kept())):
            get_session().head(constants.ENDPOINT, timeout=TIMEOUT)  # what HfApi does first has pauses of its own
            HfApi().model_info(name, revision=revision, timeout=TIMEOUT)
    except OSError as error:
        if directory := kept_directory(name, revision):
            logger.info("%s; the cached copy is used (%s)", error, directory)
            return directory
        raise
    return name


def kept() -> list[str]:
    """Ids of the models that huggingface_hub's cache holds."""
    found = Path(constants.HF_HUB_CACHE).glob("models--*")
    return ["/".join(path.name.split("--")[1:]) for path in found]


def kept_directory(name: str, revision: str | None = None) -> str:
    """The directory that is kept of a repository; "" = nothing is."""
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    return str(Path(config).parent) if isinstance(config, str) else ""


@contextmanager
def one_sentence(what: str, remedy: str = "") -> Iterator[None]:
    """Say what the Hub, or the way to it, objects to; addresses are left out, since they may hold a password."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError) as error:
        wrapped = isinstance(error, RuntimeError | LocalEntryNotFoundError) and error.__cause__
        reason = (_reason(wrapped) if wrapped else "") or _reason(error)
        if not reason:
            raise
        raise OSError(f"{what}: {reason}{remedy}") from error


def _reason(error: BaseException) -> str:
    """What an error of huggingface_hub means, and what to do; "" for one that is no such error."""
    match error:
        case GatedRepoError():
            return f"access to the repository must be requested on its page; then {LOG_IN}"
        case RevisionNotFoundError():
            return "the repository has no such revision; name a branch, tag or commit that it has"
        case RepositoryNotFoundError():
            return f"the repository does not exist, or is private to others; correct the name, or {LOG_IN}"
        case HfHubHTTPError():
            words = " ".join((error.server_message or "").split())
            said = f"status {error.response.status_code}" + (f", {words}" if words else "")
            if error.response.status_code in (401, 403):
                return f"this login has no permission ({said}); {LOG_IN}, with a token that has it"
            return f"it answers with an error ({said}); try again later"
        case FileMetadataError():
            return "the server that answers is not a Hub; check HF_ENDPOINT and the proxy"
        case OfflineModeIsEnabled():
            return "HF_HUB_OFFLINE is set, and they are not in the cache; unset it"
        case HTTPError() | LocalEntryNotFoundError():
            return f"it cannot be reached ({type(error).__name__}); check the network, or copy the files here"
    return ""
