"""A server's own figures while it is loaded: the command's curves, and that an idle server holds nothing."""

import json

import httpx
import pytest

from medusa import MedusaModel
from medusa.benchmarks.serving import watch
from medusa.benchmarks.serving.__main__ import main
from medusa.benchmarks.serving.watch import FIGURES, Watch
from medusa.serve.settings import EngineSettings
from tests.serve.live import serving


def test_a_server_that_was_loaded_is_idle_again(base, make_heads, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(watch, "SECONDS", 0.05)
    monkeypatch.setattr(watch, "SETTLE", 0.3)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"count to {number}"}) + "\n" for number in range(50)))
    with serving(MedusaModel(base, make_heads()), EngineSettings(max_batch=4)) as live:
        files = [str(tmp_path / name) for name in ("curves.png", "figures.json")]
        plan = ["--levels", "2", "6", "--requests", "4", "--max-tokens", "10", "--prompts", str(prompts)]
        assert main(["load", f"{live.url}/v1", *plan, "--curves", files[0], "--json", files[1]]) == 0
        samples = json.loads((tmp_path / "figures.json").read_text())["watched"]
    assert set(FIGURES) <= set(samples[-1]) and (tmp_path / "curves.png").stat().st_size > 10_000
    assert max(sample["num_requests_running"] for sample in samples) > 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert samples[0][name] == samples[-1][name] == 0
    said = capsys.readouterr().out
    assert "requests that run: 0 before" in said and f"written: {files[0]}" in said


def test_a_server_without_figures_is_said_so():
    with pytest.raises(httpx.HTTPError), Watch("http://127.0.0.1:1/v1"):
        pass
