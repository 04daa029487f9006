// Linear layers over few rows, at the speed at which memory gives the weights.
//
// Weights stay where torch has them, [outputs, in] row by row. A vector holds numbers along `in`; every output is one
// chain of such vectors, whose lanes are added up at the end. So a row's sums do not depend on the rows beside it, nor
// on the threads.
#pragma once
#include "vectors.h"

constexpr int ROWS = 6;                   // rows x OUTPUTS sums stay in registers
constexpr int OUTPUTS = 4;
constexpr int NEAR = 4 * ROWS;            // so few rows stay in the nearest cache while weights pass by
constexpr int64_t FAR_BYTES = 256 << 10;  // weights that stay in a core's cache while more rows pass by

typedef float v4 __attribute__((vector_size(16)));
typedef uint32_t u4 __attribute__((vector_size(16)));

template <class T> constexpr int PARTS = 4 / sizeof(T);  // vectors of floats in a vector of weights
template <class T> constexpr int STEP = LANES * PARTS<T>;
template <class T> constexpr int64_t arranged(int64_t in) { return (in + STEP<T> - 1) / STEP<T> * STEP<T>; }

struct Linear {
    const void *weight, *bias;  // [outputs, in] and [outputs] or null
    int64_t outputs, in;
};

// The nearest number that T holds.
static inline v4 rounded(v4 x, float) { return x; }
static inline v4 rounded(v4 x, bf16) {
    u4 bits = u4(x);
    return x != x ? x : v4((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}
template <class T> static inline float rounded(float x) { T y; narrow(x, &y); return widen(y); }

// A row in the order in which vectors of weights come apart, zeros behind its end.
static inline void arrange(const float* row, int64_t in, float, float* to) { std::memcpy(to, row, in * 4), std::fill(to + in, to + arranged<float>(in), 0.f); }
static inline void arrange(const float* row, int64_t in, bf16, float* to) {
    for (int64_t k = 0; k < in; k += 2 * LANES)
        for (int i = 0; i < LANES; i++) {
            to[k + i] = k + 2 * i < in ? row[k + 2 * i] : 0.f;
            to[k + LANES + i] = k + 2 * i + 1 < in ? row[k + 2 * i + 1] : 0.f;
        }
}

static inline void split(vu words, float, vf* to) { to[0] = vf(words); }
static inline void split(vu words, bf16, vf* to) { to[0] = vf(words << 16), to[1] = vf(words & 0xffff0000u); }

// The lanes of four vectors added up, each in the same order.
static inline v4 added(const vf* x) {
#if defined(__AVX512F__)
    typedef float v8 __attribute__((vector_size(32)));
    vf low = __builtin_shuffle(x[0], x[1], vi{0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29}) +
             __builtin_shuffle(x[0], x[1], vi{2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31});
    vf high = __builtin_shuffle(x[2], x[3], vi{0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29}) +
              __builtin_shuffle(x[2], x[3], vi{2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31});
    vf all = __builtin_shuffle(low, high, vi{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}) +
             __builtin_shuffle(low, high, vi{2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
    v8 halves[2];
    std::memcpy(halves, &all, sizeof all);
    v8 half = halves[0] + halves[1];
    v4 quarters[2];
    std::memcpy(quarters, &half, sizeof half);
    return quarters[0] + quarters[1];
#else
    v4 out;
    for (int c = 0; c < 4; c++) {
        v4 halves[2];
        std::memcpy(halves, &x[c], sizeof x[c]);
        v4 half = halves[0] + halves[1];
        out[c] = (half[0] + half[2]) + (half[1] + half[3]);
    }
    return out;
#endif
}

static inline void put(v4 x, int count, float* to) { std::memcpy(to, &x, count * 4); }
static inline void put(v4 x, int count, bf16* to) {
    for (int i = 0; i < count; i++) to[i] = uint16_t(u4(x)[i] >> 16);
}

// Outputs n .. n + count of R rows of x, arranged.
template <class T, int R, class O>
static void tile(const Linear& at, int64_t n, int count, const float* x, O* out, int64_t stride) {
    const int64_t in = at.in, wide_in = arranged<T>(in);
    const T* weight[OUTPUTS];
    for (int c = 0; c < OUTPUTS; c++) weight[c] = (const T*)at.weight + (n + std::min(c, count - 1)) * in;
    vf sums[R][OUTPUTS] = {};
    const auto add = [&](int64_t k, const vu* words) {
        vf w[OUTPUTS][PARTS<T>];
        for (int c = 0; c < OUTPUTS; c++) split(words[c], T(), w[c]);
        for (int r = 0; r < R; r++)
            for (int part = 0; part < PARTS<T>; part++) {
                const vf number = load<vf>(x + r * wide_in + k + part * LANES);
                for (int c = 0; c < OUTPUTS; c++) sums[r][c] += number * w[c][part];
            }
    };
    int64_t k = 0;
    vu words[OUTPUTS];
    for (; k + STEP<T> <= in; k += STEP<T>) {
        for (int c = 0; c < OUTPUTS; c++) {
            words[c] = load<vu>(weight[c] + k);
            __builtin_prefetch(weight[c] + k + OUTPUTS * in);
        }
        add(k, words);
    }
    if (k < in) {
        for (int c = 0; c < OUTPUTS; c++) {
            T part[STEP<T>] = {};
            std::memcpy(part, weight[c] + k, (in - k) * sizeof(T));
            words[c] = load<vu>(part);
        }
        add(k, words);
    }
    v4 bias = {};
    if (at.bias)
        for (int c = 0; c < count; c++) bias[c] = widen(((const T*)at.bias)[n + c]);
    for (int r = 0; r < R; r++) put(rounded(added(sums[r]) + bias, T()), count, out + r * stride + n);
}

// Outputs first .. last of all rows.
template <class T, class O>
static void linear(const Linear& at, const float* x, int64_t rows, O* out, int64_t stride, int64_t first, int64_t last) {
    const int64_t groups = (rows + ROWS - 1) / ROWS, wide_in = arranged<T>(at.in);
    const int64_t fitting = FAR_BYTES / int64_t(at.in * sizeof(T)) / OUTPUTS * OUTPUTS;
    const int64_t block = rows <= NEAR ? OUTPUTS : std::max<int64_t>(OUTPUTS, fitting);
    for (int64_t from = first; from < last; from += block)
        for (int64_t group = 0; group < groups; group++) {
            const int64_t row = group * rows / groups, count = (group + 1) * rows / groups - row;
            for (int64_t n = from; n < std::min(from + block, last); n += OUTPUTS) {
                const int outputs = int(std::min<int64_t>(OUTPUTS, last - n));
#define CALL(R) tile<T, R>(at, n, outputs, x + row * wide_in, out + row * stride, stride)
                switch (count) {
                    case 6: CALL(6); break; case 5: CALL(5); break; case 4: CALL(4); break;
                    case 3: CALL(3); break; case 2: CALL(2); break; default: CALL(1);
                }
#undef CALL
            }
        }
}

// A thread's share of count things, in units of which none is divided.
struct Share {
    int64_t first, last;
    Share(int64_t count, int64_t unit, int thread, int threads) {
        const int64_t units = (count + unit - 1) / unit;
        first = std::min(count, units * thread / threads * unit), last = std::min(count, units * (thread + 1) / threads * unit);
    }
};
