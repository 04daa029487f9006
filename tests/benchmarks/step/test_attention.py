"""The bound of tree attention."""

from benchmarks.step.attention import least_bytes


def test_least_bytes_count_every_row_once():
    context, nodes, batch, heads, kv_heads, row = 3, 2, 5, 4, 2, 16
    keys, queries = batch * (context + nodes) * kv_heads * row, batch * nodes * heads * row
    assert least_bytes(context, nodes, batch, heads, kv_heads, row) == 2 * keys + 2 * queries
