// A decoder's whole pass over tree rows, for families whose layers are the usual block: norm, attention with rotary
// positions, residual, norm, gated MLP, residual. Numbers are rounded to T where transformers rounds them.
//
// One team of threads runs through all layers, and meets where one stage reads what another thread wrote.
#pragma once
#include "attention.h"
#include "int8.h"
#include "tiles.h"

struct Block {
    Linear query, key, value, output, gate, up, down;
    const void *norm, *mlp_norm, *query_norm, *key_norm;  // weights; the last two [D] or null
    void *keys, *values;                                  // the layer's cache, [slots, capacity, kv heads, D], or blocks
    int64_t window, chunk;                                // 0 = none
    int64_t tap;                                          // where its output goes in a row of hidden states; 0 = nowhere
};

struct Pass {
    int64_t half, int8, threads, batch, hidden, inner, heads, kv_heads, dim, rotated, layers, capacity, width;
    float epsilon, scaling, residual;
    const int64_t *lengths, *parents, *positions;  // [batch], [rows], [rows]
    const int64_t* firsts;                         // [batch + 1] where the rows of each sequence begin
    Table table;
    const void *cosines, *sines;                   // [positions, rotated]
    const void* norm;
    const void* embedded;  // [rows, hidden]
    void* out;             // [rows, width]: the last hidden state, then what is tapped
    const Block* blocks;
};

constexpr int64_t SLAB = 256;      // rows whose inner numbers are kept at a time
constexpr int64_t COLUMNS = 384;   // of gates that are computed at a time, at least: whole tiles of every kind
constexpr int64_t MIDDLE = 65536;  // numbers that stay in a core's cache

template <class T, class W> class Run {  // W: how its weights are met
    const Pass& at;
    const int64_t rows = at.firsts[at.batch];
    const int64_t wide_hidden = W::room(at.hidden), wide_inner = W::room(at.inner);
    const int64_t queries = at.heads * at.dim, keys = at.kv_heads * at.dim, wide_queries = W::room(queries);
    Buffer<float> stream;
    Buffer<T> projected, middle;
    Buffer<typename W::number> x, gated;
    std::vector<T> query, attended;
    std::vector<int64_t> places;  // of each row in the cache
    Team team;

    // A row divided by its root mean square, times a weight.
    template <class N> static void normed(const N* from, const T* weight, int64_t count, float epsilon, float* to) {
        vf squares = {};
        for (int64_t i = 0; i < count; i += LANES) {
            const vf numbers = wide(from + i, int(count - i));
            squares += numbers * numbers;
        }
        float sum = 0;
        for (int j = 0; j < LANES; j++) sum += squares[j];
        const float factor = 1 / std::sqrt(sum / count + epsilon);
        for (int64_t i = 0; i < count; i += LANES) {
            const int here = int(count - i);
            put(rounded(wide(weight + i, here) * rounded(wide(from + i, here) * splat(factor), T()), T()), to + i, here);
        }
    }

    void norm_rows(const void* weight, int thread, int threads) {
        const Share share(rows, 1, thread, threads);
        float row[at.hidden];
        for (int64_t r = share.first; r < share.last; r++) {
            normed(&stream[r * at.hidden], (const T*)weight, at.hidden, at.epsilon, row);
            W::arrange(row, at.hidden, x.data(), wide_hidden, r, 0);
        }
        team.meet(threads);
    }

    // Layers that read the same rows, their outputs side by side.
    template <size_t N>
    void project(const Linear (&layers)[N], const typename W::number* from, T* to, int thread, int threads) {
        int64_t total = 0, begin = 0;
        for (const Linear& layer : layers) total += layer.outputs;
        const Share share(total, W::OUTPUTS, thread, threads);
        for (const Linear& layer : layers) {
            const int64_t first = std::max(share.first, begin), last = std::min(share.last, begin + layer.outputs);
            if (first < last) W::linear(layer, from, rows, to + begin, total, first - begin, last - begin);
            begin += layer.outputs;
        }
        team.meet(threads);
    }

    // One head's numbers, normed where the family does so, turned by the row's position.
    void turned(const T* from, const void* weight, int64_t position, T* to) const {
        float head[at.dim];
        if (weight) normed(from, (const T*)weight, at.dim, at.epsilon, head);
        else for (int64_t d = 0; d < at.dim; d += LANES) put(wide(from + d, int(at.dim - d)), head + d, int(at.dim - d));
        const int64_t half = at.rotated / 2;
        const T *cosines = (const T*)at.cosines + position * at.rotated, *sines = (const T*)at.sines + position * at.rotated;
        const auto turn = [&](int64_t d, int64_t other, float sign, int here) {
            const vf straight = rounded(wide(head + d, here) * wide(cosines + d, here), T());
            const vf across = rounded(splat(sign) * wide(head + other, here) * wide(sines + d, here), T());
            put(rounded(straight + across, T()), to + d, here);
        };
        for (int64_t d = 0; d < half; d += LANES) {
            const int here = int(std::min<int64_t>(LANES, half - d));
            turn(d, d + half, -1, here), turn(d + half, d, 1, here);
        }
        for (int64_t d = at.rotated; d < at.dim; d++) narrow(head[d], to + d);
    }

    void place_heads(const Block& block, int thread, int threads) {
        const int64_t total = queries + 2 * keys;
        const Share share(rows, 1, thread, threads);
        for (int64_t r = share.first; r < share.last; r++) {
            const int64_t row = places[r];
            const T* from = &projected[r * total];
            for (int64_t h = 0; h < at.heads; h++)
                turned(from + h * at.dim, block.query_norm, at.positions[r], &query[r * queries + h * at.dim]);
            for (int64_t h = 0; h < at.kv_heads; h++)
                turned(from + queries + h * at.dim, block.key_norm, at.positions[r], (T*)block.keys + row * keys + h * at.dim);
            std::memcpy((T*)block.values + row * keys, from + queries + keys, keys * sizeof(T));
        }
        team.meet(threads);
    }

    void attend(const Block& block, Work& work, int thread, int threads) {
        const int64_t slot = at.capacity * keys;
        const Layer layer{at.batch, at.heads, at.kv_heads, 0, at.dim, at.dim, at.lengths, at.parents, 0, 0, at.dim, queries, slot, at.dim, keys, slot, at.dim, keys,
                          nullptr, at.scaling, 0, block.window, block.chunk, at.firsts, at.table};
        Attention<T>{layer, query.data(), (const T*)block.keys, (const T*)block.values, attended.data()}.run(work, team, threads);
        const Share share(rows, 1, thread, threads);
        float row[queries];
        for (int64_t r = share.first; r < share.last; r++) {
            for (int64_t i = 0; i < queries; i++) row[i] = widen(attended[r * queries + i]);
            W::arrange(row, queries, x.data(), wide_queries, r, 0);
        }
        team.meet(threads);
    }

    // Adds a layer's output for `count` rows to those of the residual stream from `first` on.
    void add(const Linear& layer, const typename W::number* from, int64_t first, int64_t count, int thread, int threads) {
        const Share share(at.hidden, W::OUTPUTS, thread, threads);
        W::linear(layer, from, count, projected.data(), at.hidden, share.first, share.last);
        for (int64_t r = 0; r < count; r++)
            for (int64_t i = share.first; i < share.last; i += LANES) {
                const int here = int(std::min<int64_t>(LANES, share.last - i));
                float* sum = &stream[(first + r) * at.hidden + i];
                const vf more = wide(&projected[r * at.hidden + i], here);
                put(rounded(wide(sum, here) + rounded(more * splat(at.residual), T()), T()), sum, here);
            }
        team.meet(threads);
    }

    // Columns of gates and of what they let through at a time.
    int64_t columns(int64_t count) const { return std::min(at.inner, std::max<int64_t>(1, MIDDLE / (count * COLUMNS)) * COLUMNS); }

    void gate(const Block& block, int64_t first, int64_t count, int thread, int threads) {
        const Share share(at.inner, W::UNIT, thread, threads);
        const int64_t most = columns(count);
        T *gates = &middle[thread * 2 * count * most], *ups = gates + count * most;
        const typename W::number* from = x.data() + first * wide_hidden;
        float row[most];
        for (int64_t begin = share.first; begin < share.last; begin += most) {
            const int64_t end = std::min(begin + most, share.last);
            W::linear(block.gate, from, count, gates - begin, most, begin, end);
            W::linear(block.up, from, count, ups - begin, most, begin, end);
            for (int64_t r = 0; r < count; r++) {
                for (int64_t i = 0; i < end - begin; i += LANES) {
                    const int here = int(std::min<int64_t>(LANES, end - begin - i));
                    const vf g = wide(gates + r * most + i, here), up = wide(ups + r * most + i, here);
                    put(rounded(rounded(g * sigmoid(g), T()) * up, T()), row + i, here);
                }
                W::arrange(row, end - begin, gated.data(), wide_inner, r, begin);
            }
        }
        team.meet(threads);
    }

    void tap(int64_t column, int thread, int threads) {
        const Share share(rows, 1, thread, threads);
        for (int64_t r = share.first; r < share.last; r++)
            for (int64_t i = 0; i < at.hidden; i++) narrow(stream[r * at.hidden + i], (T*)at.out + r * at.width + column + i);
    }

  public:
    explicit Run(const Pass& pass) : at(pass) {
        stream.resize(rows * at.hidden), x.resize(W::rows(rows) * std::max(wide_hidden, wide_queries));
        projected.resize(rows * std::max(queries + 2 * keys, at.hidden));
        const int64_t slab = std::min(rows, SLAB);
        gated.resize(W::rows(slab) * wide_inner), middle.resize(at.threads * 2 * slab * columns(slab));
        query.resize(rows * queries), attended.resize(rows * queries);
        for (int64_t b = 0; b < at.batch; b++)
            for (int64_t n = 0; n < at.firsts[b + 1] - at.firsts[b]; n++)
                places.push_back(at.table.row(b, at.lengths[b] + n, at.capacity));
    }

    void operator()() {
        Layer any{at.batch, at.heads, at.kv_heads, 0, at.dim, at.dim, at.lengths};
        any.firsts = at.firsts;
        Work work(any, int(at.threads));
#pragma omp parallel num_threads(int(at.threads))
        {
            const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
            const typename W::Thread equipped;
            const Share share(rows * at.hidden, 1, thread, threads);
            for (int64_t i = share.first; i < share.last; i++) stream[i] = widen(((const T*)at.embedded)[i]);
            team.meet(threads);
            for (const Block* block = at.blocks; block < at.blocks + at.layers; block++) {
                norm_rows(block->norm, thread, threads);
                project({block->query, block->key, block->value}, x.data(), projected.data(), thread, threads);
                place_heads(*block, thread, threads);
                attend(*block, work, thread, threads);
                add(block->output, x.data(), 0, rows, thread, threads);
                norm_rows(block->mlp_norm, thread, threads);
                for (int64_t first = 0; first < rows; first += SLAB) {
                    const int64_t count = std::min(SLAB, rows - first);
                    gate(*block, first, count, thread, threads);
                    add(block->down, gated.data(), first, count, thread, threads);
                }
                if (block->tap) tap(block->tap, thread, threads);
            }
            const Share mine(rows, 1, thread, threads);
            for (int64_t r = mine.first; r < mine.last; r++) {
                float* row = &stream[r * at.hidden];
                normed(row, (const T*)at.norm, at.hidden, at.epsilon, row);
                for (int64_t i = 0; i < at.hidden; i++) narrow(row[i], (T*)at.out + r * at.width + i);
            }
        }
    }
};
