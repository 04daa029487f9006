"""Where torch's compiler keeps its precompiled C++ headers."""

import os
from pathlib import Path


def keep_headers_in_cache() -> None:
    """Put them into ``TORCHINDUCTOR_CACHE_DIR``, where that is set, beside all else that the compiler keeps.

    torch itself puts them (150 MB) into the system's temporary folder whatever that variable says, and has no setting
    for it but to do without them, which makes each kernel's compilation seconds longer.
    """
    directory = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if not directory:
        return
    from torch._inductor import codecache

    headers = Path(directory).absolute() / "precompiled_headers"
    for name, path in (("_HEADER_DIR", headers), ("_HEADER_LOCK_DIR", headers / "locks")):
        if hasattr(codecache, name):  # read at each compilation; a torch without them has changed its mind
            setattr(codecache, name, str(path))
