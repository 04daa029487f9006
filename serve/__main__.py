"""``python -m serve``: the chat."""

import sys

from serve.chat import main

if __name__ == "__main__":
    sys.exit(main())
