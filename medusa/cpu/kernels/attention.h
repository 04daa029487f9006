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

#include "team.h"
#include "tree.h"
#include "vectors.h"

constexpr int SEGMENT = 128;  // positions; a multiple of LANES
constexpr int BLOCK = 48;     // rows (nodes x query heads of a key head) that share a segment's keys
constexpr int TILE = 6;       // rows in registers, times so many vectors:
constexpr int VECTORS = LANES == 8 ? 2 : 4;
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

// How queries meet keys of type T: a word of either, and its products added to a sum.
template <class T> struct Score {
    static constexpr int PER_WORD = 1;  // numbers
    static vf add(vf sum, vu query, vu key) { return fma(vf(query), vf(key), sum); }
};
#if defined(__AVX512BF16__)
template <> struct Score<bf16> {
    static constexpr int PER_WORD = 2;
    static vf add(vf sum, vu query, vu key) { return vf(_mm512_dpbf16_ps(__m512(sum), __m512bh(query), __m512bh(key))); }
};
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <> struct Score<bf16> {
    static constexpr int PER_WORD = 2;
    static vf add(vf sum, vu query, vu key) {
        return vf(vbfdotq_f32(float32x4_t(sum), vreinterpretq_bf16_u32(uint32x4_t(query)), vreinterpretq_bf16_u32(uint32x4_t(key))));
    }
};
#endif
template <class T> constexpr bool PAIRS = Score<T>::PER_WORD * sizeof(T) == 4 && sizeof(T) == 2;
template <class T> static int words(int64_t dim) { return int(dim + Score<T>::PER_WORD - 1) / Score<T>::PER_WORD; }

// A word as it stands, or two numbers to a word, the first low.
template <class T> static inline void spread(vu word, uint32_t* to, int stride) {
    if constexpr (sizeof(T) == 4 || PAIRS<T>) store(to, word);
    else if constexpr (std::is_same_v<T, f16>)
        store(to, from_f16(__builtin_convertvector(word & 0xffff, vh))), store(to + stride, from_f16(__builtin_convertvector(word >> 16, vh)));
    else store(to, word << 16), store(to + stride, word & 0xffff0000u);
}

// Keys [count, dim] to columns of words [words][stride]; columns up to a multiple of LANES, and rows behind dim up to a
// multiple of 2 LANES, are written.
template <class T> static void turn(const T* keys, int64_t step, int count, int dim, uint32_t* to, int stride) {
    constexpr int PER_VECTOR = LANES * 4 / sizeof(T), ROWS_OF_WORD = sizeof(T) == 4 || PAIRS<T> ? 1 : 2;
    for (int first = 0; first < count; first += LANES)
        for (int d = 0; d < dim; d += PER_VECTOR) {
            vu rows[LANES];
            const T* key = keys + first * step + d;
            if (first + LANES <= count && d + PER_VECTOR <= dim)
                for (int i = 0; i < LANES; i++) rows[i] = load<vu>(key + i * step);
            else
                for (int i = 0; i < LANES; i++) {
                    T part[PER_VECTOR] = {};
                    if (first + i < count) std::memcpy(part, key + i * step, std::min(PER_VECTOR, dim - d) * sizeof(T));
                    rows[i] = load<vu>(part);
                }
            transpose(rows);
            uint32_t* words = to + int64_t(d / Score<T>::PER_WORD) * stride + first;
            for (int i = 0; i < LANES; i++) spread<T>(rows[i], words + int64_t(i) * ROWS_OF_WORD * stride, stride);
        }
}

// Lets rows [count, dim] come near before they are asked for.
template <class T> static inline void expect(const T* rows, int64_t step, int count, int64_t dim) {
    for (int i = 0; i < count; i++)
        for (int64_t d = 0; d < dim; d += 64 / sizeof(T)) __builtin_prefetch(rows + i * step + d);
}

// Products [R, C x LANES] of R queries with turned keys: each a chain along dim.
template <class T, int R, int C> static void products(const uint32_t* query, const uint32_t* keys, int words, int stride, float* out) {
    vf sums[R][C] = {};
    for (int d = 0; d < words; d++) {
        vu key[C];
        UNROLLED for (int c = 0; c < C; c++) key[c] = load<vu>(keys + int64_t(d) * stride + c * LANES);
        UNROLLED for (int r = 0; r < R; r++) {
            const vu word = vu{} + query[r * words + d];
            UNROLLED for (int c = 0; c < C; c++) sums[r][c] = Score<T>::add(sums[r][c], word, key[c]);
        }
    }
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int c = 0; c < C; c++) store(out + r * stride + c * LANES, sums[r][c]);
}
template <class T, int R>
static void products(const uint32_t* query, const uint32_t* keys, int words, int stride, int count, float* out) {
    int k = 0;
    for (; k + (VECTORS - 1) * LANES < count; k += VECTORS * LANES) products<T, R, VECTORS>(query, keys + k, words, stride, out + k);
    for (; k < count; k += LANES) products<T, R, 1>(query, keys + k, words, stride, out + k);
}

// Adds weights [R, count] times values [count, C x LANES] to sums: each a chain along positions.
template <int R, int C, class T>
static void weigh(const float* weights, const T* values, int64_t step, int count, int room, float* sums, int width) {
    vf total[R][C];
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int c = 0; c < C; c++) total[r][c] = load<vf>(sums + r * width + c * LANES);
    for (int j = 0; j < count; j++) {
        vf value[C];
        UNROLLED for (int c = 0; c < C; c++) value[c] = C > 1 ? wide(values + j * step + c * LANES) : wide(values + j * step, room);
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int c = 0; c < C; c++) total[r][c] = fma(splat(weights[r * SEGMENT + j]), value[c], total[r][c]);
    }
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int c = 0; c < C; c++) store(sums + r * width + c * LANES, total[r][c]);
}
template <int R, class T>
static void weigh(const float* weights, const T* values, int64_t step, int count, int dim, float* sums, int width) {
    constexpr int WIDE = VECTORS * LANES;
    int d = 0;
    for (; d + WIDE <= dim; d += WIDE) weigh<R, VECTORS>(weights, values + d, step, count, 0, sums + d, width);
    for (; d < dim; d += LANES) weigh<R, 1>(weights, values + d, step, count, dim - d, sums + d, width);
}

#define FOR_TILES(rows, CALL)                                        \
    for (int r = 0; r < rows; r += TILE) switch (std::min(TILE, rows - r)) { \
        case 6: CALL(6); break; case 5: CALL(5); break; case 4: CALL(4); break; \
        case 3: CALL(3); break; case 2: CALL(2); break; default: CALL(1); }

// Where the cache rows of sequences stand: one after another, or in blocks.
struct Table {
    const int64_t* blocks;    // [batch, stride] the blocks of each sequence in order; null = its rows follow each other
    int64_t stride, rows;     // rows of a block
    int64_t row(int64_t b, int64_t position, int64_t capacity) const {
        return blocks ? blocks[b * stride + position / rows] * rows + position % rows : b * capacity + position;
    }
    // Calls use(first position, count) for each run of rows from .. to - 1 that follow each other.
    template <class Use> void runs(int64_t from, int64_t to, Use use) const {
        for (int64_t end; from < to; from = end) {
            end = blocks ? std::min(to, (from / rows + 1) * rows) : to;
            use(from, int(end - from));
        }
    }
};

struct Layer {
    int64_t batch, heads, kv_heads, nodes, dim, dim_v;
    const int64_t *lengths, *parents;
    int64_t parents_b, q_b, q_h, q_n, k_b, k_h, k_s, v_b, v_h, v_s;
    const float* sinks;
    float scaling, softcap;
    int64_t window, chunk;
    const int64_t* firsts;  // [batch + 1] where the rows of each sequence begin where numbers differ, of parents too; else null
    Table table;
    int64_t count(int64_t b) const { return firsts ? firsts[b + 1] - firsts[b] : nodes; }
    const int64_t* parents_of(int64_t b) const { return parents + (firsts ? firsts[b] : b * parents_b); }
    int64_t groups() const { return heads / kv_heads; }
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
    Buffer<uint32_t> query, keys, tree_keys;
    Buffer<float> weights, tree_scores, sums, all;
    std::vector<int64_t> depth, leading;
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
    int64_t segments = 1, rows = 0;  // of a unit, at most
    bool apart;
    std::unique_ptr<float[]> partial;

    Work(const Layer& at, int threads) {
        for (int64_t b = 0; b < at.batch; b++) {
            const int64_t count = at.count(b) * at.groups();
            segments = std::max(segments, (at.lengths[b] + at.count(b) - 1) / SEGMENT + 1);
            rows = std::max(rows, std::min<int64_t>(BLOCK, count));
            for (int64_t kv = 0; kv < at.kv_heads; kv++)
                for (int64_t block = 0; block * BLOCK < count; block++) units.push_back({b, kv, block});
        }
        apart = int64_t(units.size()) < 4 * threads && threads > 1 && segments > 1;
        if (apart) partial.reset(new float[units.size() * segments * part(at)]);
    }
    int64_t part(const Layer& at) const { return rows * (at.width() + 2); }  // numbers of one segment of a unit
};

template <class T> struct Attention {
    const Layer& at;
    const T *query, *key, *value;
    T* out;

    const T* key_at(int64_t b, int64_t kv, int64_t position) const {
        return key + kv * at.k_h + (at.table.blocks ? at.table.row(b, position, 0) * at.k_s : b * at.k_b + position * at.k_s);
    }
    const T* value_at(int64_t b, int64_t kv, int64_t position) const {
        return value + kv * at.v_h + (at.table.blocks ? at.table.row(b, position, 0) * at.v_s : b * at.v_b + position * at.v_s);
    }

    // depth of each node, and how many of its ancestors (itself included), from the root on, stand at their own position
    void walk(int64_t b, Scratch& s) const {
        const int64_t* parents = at.parents_of(b);
        s.depth.resize(at.count(b)), s.leading.assign(at.count(b), 1);
        depths(parents, at.count(b), s.depth.data());
        for (int64_t n = 1; n < at.count(b); n++) {
            int64_t p = parents[n];
            s.leading[n] = s.leading[p] + (s.leading[p] == s.depth[n] && s.depth[n] == n);
        }
    }

    Rows begin(const Unit& unit, Scratch& s) const {
        const auto [b, kv, block] = unit;
        Rows rows;
        rows.length = at.lengths[b], rows.parents = at.parents_of(b);
        walk(b, s);
        const int size = words<T>(at.dim);
        s.query.resize(BLOCK * size);
        int64_t first = block * BLOCK, groups = at.groups();
        rows.count = int(std::clamp<int64_t>(at.count(b) * groups - first, 0, BLOCK));
        const T* queries = query + (at.firsts ? at.firsts[b] * at.q_n : b * at.q_b);
        for (int r = 0; r < rows.count; r++) {
            int64_t n = (first + r) / groups, h = kv * groups + (first + r) % groups;
            int64_t p = rows.length + s.depth[n];
            rows.node[r] = int(n), rows.head[r] = int(h), rows.last[r] = p;
            rows.shared[r] = rows.length + s.leading[n];
            rows.first[r] = at.window ? std::max<int64_t>(0, p - at.window + 1) : at.chunk ? p / at.chunk * at.chunk : 0;
            rows.from = std::min(rows.from, rows.first[r]), rows.to = std::max(rows.to, p + 1);
            const T* q = queries + h * at.q_h + n * at.q_n;
            uint32_t* to = &s.query[r * size];
            if constexpr (PAIRS<T>) to[size - 1] = 0, std::memcpy(to, q, at.dim * sizeof(T));
            else for (int64_t d = 0; d < at.dim; d++) to[d] = bits(widen(q[d]));
        }
        return rows;
    }

    // One segment: the largest score of each row, the sum of its weights, and the weighted sum of values [rows][width].
    void segment(const Rows& rows, int64_t b, int64_t kv, int64_t index, Scratch& s, float* top, float* total, float* sums) const {
        const int64_t start = index * SEGMENT, stop = start + SEGMENT;
        const int dim = int(at.dim), size = words<T>(dim), width = at.width();
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
        s.keys.resize((at.dim + 2 * LANES) * SEGMENT), s.weights.resize(BLOCK * SEGMENT);
        if (count > 0) {
            const int64_t first = start + skipped;
            at.table.runs(first, first + count, [&](int64_t p, int run) {
                expect(value_at(b, kv, p), at.v_s, run, at.dim_v);
                turn(key_at(b, kv, p), at.k_s, run, dim, s.keys.data() + (p - first), SEGMENT);
            });
#define CALL(R) products<T, R>(&s.query[r * size], s.keys.data(), size, SEGMENT, count, &s.weights[r * SEGMENT + skipped])
            FOR_TILES(rows.count, CALL)
#undef CALL
        }
        const int nodes = int(at.count(b)), stride = (nodes + 2 * LANES - 1) / LANES * LANES;  // a run may end beyond nodes
        if (tails) {
            s.tree_keys.resize(int64_t(dim + 2 * LANES) * stride), s.tree_scores.resize(int64_t(BLOCK) * stride);
            at.table.runs(rows.length, rows.length + nodes, [&](int64_t p, int run) {
                turn(key_at(b, kv, p), at.k_s, run, dim, s.tree_keys.data() + (p - rows.length), stride);
            });
#define CALL(R) products<T, R>(&s.query[r * size], s.tree_keys.data(), size, stride, nodes, &s.tree_scores[int64_t(r) * stride])
            FOR_TILES(rows.count, CALL)
#undef CALL
        }
        for (int r = 0; r < rows.count; r++) {
            float* weights = &s.weights[r * SEGMENT];
            const int64_t seen = std::min(rows.shared[r], stop), first = std::max(rows.first[r], start);
            for (int64_t p = start; p < std::min(first, stop); p++) weights[p - start] = NOTHING;
            for (int64_t p = std::max(seen, start); p < stop; p++) weights[p - start] = NOTHING;
            if (rows.shared[r] <= rows.last[r]) {
                int64_t p = rows.last[r];
                for (int64_t n = rows.node[r]; p >= rows.shared[r] && p >= first; n = rows.parents[n], p--)
                    if (p < stop) weights[p - start] = s.tree_scores[int64_t(r) * stride + n];
            }
            normalise(weights, top[r], total[r]);
        }
        accumulate(rows, b, kv, start, stop, skipped, count, s, sums, width);
    }

    void normalise(float* weights, float& top, float& total) const {
        vf best = splat(NOTHING);
        for (int j = 0; j < SEGMENT; j += LANES) {
            vf x = load<vf>(weights + j);
            vf scaled = x * splat(at.scaling);
            if (at.softcap > 0) {
                vf y = scaled / splat(at.softcap);
                vf size = y < vf{} ? -y : y;
                vf e = exponential(splat(-2.f) * size);
                vf t = (splat(1.f) - e) / (splat(1.f) + e);
                scaled = splat(at.softcap) * (y < vf{} ? -t : t);
            }
            x = x == splat(NOTHING) ? x : scaled;
            store(weights + j, x);
            best = x > best ? x : best;
        }
        for (int j = 0; j < LANES; j++) top = std::max(top, float(best[j]));
        if (top == NOTHING) { std::fill(weights, weights + SEGMENT, 0.f); return; }
        vf sum = {};
        for (int j = 0; j < SEGMENT; j += LANES) {
            vf x = exponential(load<vf>(weights + j) - splat(top));
            store(weights + j, x);
            sum += x;
        }
        for (int j = 0; j < LANES; j++) total += sum[j];
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
                weigh<decltype(count)::value>(weights + row * SEGMENT + first - start, values + (first - from) * at.v_s, at.v_s, int(end - first),
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

    // Brings a segment to those before it; segments come in order, empty ones change nothing.
    void merge(int count, const float* top, const float* total, const float* sums, float* tops, float* totals, float* all) const {
        const int width = at.width();
        for (int r = 0; r < count; r++) {
            if (top[r] == NOTHING) continue;
            const float best = std::max(top[r], tops[r]);
            const float before = exponential(tops[r] - best), now = exponential(top[r] - best);
            tops[r] = best;
            totals[r] = totals[r] * before + total[r] * now;
            for (int d = 0; d < width; d += LANES)
                store(all + r * width + d, fma(load<vf>(all + r * width + d), splat(before), load<vf>(sums + r * width + d) * splat(now)));
        }
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
            const int64_t row = (at.firsts ? at.firsts[b] : b * at.nodes) + rows.node[r];
            T* to = out + (row * at.heads + rows.head[r]) * at.dim_v;
            for (int64_t d = 0; d < at.dim_v; d++) narrow(all[r * width + d] * factor / total, to + d);
        }
    }

    // The part of one thread of a team.
    void run(Work& work, Team::Member& member) const {
        const int width = at.width();
        thread_local Scratch s;
        const int64_t units = work.units.size(), part = work.part(at);
        member.share(work.apart ? units * work.segments : 0, [&](int64_t item) {
            const Unit& unit = work.units[item / work.segments];
            float *top = &work.partial[item * part], *total = top + work.rows;
            segment(begin(unit, s), unit.b, unit.kv, item % work.segments, s, top, total, total + work.rows);
        });
        member.share(units, [&](int64_t item) {
            const Unit& unit = work.units[item];
            const Rows rows = begin(unit, s);
            float tops[BLOCK], totals[BLOCK] = {}, top[BLOCK], total[BLOCK];
            std::fill(tops, tops + BLOCK, NOTHING);
            s.all.assign(rows.count * width, 0.f), s.sums.resize(BLOCK * width);
            for (int64_t index = rows.from / SEGMENT; index * SEGMENT < rows.to; index++) {
                if (work.apart) {
                    const float* from = &work.partial[(item * work.segments + index) * part];
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
