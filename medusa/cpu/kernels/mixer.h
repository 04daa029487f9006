// What a recurrent layer computes between its linear layers, in a pass (pass.h). Numbers are rounded to T where transformers
// rounds them.
#pragma once
#include <cmath>

#include "recurrence.h"

enum MixerKind { SHORT_CONVOLUTION, DELTA_RULE, MAMBA };

// Gated delta rule (Qwen 3.5): its block's `query` gives the convolution's inputs, which become queries, keys and values,
// `key` the gates of outputs, `value` the rates and `more` the decays. Mamba 2 (Granite 4): `query` gives gates, inputs, which
// become values, keys and queries, and decays. Short convolution (LFM2): `query` gives gates of the inputs, gates of the
// outputs, and inputs.
struct Mixer {
    int64_t kind, key_heads, heads, keys, values;  // 0 heads: a short convolution
    int64_t groups;                                // of heads whose outputs are normed together (Mamba 2)
    Filter filter;
    const float *slopes, *steps;  // [heads] factors on decays, and what is added to them
    const float* skips;           // [heads] factors on values that are added to outputs (Mamba 2)
    const void* norm;             // weight of the norm of outputs: [values], or [heads, values] (Mamba 2)
    float epsilon, least, most;   // bounds of steps (Mamba 2)
};

struct Memory {
    const void* windows;          // [batch, width - 1, channels] inputs before the rows
    const int64_t* taken;         // [rows, width] the inputs of each row: first windows are counted, then rows
    void* inputs;                 // [rows, channels]
    const float* const* states;   // see Recurring
    const Past* pasts;
    float* const* ends;
    float *key, *value, *decay, *rate;  // as in Steps
};

template <class T> struct Mixing {
    const Mixer& at;
    const Memory& memory;
    const T* projected;           // [rows, width]
    int64_t width, before;        // before: inputs in windows

    int64_t channels() const { return at.filter.channels; }
    int64_t outputs() const { return at.heads * at.values; }
    const T* row(int64_t r) const { return projected + r * width; }
    const T* inputs_of(int64_t r) const { return row(r) + (at.kind == MAMBA ? outputs() : 0); }
    const T* gates_of(int64_t r) const { return row(r) + (at.kind == MAMBA ? 0 : channels()); }
    const T* rates_of(int64_t r) const { return row(r) + channels() + outputs(); }
    const T* decays_of(int64_t r) const { return row(r) + channels() + outputs() + (at.kind == MAMBA ? 0 : at.heads); }

    // The inputs of a row's convolution.
    void take(int64_t r) const {
        T* to = (T*)memory.inputs + r * channels();
        if (at.kind == SHORT_CONVOLUTION) product(row(r), row(r) + 2 * channels(), to);
        else std::memcpy(to, inputs_of(r), channels() * sizeof(T));
    }

    // Queries, keys, values, rates and decays of a row, once all rows have their inputs; `skipped` is added to outputs.
    void prepare(int64_t r, float* queries, float* skipped) const {
        thread_local Buffer<T> mixed;
        grow(mixed, channels() + LANES);
        convolve(r, mixed.data());
        const int64_t all_keys = at.key_heads * at.keys;
        float *query = queries + r * all_keys, *key = memory.key + r * all_keys;
        if (at.kind == DELTA_RULE) {
            for (int64_t i = 0; i < all_keys; i += at.keys)
                unit(&mixed[i], 1 / std::sqrt(float(at.keys)), query + i), unit(&mixed[all_keys + i], 1, key + i);
            copied(mixed.data() + 2 * all_keys, outputs(), memory.value + r * outputs());
            for_vectors(at.heads, [&](int64_t h, int here) {
                put(sigmoid<T>(wide(rates_of(r) + h, here)), memory.rate + r * at.heads + h, here);
            });
            for (int64_t h = 0; h < at.heads; h++)
                memory.decay[r * at.heads + h] = at.slopes[h] * softplus(widen(decays_of(r)[h]) + at.steps[h]);
        } else {
            copied(&mixed[outputs()], all_keys, key), copied(&mixed[outputs() + all_keys], all_keys, query);
            for (int64_t h = 0; h < at.heads; h++) {
                const float x = narrowed(widen(decays_of(r)[h]) + at.steps[h]);
                const float step = narrowed(std::clamp(narrowed(softplus(x)), at.least, at.most));
                memory.decay[r * at.heads + h] = at.slopes[h] * step;
                scaled(&mixed[h * at.values], step, memory.value + r * outputs() + h * at.values, at.values);
                scaled(&mixed[h * at.values], at.skips[h], skipped + r * outputs() + h * at.values, at.values);
            }
        }
    }

    Recurring recurring(int64_t texts, const int64_t* firsts, const int64_t* above, const float* queries, float* out) const {
        return {1, texts, at.key_heads, at.heads, at.keys, at.values, firsts, above, {queries, memory.key, memory.value, memory.decay, memory.rate}, memory.states, memory.pasts, out, memory.ends};
    }

    // What the layer's last projection reads of a row.
    void give(int64_t r, const float* recurred, const float* skipped, float* to) const {
        if (at.kind == SHORT_CONVOLUTION) {
            thread_local Buffer<T> mixed;
            grow(mixed, channels() + LANES);
            convolve(r, mixed.data());
            product(mixed.data(), gates_of(r), to);
        } else if (at.kind == DELTA_RULE) {
            for (int64_t i = 0; i < outputs(); i += at.values) gated(recurred + r * outputs() + i, gates_of(r) + i, to + i);
        } else {
            for_vectors(outputs(), [&](int64_t i, int here) {
                vf gate[1] = {wide(gates_of(r) + i, here)};
                silu<float>(gate);
                put((wide(recurred + r * outputs() + i, here) + wide(skipped + r * outputs() + i, here)) * gate[0], to + i, here);
            });
            const int64_t count = outputs() / at.groups;
            for (int64_t i = 0; i < outputs(); i += count) normed(to + i, (const T*)at.norm + i, count);
        }
    }

  private:
    void convolve(int64_t r, T* to) const {
        const T *windows = (const T*)memory.windows, *inputs = (const T*)memory.inputs - before * channels();
        const auto input = [&](int64_t place) { return (place < before ? windows : inputs) + place * channels(); };
        at.filter(memory.taken + r * at.filter.width, input, to);
    }

    template <class To> void product(const T* x, const T* y, To* to) const {
        for_vectors(channels(), [&](int64_t c, int here) { put(rounded(wide(x + c, here) * wide(y + c, here), T()), to + c, here); });
    }

    static void scaled(const T* from, float factor, float* to, int64_t count) {
        for_vectors(count, [&](int64_t i, int here) { put(wide(from + i, here) * splat(factor), to + i, here); });
    }
    static float narrowed(float x) { T y; narrow(x, &y); return widen(y); }
    static float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

    // A head's numbers divided by their length, times a factor.
    void unit(const T* from, float factor, float* to) const {
        vf squares{};
        for_vectors(at.keys, [&](int64_t i, int here) { const vf x = wide(from + i, here); squares = fma(x, x, squares); });
        const float scale = 1 / std::sqrt(sum(squares) + 1e-6f);
        for_vectors(at.keys, [&](int64_t i, int here) { put(wide(from + i, here) * splat(scale) * splat(factor), to + i, here); });
    }

    // A head's output, normed, times SiLU of its gate.
    void gated(const float* from, const T* gate, float* to) const {
        vf squares{};
        for_vectors(at.values, [&](int64_t i, int here) {
            const vf x = rounded(wide(from + i, here), T());
            squares = fma(x, x, squares);
        });
        const float factor = 1 / std::sqrt(sum(squares) / at.values + at.epsilon);
        for_vectors(at.values, [&](int64_t i, int here) {
            const vf x = rounded(rounded(wide(from + i, here), T()) * splat(factor), T());
            vf open[1] = {wide(gate + i, here)};
            silu<float>(open);
            put(rounded(rounded(x * wide((const T*)at.norm + i, here), T()) * open[0], T()), to + i, here);
        });
    }

    // A group's outputs, normed in place.
    void normed(float* numbers, const T* weight, int64_t count) const {
        vf squares{};
        for_vectors(count, [&](int64_t i, int here) { const vf x = wide(numbers + i, here); squares = fma(x, x, squares); });
        const float factor = 1 / std::sqrt(sum(squares) / count + at.epsilon);
        for_vectors(count, [&](int64_t i, int here) {
            put(rounded(wide(weight + i, here) * (wide(numbers + i, here) * splat(factor)), T()), numbers + i, here);
        });
    }
};
