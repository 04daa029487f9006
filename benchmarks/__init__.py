"""Studies, sweeps, replays and the test of a GPU machine. Other parts of the package import nothing from here."""
