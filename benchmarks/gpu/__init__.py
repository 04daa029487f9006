"""``./launch.sh gpu-check``: all tests of a GPU machine, in one command."""
