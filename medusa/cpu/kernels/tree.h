// Small walks over token trees; a node's parent stands before it.
#pragma once
#include "vectors.h"

// Edges from the root to each node.
static inline void depths(const int64_t* parents, int64_t nodes, int64_t* out) {
    for (int64_t n = 0; n < nodes; n++) out[n] = n ? out[parents[n]] + 1 : 0;
}

struct Verdict {
    int64_t batch, nodes;
    const int64_t *tokens, *parents;  // [batch, nodes]
    const bool* edges;                // [batch, nodes]
    const int64_t* bonus;             // [batch, nodes]
    const float* likelihood;          // [batch, nodes] or null
    int64_t *path, *counts, *taken, *leaf, *after;  // [batch, nodes], [batch], [batch, nodes], [batch], [batch]
};

// The deepest node whose edges are all accepted, among equally deep ones the first on the likeliest path; see select_path
// in medusa/acceptance/path.py.
static void select_path(const Verdict& at, int64_t b) {
    const int64_t first = b * at.nodes;
    const int64_t *tokens = at.tokens + first, *parents = at.parents + first, *bonus = at.bonus + first;
    std::vector<int64_t> depth(at.nodes, 0);
    std::vector<float> likelihood(at.nodes, 0);
    int64_t leaf = 0;
    float best = at.likelihood ? 0.5f : 0;
    for (int64_t n = 1; n < at.nodes; n++) {
        const int64_t p = parents[n];
        depth[n] = depth[p] >= 0 && at.edges[first + n] ? depth[p] + 1 : -1;
        if (depth[n] < 0) continue;
        if (at.likelihood) likelihood[n] = likelihood[p] + at.likelihood[first + n];
        const float score = depth[n] + (at.likelihood ? 0.5f * std::exp(likelihood[n]) : 0);
        if (score > best) best = score, leaf = n;
    }
    int64_t *path = at.path + first, *taken = at.taken + first;
    for (int64_t i = 0; i < at.nodes; i++) path[i] = i, taken[i] = 0;
    for (int64_t n = leaf; n; n = parents[n]) path[depth[n]] = n, taken[depth[n] - 1] = tokens[n];
    taken[depth[leaf]] = bonus[leaf];
    at.counts[b] = depth[leaf] + 1, at.leaf[b] = leaf, at.after[b] = bonus[leaf];
}
