"""The report of a training run: `training.json`, `training.png`, and a table."""

from medusa.train.report.figures import read_report, write_report

__all__ = ["read_report", "write_report"]
