// Recurrent layers over trees, see medusa/recurrence/rules.py. A row's results are equal bit by bit in every tree: they come
// from its parent's state alone, and each sum has one order.
#pragma once
#include "team.h"
#include "vectors.h"

struct Recurring {
    int64_t threads, texts, rows, heads, keys, values;
    const float *query, *key;      // [texts, rows, heads, keys]; no query: no outputs
    const float* value;            // [texts, rows, heads, values]
    const float *decay, *rate;     // [texts, rows, heads]; no rate: values are added as they are
    const float* state;            // [texts, heads, keys, values]
    const bool* seen;              // [texts, rows, rows], by a row: itself and its ancestors; none: rows are a chain
    float *out, *end;              // [texts, rows, heads, values]; of a chain [texts, heads, keys, values]
};

// Some columns of a head's state: each column goes its own way.
class Recurrence {
    static constexpr int N = ABREAST;
    static constexpr int64_t WIDTH = N * LANES;
    const Recurring& at;
    Buffer<float> states;  // of nodes with children, [keys, WIDTH] each; the first is the one before the rows
    std::vector<int64_t> above;
    std::vector<bool> needed;

    int64_t parent(int64_t text, int64_t row) const {
        if (!at.seen) return row - 1;
        const bool* seen = at.seen + (text * at.rows + row) * at.rows;
        int64_t node = row - 1;
        while (node >= 0 && !seen[node]) node--;
        return node;
    }

  public:
    explicit Recurrence(const Recurring& at) : at(at), above(at.rows), needed(at.rows) {}

    static int64_t pieces(const Recurring& at) { return at.texts * at.heads * blocks(at); }
    static int64_t blocks(const Recurring& at) { return (at.values + WIDTH - 1) / WIDTH; }

    void operator()(int64_t piece) {
        const int64_t first = piece % blocks(at) * WIDTH, head = piece / blocks(at) % at.heads, text = piece / blocks(at) / at.heads;
        const int64_t here = std::min(WIDTH, at.values - first), K = at.keys, size = K * WIDTH;
        const float* from = at.state + (text * at.heads + head) * K * at.values + first;
        for (int64_t r = 0; r < at.rows; r++) {
            above[r] = parent(text, r), needed[r] = !at.seen;
            if (above[r] >= 0) needed[above[r]] = true;
        }
        grow(states, size_t(size * (at.seen ? at.rows + 1 : 1)));
        for (int64_t i = 0; i < K; i++) move(from + i * at.values, &states[i * WIDTH], here);
        for (int64_t r = 0; r < at.rows; r++) {
            const float* before = &states[at.seen ? (above[r] + 1) * size : 0];
            row((text * at.rows + r) * at.heads + head, first, here, before, needed[r] ? &states[at.seen ? (r + 1) * size : 0] : nullptr);
        }
        if (!at.end) return;
        float* to = at.end + (text * at.heads + head) * K * at.values + first;
        for (int64_t i = 0; i < K; i++) move(&states[i * WIDTH], to + i * at.values, here);
    }

  private:
    static void move(const float* from, float* to, int64_t count) {
        for_vectors(count, [&](int64_t i, int some) { put(wide(from + i, some), to + i, some); });
    }

    void row(int64_t r, int64_t first, int64_t here, const float* before, float* after) {
        const float *key = at.key + r * at.keys, *query = at.query ? at.query + r * at.keys : nullptr;
        const vf factor = splat(exponential(at.decay[r]));
        vf known[N] = {}, read[N] = {}, u[N];
        if (at.rate && query)
            for (int64_t k = 0; k < at.keys; k++) {
                const vf x = splat(key[k]), y = splat(query[k]);
                EACH {
                    const vf s = load<vf>(before + k * WIDTH + i * LANES);
                    known[i] = fma(x, s, known[i]), read[i] = fma(y, s, read[i]);
                }
            }
        else if (at.rate) sum_rows(key, before, known);
        else if (query) sum_rows(query, before, read);
        EACH {
            const int64_t more = i * LANES, some = here - more;
            u[i] = some > 0 ? wide(at.value + r * at.values + first + more, int(std::min<int64_t>(some, LANES))) : vf{};
            if (at.rate) u[i] = splat(at.rate[r]) * (u[i] - factor * known[i]);
        }
        if (query) {
            vf both{};
            for_vectors(at.keys, [&](int64_t i, int some) { both = fma(wide(key + i, some), wide(query + i, some), both); });
            const vf weight = splat(sum(both));
            EACH {
                const int64_t more = i * LANES, some = here - more;
                const vf x = fma(weight, u[i], factor * read[i]);
                if (some > 0) put(x, at.out + r * at.values + first + more, int(std::min<int64_t>(some, LANES)));
            }
        }
        if (!after) return;
        for (int64_t k = 0; k < at.keys; k++) {
            const vf x = splat(key[k]);
            EACH {
                const int64_t place = k * WIDTH + i * LANES;
                store(after + place, fma(x, u[i], factor * load<vf>(before + place)));
            }
        }
    }

    // The sum of the state's rows, each times its weight.
    void sum_rows(const float* weights, const float* before, vf (&sums)[N]) const {
        for (int64_t k = 0; k < at.keys; k++) {
            const vf x = splat(weights[k]);
            EACH sums[i] = fma(x, load<vf>(before + k * WIDTH + i * LANES), sums[i]);
        }
    }
};

struct Convolving {
    int64_t number_type, threads, rows, channels, width, silu;
    const void* inputs;            // [any number, channels]
    const int64_t* taken;          // [rows, width], the inputs of each row
    const float *weight, *bias;    // [width, channels] and [channels] or none
    void* out;                     // [rows, channels]
};

// One row of a causal convolution of every channel.
template <class T> static void convolve(const Convolving& at, int64_t r) {
    const T* inputs = (const T*)at.inputs;
    T* out = (T*)at.out + r * at.channels;
    for_vectors(at.channels, [&](int64_t c, int here) {
        vf x[1] = {at.bias ? wide(at.bias + c, here) : vf{}};
        for (int64_t w = 0; w < at.width; w++)
            x[0] = fma(wide(inputs + at.taken[r * at.width + w] * at.channels + c, here), wide(at.weight + w * at.channels + c, here), x[0]);
        x[0] = rounded(x[0], T());
        if (at.silu) silu<T>(x);
        put(x[0], out + c, here);
    });
}
