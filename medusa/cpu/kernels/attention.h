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
#include "attention_rows.h"
#include "attention_tiles.h"
#include "team.h"

// What rows attend to in a segment: `count` positions from start + skipped on that they may see together, and their own
// ancestors.
struct Part {
    const Rows& rows;
    const uint32_t* query;  // of all rows, arranged
    int64_t b, kv, start;
    int skipped, count;
    bool whole;  // every row sees all positions of the segment together with the others
    // Whether a row has ancestors of its own, or itself, below a position.
    bool own(int r, int64_t stop) const { return rows.shared[r] <= rows.last[r] && rows.shared[r] < stop && rows.last[r] >= start; }
};

struct Scratch {
    std::vector<Buffer<uint32_t>> queries;
    std::vector<int64_t> arranged;  // units of which these are
    Buffer<uint32_t> keys, pairs;
    Buffer<float> weights, tree_scores, sums, all;
    Buffer<bf16> zeros;
    const bf16* values[SEGMENT];  // for the matrix unit: where they stand, and
    bool together[SEGMENT / 32];  // which groups of them it takes
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

    int64_t head(const Unit& unit, const Rows& rows, int r) const { return unit.kv * at.groups() + rows.head[r]; }

    // Words of a query or a key.
    int size() const { return TILES ? (words<T>(at.dim) + 15) / 16 * 16 : words<T>(at.dim); }

    // Queries of a unit's rows, as scores want them.
    void arrange(const Unit& unit, const Rows& rows, Buffer<uint32_t>& to) const {
        const int size = this->size();
        grow(to, BLOCK * size);
        const auto put = [&](int r, uint32_t* to) {
            const T* q = query + head(unit, rows, r) * at.q_head + at.row(unit.b, rows.node[r]) * at.q_row;
            if constexpr (PAIRS<T>) std::fill(to + at.dim / 2, to + size, 0), std::memcpy(to, q, at.dim * sizeof(T));
            else for (int64_t d = 0; d < at.dim; d++) to[d] = bits(widen(q[d]));
        };
#ifdef MEDUSA_TILES
        if constexpr (TILES) {
            alignas(64) uint32_t group[SIDE * size];
            for (int r = 0; r < rows.count; r += SIDE) {
                for (int i = r; i < std::min(r + SIDE, rows.count); i++) put(i, group + (i - r) * size);
                turn_queries(group, size, &to[r]);
            }
            return;
        }
#endif
        for (int r = 0; r < rows.count; r++) put(r, &to[r * size]);
    }

    // One segment: the largest score of each row, the sum of its weights, and the weighted sum of values [rows][width].
    void segment(const Unit& unit, const Rows& rows, const uint32_t* query, int64_t index, Scratch& s, float* top, float* total, float* sums) const {
        const int64_t start = index * SEGMENT, stop = start + SEGMENT;
        std::fill(top, top + rows.count, NOTHING), std::fill(total, total + rows.count, 0.f);
        if (stop <= rows.from || start >= rows.to) return;
        int64_t shared = 0, first = 0, last = stop;
        for (int r = 0; r < rows.count; r++) {
            shared = std::max(shared, rows.shared[r]), first = std::max(first, rows.first[r]);
            last = std::min(last, std::min(rows.shared[r], rows.last[r] + 1));
        }
        const int64_t low = std::max(start, rows.from);
        const int skipped = int(low - start) / LANES * LANES;  // positions that no row sees: a window has passed
        const int count = int(std::max<int64_t>(0, std::min(stop, shared) - start - skipped));
        const Part part{rows, query, unit.b, unit.kv, start, skipped, count, first <= start && last == stop};
        grow(s.weights, BLOCK * SEGMENT);
#ifdef MEDUSA_TILES
        if constexpr (TILES) {
            pair_values(part, s);
            for (int r = 0; r < rows.count; r += SIDE) {
                const int end = std::min(r + SIDE, rows.count);
                weights(part, r, end, s, top, total);
                accumulate_tiles(part, r, end, s, sums);
            }
            return;
        }
#endif
        weights(part, 0, rows.count, s, top, total);
        accumulate(part, s, sums);
    }

    // Weights of rows r .. end - 1, the largest score and the sum of weights of each.
    void weights(const Part& part, int r, int end, Scratch& s, float* top, float* total) const {
        const Rows& rows = part.rows;
        const int64_t start = part.start, stop = start + SEGMENT;
        if (part.count > 0) scores(part, r, end, start + part.skipped, part.count, s, &s.weights[part.skipped], SEGMENT);
        const int nodes = int(at.count(part.b)), stride = (nodes + 2 * LANES - 1) / LANES * LANES;  // a run may end beyond nodes
        bool tails = false;
        for (int i = r; i < end; i++) tails |= part.own(i, stop);
        if (tails) {
            grow(s.tree_scores, int64_t(BLOCK) * stride);
            scores(part, r, end, rows.length, nodes, s, s.tree_scores.data(), stride);
        }
        const float scaling = at.softcap > 0 ? 1 : at.scaling;  // above 0
        constexpr int WHOLE = ABREAST * LANES;  // positions whose scores become weights together
        const auto seen_of = [&](int i) { return int(std::clamp<int64_t>(rows.last[i] + 1 - start, 0, SEGMENT)); };
        for (int i = r; i < end; i++) {
            float* weights = &s.weights[i * SEGMENT];
            if (!part.whole) {
                const int64_t first = std::max(rows.first[i], start), read = start + (seen_of(i) + WHOLE - 1) / WHOLE * WHOLE;
                for (int64_t p = start; p < std::min(first, stop); p++) weights[p - start] = NOTHING;
                int64_t hidden = std::max(std::min(rows.shared[i], stop), start);
                for (; hidden < read && hidden % LANES; hidden++) weights[hidden - start] = NOTHING;
                for (; hidden < read; hidden += LANES) store(weights + hidden - start, splat(NOTHING));
                int64_t p = rows.last[i];
                for (int64_t n = rows.node[i]; part.own(i, stop) && p >= rows.shared[i] && p >= first; n = rows.parents[n], p--)
                    if (p < stop) weights[p - start] = s.tree_scores[int64_t(i) * stride + n];
            }
            if (at.softcap > 0) cap(weights, seen_of(i), at.scaling, at.softcap);
            top[i] = largest_of(weights, seen_of(i)) * scaling;
        }
        for (int i = r; i < end; i++)  // the last row's largest score is long known
            total[i] = weights_of<TILES>(&s.weights[i * SEGMENT], seen_of(i), scaling, top[i]);
    }

    // Products of queries r .. end - 1 with the keys of positions first .. first + count - 1, [rows][stride].
    void scores(const Part& part, int r, int end, int64_t first, int count, Scratch& s, float* out, int stride) const {
        const int dim = int(at.dim);
#ifdef MEDUSA_TILES
        if constexpr (TILES)
            return at.table.runs(first, first + count, [&](int64_t p, int run) {
                tile_products(part.query + r, end - r, key_at(part.b, part.kv, p), at.key_step(), run, dim, out + r * stride + (p - first), stride);
            });
#endif
        grow(s.keys, int64_t(dim + 2 * LANES) * stride);
        at.table.runs(first, first + count, [&](int64_t p, int run) {
            turn(key_at(part.b, part.kv, p), at.key_step(), run, dim, s.keys.data() + (p - first), stride);
        });
        const int size = this->size();
#define CALL(R) products<T, R>(part.query + r * size, s.keys.data(), size, stride, count, out + int64_t(r) * stride)
        FOR_TILES(end, CALL)
#undef CALL
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
    void accumulate(const Part& part, Scratch& s, float* sums) const {
        const Rows& rows = part.rows;
        const int64_t start = part.start, from = start + part.skipped, stop = start + SEGMENT;
        const int width = at.width();
        std::fill(sums, sums + rows.count * width, 0.f);
        at.table.runs(from, from + part.count, [&](int64_t p, int run) {
            const T* values = value_at(part.b, part.kv, p);
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
                const T* values = value_at(part.b, part.kv, rows.length + path[p - start]);
                for (int d = 0; d < at.dim_v; d += LANES) {
                    const vf sum = load<vf>(sums + r * width + d);
                    store(sums + r * width + d, fma(splat(s.weights[r * SEGMENT + p - start]), wide(values + d, int(at.dim_v) - d), sum));
                }
            }
        }
    }

#ifdef MEDUSA_TILES
    static constexpr int GROUPS = SEGMENT / DEPTH;

    // Values of a part as pairs, for the matrix unit, and which groups of them it takes: those of which every row sees all, and
    // those whose numbers are finite: what is hidden weighs 0.
    void pair_values(const Part& part, Scratch& s) const {
        const int64_t start = part.start;
        const int dim = int(at.dim_v), width = at.width(), skipped = part.skipped, end = skipped + part.count;
        const int64_t step = at.value_step();
        grow(s.zeros, width);
        std::fill(s.values, s.values + SEGMENT, s.zeros.data()), std::fill(s.together, s.together + GROUPS, false);
        at.table.runs(start + skipped, start + end, [&](int64_t p, int run) {
            const T* first = value_at(part.b, part.kv, p);
            for (int i = 0; i < run; i++, first += step) s.values[p - start + i] = first;
        });
        grow(s.pairs, SEGMENT / 2 * width);
        for (int j = skipped / DEPTH * DEPTH; j < end; j += DEPTH) {
            s.together[j / DEPTH] = part.whole || finite(s.values + j, dim);
            for (int i = j; i < j + DEPTH; i += 2) pair_up(s.values[i], s.values[i + 1], dim, &s.pairs[i / 2 * width]);
        }
    }

    // The same by the matrix unit for rows r .. end - 1: what they see together, then row by row the groups with positions of
    // its own, and those that the unit does not take.
    void accumulate_tiles(const Part& part, int r, int end, Scratch& s, float* sums) const {
        constexpr int ROW = 2 * SEGMENT;  // numbers between rows of weights
        const Rows& rows = part.rows;
        const int dim = int(at.dim_v), width = at.width();
        bf16* weights = (bf16*)s.weights.data();
        alignas(64) bf16 apart[SIDE * GROUPS][DEPTH];
        struct { int row, group; } places[SIDE * GROUPS];
        int alone = 0;
        for (int group = 0; group < GROUPS; group++)
            for (int i = r; i < end; i++) {
                const int64_t first = part.start + group * DEPTH, last = first + DEPTH - 1;
                if (first > rows.last[i] || last < rows.first[i] || (s.together[group] && !part.own(i, last + 1))) continue;
                bf16* here = weights + i * ROW + group * DEPTH;
                std::memcpy(apart[alone], here, sizeof *apart), std::memset(here, 0, sizeof *apart);
                places[alone++] = {i, group};
            }
        MEMORY_SEEN;
        for (int d = 0; d < width; d += FOUR * SIDE) {
            const int tiles = std::min(FOUR, (width - d) / SIDE);
            no_sums();
            for (int group = 0; group < GROUPS; group++)
                if (s.together[group])
                    meet_four<true>(weights + r * ROW + group * DEPTH, ROW * 2, tiles, [&](int i) {
                        return std::pair(&s.pairs[group * SIDE * width + d + i * SIDE], int64_t(width) * 4);
                    });
            put_four(tiles, sums + r * width + d, width, SIDE);
        }
        if (!alone) return;
        const NoDenormals none;
        for (int i = 0, count; i < alone; i += count) {  // rows of a node, under several heads, go together
            const int r = places[i].row, group = places[i].group;
            const T* seen[DEPTH] = {};
            const int64_t from = part.start + group * DEPTH, low = std::max(from, rows.first[r]);
            int64_t p = std::min(from + DEPTH - 1, rows.last[r]), n = rows.node[r];
            for (int64_t up = rows.last[r]; up > p; up--) n = rows.parents[n];
            for (; p >= low && p >= rows.shared[r]; n = rows.parents[n], p--) seen[p - from] = value_at(part.b, part.kv, rows.length + n);
            for (; p >= low; p--) seen[p - from] = s.values[p - part.start];
            for (count = 1; count < 3 && i + count < alone && places[i + count].group == group && rows.node[r + count] == rows.node[r];) count++;
            with_constant<3>(count, [&](auto some) { weigh_group<decltype(some)::value>(&apart[i], seen, dim, sums + r * width, width); });
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

    void finish(const Unit& unit, const Rows& rows, float* tops, float* totals, float* all) const {
        const int width = at.width();
        for (int r = 0; r < rows.count; r++) {
            float total = totals[r], factor = 1;
            if (at.sinks) {
                const float sink = at.sinks[head(unit, rows, r)], best = std::max(sink, tops[r]);
                factor = exponential(tops[r] - best);
                total = total * factor + exponential(sink - best);
            }
            T* to = out + (at.row(unit.b, rows.node[r]) * at.heads + head(unit, rows, r)) * at.dim_v;
            for (int d = 0; d < at.dim_v; d += LANES)
                put(rounded(load<vf>(all + r * width + d) * splat(factor) / splat(total), T()), to + d, int(at.dim_v) - d);
        }
    }

    // The part of one thread of a team.
    void run(Work& work, Team::Member& member) const {
        const int width = at.width();
        thread_local Scratch s;
        const int64_t units = work.units.size(), part = work.part(at), kept = work.apart ? units : 1;
        if (int64_t(s.queries.size()) < kept) s.queries.resize(kept);
        s.arranged.assign(kept, -1);
        const auto query_of = [&](int64_t index) {  // arranged once
            const int64_t place = index % kept;
            if (s.arranged[place] != index) arrange(work.units[index], work.blocks[work.units[index].rows], s.queries[place]);
            s.arranged[place] = index;
            return s.queries[place].data();
        };
        const auto with_rows = [&](const Unit& unit, auto use) {  // as far as this layer lets them see
            const Rows& rows = work.blocks[unit.rows];
            at.window || at.chunk ? use(rows.seen_by(at)) : use(rows);
        };
        member.share(work.apart ? units * work.segments : 0, [&](int64_t item) {
            const Unit& unit = work.units[item % units];  // rows of the cache hold all key heads: one thread reads them
            float *top = &work.partial[item * part], *total = top + work.rows;
            with_rows(unit, [&](const Rows& rows) {
                segment(unit, rows, query_of(item % units), item / units, s, top, total, total + work.rows);
            });
        });
        member.share(units, [&](int64_t item) {
            const Unit& unit = work.units[item];
            with_rows(unit, [&](const Rows& rows) {
                float tops[BLOCK], totals[BLOCK] = {}, top[BLOCK], total[BLOCK];
                std::fill(tops, tops + BLOCK, NOTHING);
                s.all.assign(rows.count * width, 0.f), grow(s.sums, BLOCK * width);
                for (int64_t index = rows.from / SEGMENT; index * SEGMENT < rows.to; index++) {
                    if (work.apart) {
                        const float* from = &work.partial[(index * units + item) * part];
                        merge(rows.count, from, from + work.rows, from + 2 * work.rows, tops, totals, s.all.data());
                    } else {
                        segment(unit, rows, query_of(item), index, s, top, total, s.sums.data());
                        merge(rows.count, top, total, s.sums.data(), tops, totals, s.all.data());
                    }
                }
                finish(unit, rows, tops, totals, s.all.data());
            });
        });
    }
};
