"""``./launch.sh gpu-check``: everything that can be tried on a GPU machine, in one command."""
