// Small walks over token trees; a node's parent stands before it.
#pragma once
#include "vectors.h"

// Edges from the root to each node.
static inline void depths(const int64_t* parents, int64_t nodes, int64_t* out) {
    for (int64_t n = 0; n < nodes; n++) out[n] = n ? out[parents[n]] + 1 : 0;
}

struct Accepting {
    int64_t batch, nodes, width;      // width: places of the longest possible path
    const int64_t *tokens, *parents;  // [batch, nodes]
    const bool* edges;                // [batch, nodes]; null = a token is allowed where it is its parent's bonus
    const int64_t* bonus;             // [batch, nodes]
    const float* likelihood;          // [batch, nodes] or null
    const bool* active;               // [batch]
    const int64_t* positions;         // [batch] where the roots stand in the history
    int64_t *history, stride;         // [batch, .], its rows so far apart
    const char* hidden;               // [batch, nodes] hidden states
    int64_t bytes;                    // of each
    int64_t *path, *emitted, *after;  // [batch, width], [width + 1, batch] with their numbers last, [batch]
    char* last;                       // [batch] hidden states
};

// The deepest node whose edges are all accepted, among equally deep ones the first on the likeliest path: its path, what
// the sequence emits, also written behind its root, and what the next step starts from; see accept in
// medusa/acceptance/path.py.
static void accept(const Accepting& at, int64_t b) {
    const int64_t first = b * at.nodes;
    const int64_t *tokens = at.tokens + first, *parents = at.parents + first, *bonus = at.bonus + first;
    std::vector<int64_t> depth(at.nodes, 0);
    std::vector<float> likelihood(at.nodes, 0);
    int64_t leaf = 0;
    float best = at.likelihood ? 0.5f : 0;
    for (int64_t n = 1; n < at.nodes; n++) {
        const int64_t p = parents[n];
        const bool allowed = at.edges ? at.edges[first + n] : tokens[n] == bonus[p];
        depth[n] = allowed && depth[p] >= 0 && depth[p] + 1 < at.width ? depth[p] + 1 : -1;
        if (depth[n] < 0) continue;
        if (at.likelihood) likelihood[n] = likelihood[p] + at.likelihood[first + n];
        const float score = depth[n] + (at.likelihood ? 0.5f * std::exp(likelihood[n]) : 0);
        if (score > best) best = score, leaf = n;
    }
    int64_t* path = at.path + b * at.width;
    const auto emitted = [&](int64_t place) -> int64_t& { return at.emitted[place * at.batch + b]; };
    for (int64_t i = 0; i < at.width; i++) path[i] = i, emitted(i) = 0;
    for (int64_t n = leaf; n; n = parents[n]) path[depth[n]] = n, emitted(depth[n] - 1) = tokens[n];
    emitted(depth[leaf]) = at.after[b] = bonus[leaf];
    const int64_t count = emitted(at.width) = at.active[b] ? depth[leaf] + 1 : 0;
    for (int64_t i = 0; i < count; i++) at.history[b * at.stride + at.positions[b] + 1 + i] = emitted(i);
    std::memcpy(at.last + b * at.bytes, at.hidden + (first + leaf) * at.bytes, at.bytes);
}
