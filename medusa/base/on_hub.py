"""Access to the Hugging Face Hub for models that are not on this machine; errors are one sentence with the reason.

huggingface_hub handles access tokens (``hf auth login``, or HF_TOKEN); nothing here reads or shows one.
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
"""Seconds to wait for the Hub's first answer; downloads retry, with pauses."""
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def is_hub_id(name: str) -> bool:
    """Whether a name that is not a local directory can be a Hub id."""
    return bool(HUB_NAME.fullmatch(name)) and not Path(name).is_dir()


def at_hand(name: str, what: str, revision: str | None = None) -> str:
    """The name to load for a Hub id: the id itself if the Hub has it, otherwise its cached directory on this machine.

    Args:
        name: A Hub id.
        what: "base" or "heads", for errors.
        revision: Branch, tag or commit; None = the main branch.

    Raises:
        OSError: The Hub does not have it, or does not answer, and it is not cached; one sentence.
    """
    try:
        refusal = f"{what} ({name}) is not on this machine, and the Hugging Face Hub does not provide it"
        with one_sentence(refusal, near(name, kept())):
            reach()
            HfApi().model_info(name, revision=revision, timeout=TIMEOUT)
    except OSError as error:
        if directory := kept_directory(name, revision):
            logger.info("%s; the cached copy is used (%s)", error, directory)
            return directory
        raise
    return name


def reach() -> None:
    """Raise the network's error at once if the Hub does not answer: requests of huggingface_hub retry with pauses."""
    get_session().head(constants.ENDPOINT, timeout=TIMEOUT)


def kept() -> list[str]:
    """Ids of the models that huggingface_hub's cache holds."""
    found = Path(constants.HF_HUB_CACHE).glob("models--*")
    return ["/".join(path.name.split("--")[1:]) for path in found]


def kept_directory(name: str, revision: str | None = None) -> str:
    """The cached directory of a repository; "" = not cached."""
    configs = (try_to_load_from_cache(name, file, revision=revision) for file in ("config.json", "adapter_config.json"))
    return next((str(Path(config).parent) for config in configs if isinstance(config, str)), "")


@contextmanager
def one_sentence(what: str, remedy: str = "") -> Iterator[None]:
    """Raise errors of the Hub or the network as one sentence, without addresses, because these may hold a password."""
    try:
        yield
    except (HTTPError, OSError, RuntimeError) as error:
        wrapped = isinstance(error, RuntimeError | LocalEntryNotFoundError) and error.__cause__
        reason = (_reason(wrapped) if wrapped else "") or _reason(error)
        if not reason:
            raise
        raise OSError(f"{what}: {reason}{remedy}") from error


def _reason(error: BaseException) -> str:
    """The meaning of an error of huggingface_hub and its remedy; "" for any other error."""
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
