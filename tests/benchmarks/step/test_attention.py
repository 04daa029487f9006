"""The bound of tree attention."""

from benchmarks.step.attention import least_bytes


def test_least_bytes_count_every_row_once():
    lengths, nodes, heads, kv_heads, dim, dim_v = [3, 0], 2, 4, 2, 8, 6
    key_rows = [length + nodes for length in lengths]
    traffic = sum(rows * kv_heads * (dim + dim_v) for rows in key_rows) + 2 * nodes * heads * (dim + dim_v)
    assert least_bytes(lengths, nodes, heads, kv_heads, dim, dim_v, itemsize=2) == 2 * traffic
