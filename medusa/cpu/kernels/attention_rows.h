// Which rows attend in a layer, what each of them sees, and how a team shares them.
#pragma once
#include <memory>

#include "attention_vectors.h"
#include "table.h"
#include "tree.h"

struct Layer {
    int64_t batch, heads, kv_heads, dim, dim_v;
    const int64_t *lengths, *parents, *firsts;  // [batch], [nodes], [batch + 1] where the nodes of each sequence begin
    int64_t computed;                           // nodes of each sequence that were computed before: rows are the others
    int64_t together;                           // 1 = nodes of a sequence see all of them, in the order of their places
    Table table;                                // of keys [places, key heads, D] and values [places, key heads, Dv]
    int64_t window, chunk;                      // 0 = none
    int64_t q_row, q_head;                      // strides of queries
    const float* sinks;
    float scaling, softcap;
    int64_t count(int64_t b) const { return firsts[b + 1] - firsts[b]; }
    int64_t rows(int64_t b) const { return count(b) - computed; }
    int64_t row(int64_t b, int64_t node) const { return firsts[b] + node - (b + 1) * computed; }
    const int64_t* parents_of(int64_t b) const { return parents + firsts[b]; }
    int64_t groups() const { return heads / kv_heads; }
    int64_t key_step() const { return kv_heads * dim; }
    int64_t value_step() const { return kv_heads * dim_v; }
    int width() const { return (int(dim_v) + LANES - 1) / LANES * LANES; }
};

// What rows of a sequence see, at most BLOCK of them. A row is a node under one of the query heads of a key head.
struct Rows {
    int64_t length;
    const int64_t* parents;
    int count, node[BLOCK], head[BLOCK];               // head: among those of the key head
    int64_t first[BLOCK], shared[BLOCK], last[BLOCK];  // positions: first and last seen, and where ancestors leave their places
    int64_t own[BLOCK];                                // own positions
    int64_t from = 0, to = 0;                          // of all rows

    Rows(const Layer& at, int64_t b, int64_t begin, int64_t end, const int64_t* depth, const int64_t* leading)
        : length(at.lengths[b]), parents(at.parents_of(b)), count(int(end - begin)) {
        for (int r = 0; r < count; r++) {
            const int64_t n = at.computed + (begin + r) / at.groups();
            node[r] = int(n), head[r] = int((begin + r) % at.groups());
            last[r] = length + (at.together ? at.count(b) - 1 : depth[n]);
            shared[r] = length + (at.together ? at.count(b) : leading[n]);
            own[r] = length + depth[n], first[r] = 0, to = std::max(to, last[r] + 1);
        }
    }

    // The same where a layer lets them see less.
    Rows seen_by(const Layer& at) const {
        Rows rows = *this;
        rows.from = INT64_MAX;
        for (int r = 0; r < count; r++) {
            rows.first[r] = at.window ? std::max<int64_t>(0, own[r] - at.window + 1) : own[r] / at.chunk * at.chunk;
            rows.from = std::min(rows.from, rows.first[r]);
        }
        return rows;
    }
};

constexpr int64_t APART_BYTES = 64 << 20;  // most that segments leave behind, where every thread has rows anyway

// Rows under one key head.
struct Unit {
    int64_t b, kv;
    size_t rows;  // of `blocks`
};

// How a team shares a layer. Few rows: segments are spread over the threads too. Either way the same numbers are merged
// in the same order.
struct Work {
    static constexpr int STAGES = 2;
    std::vector<Rows> blocks;
    std::vector<Unit> units;
    int64_t segments = 1, rows = 0;  // of a unit, at most
    bool apart;
    std::unique_ptr<float[]> partial;

    Work(const Layer& at, int threads) {
        std::vector<int64_t> depth, leading;  // of each node, and its ancestors from the root on, itself too, in their own places
        for (int64_t b = 0; b < at.batch; b++) {
            const int64_t nodes = at.count(b), count = at.rows(b) * at.groups(), *parents = at.parents_of(b);
            depth.resize(nodes), leading.assign(nodes, 1);
            depths(parents, nodes, depth.data());
            for (int64_t n = 1; n < nodes; n++) {
                const int64_t p = parents[n];
                leading[n] = leading[p] + (leading[p] == depth[n] && depth[n] == n);
            }
            const size_t before = blocks.size();
            for (int64_t first = 0; first < count; first += BLOCK)
                blocks.emplace_back(at, b, first, std::min(first + BLOCK, count), depth.data(), leading.data());
            for (int64_t kv = 0; kv < at.kv_heads; kv++)
                for (size_t block = before; block < blocks.size(); block++) units.push_back({b, kv, block});
            segments = std::max(segments, (at.lengths[b] + nodes - 1) / SEGMENT + 1);
            rows = std::max(rows, std::min<int64_t>(BLOCK, (count + 15) / 16 * 16));  // whole tiles of the matrix unit
        }
        const int64_t all = units.size(), bytes = all * segments * part(at) * int64_t(sizeof(float));
        apart = threads > 1 && segments > 1 && all < 4 * threads && (all < threads || bytes <= APART_BYTES);
        if (apart) partial.reset(new float[units.size() * segments * part(at)]);
    }
    int64_t part(const Layer& at) const { return rows * (at.width() + 2); }  // numbers of one segment of a unit
};
