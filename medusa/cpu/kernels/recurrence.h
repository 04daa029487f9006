// Recurrent layers over trees, see medusa/recurrence/rules.py. A row's results are equal bit by bit in every tree: they come
// from its parent's state alone, and each sum has one order.
#pragma once
#include "team.h"
#include "vectors.h"

// The inputs of rows.
struct Steps {
    const float *query, *key;       // [rows, key heads, keys]; no query: no outputs
    const float* value;             // [rows, heads, values]
    const float *decay, *rate;      // [rows, heads]; no rate: values are added as they are
};

// Rows of an earlier pass that come before all rows of a text.
struct Past {
    Steps rows;
    const int64_t *path, count;     // which of the rows
    float* state;                   // [heads, keys, values] after them
};

struct Recurring {
    int64_t threads, texts, key_heads, heads, keys, values;  // several heads may share a query and a key
    const int64_t *firsts, *above;  // [texts + 1] where the rows of each text begin; [rows] the row before, in its text, or -1
    Steps rows;
    const float* const* states;     // [texts] of [heads, keys, values]
    const Past* pasts;              // [texts], or null: none
    float* out;                     // [rows, heads, values]
    float* const* ends;             // [texts] of [heads, keys, values] after the rows of a chain; none: they are a tree
};

// Some columns of a head's state: each column goes its own way.
class Recurrence {
    static constexpr int N = ABREAST;
    static constexpr int64_t WIDTH = N * LANES;
    const Recurring& at;
    std::vector<bool> needed;

  public:
    explicit Recurrence(const Recurring& at) : at(at) {}

    static int64_t pieces(const Recurring& at) { return at.texts * at.heads * blocks(at); }
    static int64_t blocks(const Recurring& at) { return (at.values + WIDTH - 1) / WIDTH; }

    void operator()(int64_t piece) {
        const int64_t column = piece % blocks(at) * WIDTH, head = piece / blocks(at) % at.heads, text = piece / blocks(at) / at.heads;
        const int64_t here = std::min(WIDTH, at.values - column), K = at.keys, size = K * WIDTH;
        const int64_t first = at.firsts[text], rows = at.firsts[text + 1] - first, place = head * K * at.values + column;
        const int64_t* above = at.above + first;
        float* end = at.ends[text];
        needed.assign(rows, end);
        for (int64_t r = 0; r < rows; r++)
            if (above[r] >= 0) needed[above[r]] = true;
        thread_local Buffer<float> states;  // of rows that others follow, [keys, WIDTH] each; the first is the one before all
        grow(states, size_t(size * (end ? 1 : rows + 1)));
        for (int64_t i = 0; i < K; i++) move(at.states[text] + place + i * at.values, &states[i * WIDTH], here);
        if (const Past* past = at.pasts ? at.pasts + text : nullptr; past && past->count) {
            for (int64_t i = 0; i < past->count; i++) row(past->rows, past->path[i], head, column, here, &states[0], &states[0]);
            for (int64_t i = 0; i < K; i++) move(&states[i * WIDTH], past->state + place + i * at.values, here);
        }
        for (int64_t r = 0; r < rows; r++) {
            const float* before = &states[end ? 0 : (above[r] + 1) * size];
            row(at.rows, first + r, head, column, here, before, needed[r] ? &states[end ? 0 : (r + 1) * size] : nullptr);
        }
        if (end)
            for (int64_t i = 0; i < K; i++) move(&states[i * WIDTH], end + place + i * at.values, here);
    }

  private:
    static void move(const float* from, float* to, int64_t count) {
        for_vectors(count, [&](int64_t i, int some) { put(wide(from + i, some), to + i, some); });
    }

    void row(const Steps& rows, int64_t index, int64_t head, int64_t first, int64_t here, const float* before, float* after) {
        const int64_t r = index * at.heads + head, shared = (index * at.key_heads + head * at.key_heads / at.heads) * at.keys;
        const float *key = rows.key + shared, *query = rows.query ? rows.query + shared : nullptr;
        const vf factor = splat(exponential(rows.decay[r]));
        vf known[N] = {}, read[N] = {}, u[N];
        if (rows.rate && query)
            for (int64_t k = 0; k < at.keys; k++) {
                const vf x = splat(key[k]), y = splat(query[k]);
                EACH {
                    const vf s = load<vf>(before + k * WIDTH + i * LANES);
                    known[i] = fma(x, s, known[i]), read[i] = fma(y, s, read[i]);
                }
            }
        else if (rows.rate) sum_rows(key, before, known);
        else if (query) sum_rows(query, before, read);
        EACH {
            const int64_t more = i * LANES, some = here - more;
            u[i] = some > 0 ? wide(rows.value + r * at.values + first + more, int(std::min<int64_t>(some, LANES))) : vf{};
            if (rows.rate) u[i] = splat(rows.rate[r]) * (u[i] - factor * known[i]);
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

// One row of a causal convolution of every channel, over what `input` gives for each of the row's `width` places.
struct Filter {
    int64_t channels, width, silu;
    const float *weight, *bias;    // [width, channels] and [channels] or none

    template <class T, class Input> void operator()(const int64_t* places, Input input, T* out) const {
        for_vectors(channels, [&](int64_t c, int here) {
            vf x[1] = {bias ? wide(bias + c, here) : vf{}};
            for (int64_t w = 0; w < width; w++)
                x[0] = fma(wide(input(places[w]) + c, here), wide(weight + w * channels + c, here), x[0]);
            x[0] = rounded(x[0], T());
            if (silu) ::silu<T>(x);
            put(x[0], out + c, here);
        });
    }
};

struct Convolving {
    int64_t number_type, threads, rows;
    Filter filter;
    const void* inputs;            // [any number, channels]
    const int64_t* taken;          // [rows, width], the inputs of each row
    void* out;                     // [rows, channels]
};

template <class T> static void convolve(const Convolving& at, int64_t r) {
    const auto input = [&](int64_t place) { return (const T*)at.inputs + place * at.filter.channels; };
    at.filter(at.taken + r * at.filter.width, input, (T*)at.out + r * at.filter.channels);
}
