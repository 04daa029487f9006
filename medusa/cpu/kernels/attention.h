// Attention of tree rows on a CPU whose sums depend on a row's own text alone, bit by bit.
//
// A row at position p adds up the keys at positions 0 .. p in that order, wherever they stand in the cache: committed
// rows at their positions, then its ancestors in order of depth. Positions are cut into segments with fixed borders.
// Inside a segment a score is one chain of products along D, weights are relative to the segment's largest score, and
// each output is one chain along positions; what is hidden weighs 0 and changes no bit. Segments are merged in order.
// So neither the number of rows, nor the batch, nor the threads, nor who computed the rows before can change a sum.
//
// Rows of all query heads that share a key head share each load of a key.
#pragma once
#include <memory>

#include "attention_tiles.h"
#include "attention_vectors.h"
#include "table.h"
#include "team.h"
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

// What the rows of one block see. A row is a node under one of the query heads of a key head.
struct Rows {
    int64_t length;
    const int64_t* parents;
    int count, node[BLOCK], head[BLOCK];
    int64_t first[BLOCK], shared[BLOCK], last[BLOCK];  // positions: the first seen, where ancestors leave their places, own
    int64_t from = INT64_MAX, to = 0;                  // of all rows
};

struct Scratch {
    Buffer<uint32_t> query, keys, tree_keys, pairs;
    Buffer<float> weights, tree_scores, sums, all;
    Buffer<bf16> halves;
};

// Rows of one sequence under one key head, at most BLOCK of them.
struct Unit {
    int64_t b, kv, block;
};

// How a team shares a layer. Few rows: segments are spread over the threads too. Either way the same numbers are merged
// in the same order.
struct Work {
    static constexpr int STAGES = 2;
    std::vector<Unit> units;
    std::vector<int64_t> first;           // [batch] where the nodes of a sequence begin in
    std::vector<int64_t> depth, leading;  // of each node, and its ancestors from the root on, itself too, in their own places
    int64_t segments = 1, rows = 0;  // of a unit, at most
    bool apart;
    std::unique_ptr<float[]> partial;

    Work(const Layer& at, int threads) {
        for (int64_t b = 0; b < at.batch; b++) {
            const int64_t count = at.rows(b) * at.groups();
            segments = std::max(segments, (at.lengths[b] + at.count(b) - 1) / SEGMENT + 1);
            rows = std::max(rows, std::min<int64_t>(BLOCK, count));
            walk(at.parents_of(b), at.count(b));
            for (int64_t kv = 0; kv < at.kv_heads; kv++)
                for (int64_t block = 0; block * BLOCK < count; block++) units.push_back({b, kv, block});
        }
        apart = int64_t(units.size()) < 4 * threads && threads > 1 && segments > 1;
        if (apart) partial.reset(new float[units.size() * segments * part(at)]);
    }
    int64_t part(const Layer& at) const { return rows * (at.width() + 2); }  // numbers of one segment of a unit

  private:
    void walk(const int64_t* parents, int64_t count) {
        first.push_back(depth.size());
        depth.resize(first.back() + count), leading.resize(first.back() + count, 1);
        int64_t *depths_here = &depth[first.back()], *leads = &leading[first.back()];
        depths(parents, count, depths_here);
        for (int64_t n = 1; n < count; n++) {
            const int64_t p = parents[n];
            leads[n] = leads[p] + (leads[p] == depths_here[n] && depths_here[n] == n);
        }
    }
};

// TILES: by the matrix unit, which every thread has.
template <class T, bool TILES> struct Attention {
    const Layer& at;
    const T *query, *key, *value;
    T* out;

    const T* key_at(int64_t b, int64_t kv, int64_t position) const {
        return key + at.table.place(b, position) * at.key_step() + kv * at.dim;
    }
    const T* value_at(int64_t b, int64_t kv, int64_t position) const {
        return value + at.table.place(b, position) * at.value_step() + kv * at.dim_v;
    }

    // Words of a query or a key.
    int size() const { return TILES ? (words<T>(at.dim) + 15) / 16 * 16 : words<T>(at.dim); }

    Rows begin(const Work& work, const Unit& unit, Scratch& s) const {
        const auto [b, kv, block] = unit;
        Rows rows;
        rows.length = at.lengths[b], rows.parents = at.parents_of(b);
        const int64_t *depth = &work.depth[work.first[b]], *leading = &work.leading[work.first[b]];
        const int size = this->size();
        grow(s.query, BLOCK * size);
        int64_t first = block * BLOCK, groups = at.groups();
        rows.count = int(std::clamp<int64_t>(at.rows(b) * groups - first, 0, BLOCK));
        for (int r = 0; r < rows.count; r++) {
            int64_t n = at.computed + (first + r) / groups, h = kv * groups + (first + r) % groups;
            int64_t p = rows.length + (at.together ? at.count(b) - 1 : depth[n]);
            rows.node[r] = int(n), rows.head[r] = int(h), rows.last[r] = p;
            rows.shared[r] = rows.length + (at.together ? at.count(b) : leading[n]);
            rows.first[r] = at.window ? std::max<int64_t>(0, p - at.window + 1) : at.chunk ? p / at.chunk * at.chunk : 0;
            rows.from = std::min(rows.from, rows.first[r]), rows.to = std::max(rows.to, p + 1);
            const T* q = query + h * at.q_head + at.row(b, n) * at.q_row;
            uint32_t* to = &s.query[r * size];
            if constexpr (PAIRS<T>) std::fill(to + at.dim / 2, to + size, 0), std::memcpy(to, q, at.dim * sizeof(T));
            else for (int64_t d = 0; d < at.dim; d++) to[d] = bits(widen(q[d]));
        }
        return rows;
    }

    // One segment: the largest score of each row, the sum of its weights, and the weighted sum of values [rows][width].
    void segment(const Rows& rows, int64_t b, int64_t kv, int64_t index, Scratch& s, float* top, float* total, float* sums) const {
        const int64_t start = index * SEGMENT, stop = start + SEGMENT;
        const int dim = int(at.dim), width = at.width();
        std::fill(top, top + rows.count, NOTHING), std::fill(total, total + rows.count, 0.f);
        std::fill(sums, sums + rows.count * width, 0.f);
        if (stop <= rows.from || start >= rows.to) return;
        int64_t shared = 0;
        bool tails = false;
        for (int r = 0; r < rows.count; r++) {
            shared = std::max(shared, rows.shared[r]);
            tails |= rows.shared[r] <= rows.last[r] && rows.last[r] >= start;
        }
        const int64_t low = std::max(start, rows.from);
        const int skipped = int(low - start) / LANES * LANES;  // positions that no row sees: a window has passed
        const int count = int(std::max<int64_t>(0, std::min(stop, shared) - start - skipped));
        grow(s.keys, (at.dim + 2 * LANES) * SEGMENT), grow(s.weights, BLOCK * SEGMENT);
        if (count > 0) {
            const int64_t first = start + skipped;
            at.table.runs(first, first + count, [&](int64_t p, int run) {
                expect(value_at(b, kv, p), at.value_step(), run, at.dim_v);
                turn(key_at(b, kv, p), at.key_step(), run, dim, s.keys.data() + (p - first), SEGMENT);
            });
            scores(rows.count, s.query.data(), s.keys.data(), SEGMENT, count, &s.weights[skipped]);
        }
        const int nodes = int(at.count(b)), stride = (nodes + 2 * LANES - 1) / LANES * LANES;  // a run may end beyond nodes
        if (tails) {
            grow(s.tree_keys, int64_t(dim + 2 * LANES) * stride), grow(s.tree_scores, int64_t(BLOCK) * stride);
            at.table.runs(rows.length, rows.length + nodes, [&](int64_t p, int run) {
                turn(key_at(b, kv, p), at.key_step(), run, dim, s.tree_keys.data() + (p - rows.length), stride);
            });
            scores(rows.count, s.query.data(), s.tree_keys.data(), stride, nodes, s.tree_scores.data());
        }
        const float scaling = at.softcap > 0 ? 1 : at.scaling;  // above 0
        constexpr int WHOLE = ABREAST * LANES;  // positions whose scores become weights together
        const auto seen_of = [&](int r) { return int(std::clamp<int64_t>(rows.last[r] + 1 - start, 0, SEGMENT)); };
        for (int r = 0; r < rows.count; r++) {
            float* weights = &s.weights[r * SEGMENT];
            const int64_t seen = std::min(rows.shared[r], stop), first = std::max(rows.first[r], start);
            const int64_t read = start + (seen_of(r) + WHOLE - 1) / WHOLE * WHOLE;
            for (int64_t p = start; p < std::min(first, stop); p++) weights[p - start] = NOTHING;
            for (int64_t p = std::max(seen, start); p < read; p++) weights[p - start] = NOTHING;
            if (rows.shared[r] <= rows.last[r]) {
                int64_t p = rows.last[r];
                for (int64_t n = rows.node[r]; p >= rows.shared[r] && p >= first; n = rows.parents[n], p--)
                    if (p < stop) weights[p - start] = s.tree_scores[int64_t(r) * stride + n];
            }
            if (at.softcap > 0) cap(weights, seen_of(r));
            top[r] = largest(weights, seen_of(r)) * scaling;
        }
        for (int r = 0; r < rows.count; r++)  // the last row's largest score is long known
            total[r] = weights_of(&s.weights[r * SEGMENT], seen_of(r), scaling, top[r]);
#ifdef MEDUSA_TILES
        if constexpr (TILES) return accumulate_tiles(rows, b, kv, start, skipped, count, s, sums);
#endif
        accumulate(rows, b, kv, start, stop, skipped, count, s, sums, width);
    }

    // Products of queries with turned keys, [rows][stride].
    void scores(int rows, const uint32_t* query, const uint32_t* keys, int stride, int count, float* out) const {
        const int size = this->size();
#ifdef MEDUSA_TILES
        if (TILES) return tile_products(query, size, rows, keys, stride, count, out);
#endif
#define CALL(R) products<T, R>(query + r * size, keys, size, stride, count, out + int64_t(r) * stride)
        FOR_TILES(rows, CALL)
#undef CALL
    }

    // The largest of the scores that are seen.
    static float largest(const float* scores, int seen) {
        vf best = splat(NOTHING);
        for (int j = 0; j < seen; j += LANES) {
            const vf x = load<vf>(scores + j);
            best = x > best ? x : best;
        }
        return ::largest(best);
    }

    // Scores to weights, relative to the largest, and what they sum up to. Those from `seen` on are hidden.
    static float weights_of(float* scores, int seen, float scaling, float top) {
        if (top == NOTHING) seen = 0;
        vf sum = {};
        int j = 0;
        for (; j < seen; j += ABREAST * LANES) {
            vf x[ABREAST];
            UNROLLED for (int i = 0; i < ABREAST; i++) x[i] = fma(load<vf>(scores + j + i * LANES), splat(scaling), splat(-top));
            exponential(x);
            UNROLLED for (int i = 0; i < ABREAST; i++) store(scores + j + i * LANES, x[i]), sum += x[i];
        }
        for (; j < SEGMENT; j += LANES) store(scores + j, vf{});
        return ::sum(sum);
    }

    // Scores are scaled, and bent to stay below a cap.
    void cap(float* scores, int seen) const {
        for (int j = 0; j < seen; j += LANES) {
            const vf x = load<vf>(scores + j), y = x * splat(at.scaling) / splat(at.softcap), size = y < vf{} ? -y : y;
            const vf e = exponential(splat(-2.f) * size), t = (splat(1.f) - e) / (splat(1.f) + e);
            store(scores + j, x == splat(NOTHING) ? x : splat(at.softcap) * (y < vf{} ? -t : t));
        }
    }

    // Positions from .. to - 1 for R rows from r on: what all of them see together, the rest of each by itself.
    template <int R>
    void weigh_run(const Rows& rows, int r, int64_t start, int64_t from, int64_t to, const T* values, const float* weights, float* sums) const {
        const int width = at.width();
        int64_t low = from, high = to;
        for (int i = r; i < r + R; i++) low = std::max(low, rows.first[i]), high = std::min(high, rows.shared[i]);
        low = std::min(low, to), high = std::max(high, low);
        const auto some = [&](auto count, int row, int64_t first, int64_t end) {
            if (first < end)
                weigh<decltype(count)::value>(weights + row * SEGMENT + first - start, values + (first - from) * at.value_step(), at.value_step(), int(end - first),
                                              int(at.dim_v), sums + row * width, width);
        };
        constexpr std::integral_constant<int, 1> one;
        for (int i = r; i < r + R; i++) some(one, i, std::max(from, rows.first[i]), std::min(low, rows.shared[i]));
        some(std::integral_constant<int, R>(), r, low, high);
        for (int i = r; i < r + R; i++) some(one, i, std::max(high, rows.first[i]), std::min(to, rows.shared[i]));
    }

    // Shared positions for all rows together, a row's own ancestors behind them.
    void accumulate(const Rows& rows, int64_t b, int64_t kv, int64_t start, int64_t stop, int skipped, int count, Scratch& s,
                    float* sums, int width) const {
        const int64_t from = start + skipped;
        at.table.runs(from, from + count, [&](int64_t p, int run) {
            const T* values = value_at(b, kv, p);
#define CALL(R) weigh_run<R>(rows, r, start, p, p + run, values, s.weights.data(), sums)
            FOR_TILES(rows.count, CALL)
#undef CALL
        });
        int64_t path[SEGMENT];
        for (int r = 0; r < rows.count; r++) {
            const int64_t own = std::max(rows.shared[r], start), end = std::min(rows.last[r] + 1, stop);
            if (own >= end) continue;
            int64_t n = rows.node[r];
            for (int64_t p = rows.last[r]; p >= own; n = rows.parents[n], p--)
                if (p < stop) path[p - start] = n;
            for (int64_t p = own; p < end; p++) {
                const T* values = value_at(b, kv, rows.length + path[p - start]);
                for (int d = 0; d < at.dim_v; d += LANES) {
                    const vf sum = load<vf>(sums + r * width + d);
                    store(sums + r * width + d, fma(splat(s.weights[r * SEGMENT + p - start]), wide(values + d, int(at.dim_v) - d), sum));
                }
            }
        }
    }

#ifdef MEDUSA_TILES
    // The same by the matrix unit: what rows see together, then row by row the groups with positions of its own, or with
    // numbers that are not finite and may be hidden from it.
    void accumulate_tiles(const Rows& rows, int64_t b, int64_t kv, int64_t start, int skipped, int count, Scratch& s, float* sums) const {
        constexpr int GROUPS = SEGMENT / DEPTH;
        const int dim = int(at.dim_v), width = at.width(), end = skipped + count;
        const int begin = skipped / DEPTH, groups = count > 0 ? (end + DEPTH - 1) / DEPTH : begin;
        const T* values[SEGMENT] = {};  // of what rows see together
        at.table.runs(start + skipped, start + end, [&](int64_t p, int run) {
            const T* first = value_at(b, kv, p);
            for (int i = 0; i < run; i++) values[p - start + i] = first + i * at.value_step();
        });
        grow(s.pairs, SEGMENT / 2 * width), grow(s.halves, BLOCK * SEGMENT);
        bool finite[GROUPS];
        std::fill(finite, finite + GROUPS, true);
        for (int j = begin * DEPTH; j < groups * DEPTH; j += 2)
            finite[j / DEPTH] &= pair_up(values[j], values[j + 1], dim, &s.pairs[j / 2 * width]);
        bool any_apart = std::count(finite, finite + GROUPS, false) > 0;
        int own[BLOCK];  // the group from which on a row has positions of its own
        for (int r = 0; r < rows.count; r++) {
            own[r] = int(std::clamp<int64_t>(rows.shared[r] > rows.last[r] ? SEGMENT : rows.shared[r] - start, 0, SEGMENT)) / DEPTH;
            any_apart |= own[r] < GROUPS;
            for (int group = begin; group < groups; group++) {
                const int place = r * SEGMENT + group * DEPTH;
                const float* weights = &s.weights[place];
                const bool together = group < own[r] && finite[group];
                store(&s.halves[place], together ? _mm512_cvtne2ps_pbh(load<__m512>(weights + LANES), load<__m512>(weights)) : __m512bh());
            }
        }
        MEMORY_SEEN;
        for (int d = 0; d < width; d += SIDE) {
            no_sums();
            for (int group = begin; group < groups; group++)
                if (finite[group]) meet_tiles(rows.count, &s.halves[group * DEPTH], SEGMENT / 2, &s.pairs[group * SIDE * width + d], width);
            put_sums(rows.count, sums + d, width, false);
        }
        if (!any_apart) return;
        const NoDenormals none;
        for (int r = 0; r < rows.count; r++)
            for (int group = 0; group < GROUPS; group++) {
                if ((group < own[r] && finite[group]) || start + group * DEPTH > rows.last[r]) continue;
                const T* seen[DEPTH] = {};
                const int64_t from = start + group * DEPTH, low = std::max(from, rows.first[r]);
                int64_t p = std::min(from + DEPTH - 1, rows.last[r]), n = rows.node[r];
                for (int64_t up = rows.last[r]; up > p; up--) n = rows.parents[n];
                for (; p >= low && p >= rows.shared[r]; n = rows.parents[n], p--) seen[p - from] = value_at(b, kv, rows.length + n);
                for (; p >= low; p--) seen[p - from] = values[p - start];
                weigh_group(&s.weights[r * SEGMENT + group * DEPTH], seen, dim, sums + r * width);
            }
    }
#endif

    // Brings a segment to those before it; segments come in order, empty ones change nothing.
    void merge(int count, const float* top, const float* total, const float* sums, float* tops, float* totals, float* all) const {
        const int width = at.width();
        float before[BLOCK], now[BLOCK];
        for (int r = 0; r < count; r += LANES) {
            const int here = std::min(LANES, count - r);
            const vf first = load<vf>(tops + r), second = wide(top + r, here), best = first > second ? first : second;
            const vf old = exponential(first - best), fresh = exponential(second - best);
            const vf sum = load<vf>(totals + r) * old + wide(total + r, here) * fresh;
            store(before + r, old), store(now + r, fresh), store(tops + r, best);
            store(totals + r, second == splat(NOTHING) ? load<vf>(totals + r) : sum);
        }
        for (int r = 0; r < count; r++)
            for (int d = 0; d < width && top[r] != NOTHING; d += LANES)
                store(all + r * width + d, fma(load<vf>(all + r * width + d), splat(before[r]), load<vf>(sums + r * width + d) * splat(now[r])));
    }

    void finish(const Rows& rows, int64_t b, float* tops, float* totals, float* all) const {
        const int width = at.width();
        for (int r = 0; r < rows.count; r++) {
            float total = totals[r], factor = 1;
            if (at.sinks) {
                const float sink = at.sinks[rows.head[r]], best = std::max(sink, tops[r]);
                factor = exponential(tops[r] - best);
                total = total * factor + exponential(sink - best);
            }
            T* to = out + (at.row(b, rows.node[r]) * at.heads + rows.head[r]) * at.dim_v;
            for (int d = 0; d < at.dim_v; d += LANES)
                put(rounded(load<vf>(all + r * width + d) * splat(factor) / splat(total), T()), to + d, int(at.dim_v) - d);
        }
    }

    // The part of one thread of a team.
    void run(Work& work, Team::Member& member) const {
        const int width = at.width();
        thread_local Scratch s;
        const int64_t units = work.units.size(), part = work.part(at);
        member.share(work.apart ? units * work.segments : 0, [&](int64_t item) {
            const Unit& unit = work.units[item % units];  // rows of the cache hold all key heads: one thread reads them
            float *top = &work.partial[item * part], *total = top + work.rows;
            segment(begin(work, unit, s), unit.b, unit.kv, item / units, s, top, total, total + work.rows);
        });
        member.share(units, [&](int64_t item) {
            const Unit& unit = work.units[item];
            const Rows rows = begin(work, unit, s);
            float tops[BLOCK], totals[BLOCK] = {}, top[BLOCK], total[BLOCK];
            std::fill(tops, tops + BLOCK, NOTHING);
            s.all.assign(rows.count * width, 0.f), grow(s.sums, BLOCK * width);
            for (int64_t index = rows.from / SEGMENT; index * SEGMENT < rows.to; index++) {
                if (work.apart) {
                    const float* from = &work.partial[(index * units + item) * part];
                    merge(rows.count, from, from + work.rows, from + 2 * work.rows, tops, totals, s.all.data());
                } else {
                    segment(rows, unit.b, unit.kv, index, s, top, total, s.sums.data());
                    merge(rows.count, top, total, s.sums.data(), tops, totals, s.all.data());
                }
            }
            finish(rows, unit.b, tops, totals, s.all.data());
        });
    }
};
