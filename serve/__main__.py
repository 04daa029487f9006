"""``python -m serve``: the chat."""

import sys

from serve.chat.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
