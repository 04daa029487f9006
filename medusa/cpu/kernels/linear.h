// Linear layers over few rows, at the speed at which memory gives the weights.
//
// Weights stay where torch has them, [outputs, in] row by row. A vector holds numbers along `in`; every output is one
// chain of such vectors, whose lanes are added up at the end. So a row's sums do not depend on the rows beside it, nor
// on the threads.
#pragma once
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "vectors.h"

constexpr int ROWS = LANES == 16 ? 8 : 4;  // rows x OUTPUTS sums stay in registers
constexpr int OUTPUTS = 3;
constexpr int NEAR = 3 * ROWS;            // so few rows stay in the nearest cache while weights pass by
constexpr int64_t FAR_BYTES = 256 << 10;  // weights that stay in a core's cache while more rows pass by

typedef float v4 __attribute__((vector_size(16)));
typedef uint32_t u4 __attribute__((vector_size(16)));

template <class T> constexpr int STEP = LANES * 4 / sizeof(T);  // numbers in a vector of weights
template <class T> constexpr int64_t arranged(int64_t in) { return (in + STEP<T> - 1) / STEP<T> * STEP<T>; }

struct Linear {
    const void *weight, *bias;  // [outputs, in] and [outputs] or null
    int64_t outputs, in;
    const float* scales;  // [outputs] where weights are rounded to 8 bits: [outputs, whole groups] bytes; else null
};

// The nearest number that T holds.
static inline v4 rounded(v4 x, float) { return x; }
static inline v4 rounded(v4 x, bf16) {
    u4 bits = u4(x);
    return x != x ? x : v4((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}
template <class T> static inline float rounded(float x) { T y; narrow(x, &y); return widen(y); }

// How rows travel, and how a vector of them meets a vector of weights.
template <class T> struct Row {
    typedef float number;
    typedef vf vector, weights;
    static vector read(const number* x) { return load<vf>(x); }
    static weights split(vu words) { return vf(words); }
    static void add(vf& sum, vector x, weights w) { sum += x * w; }
    static void arrange(const float* row, int64_t in, number* to) {
        std::memcpy(to, row, in * 4), std::fill(to + in, to + arranged<T>(in), 0.f);
    }
};
#ifdef __AVX512BF16__
template <> struct Row<bf16> {  // one instruction adds the products of pairs
    typedef bf16 number;
    typedef __m512bh vector, weights;
    static vector read(const number* x) { return load<vector>(x); }
    static weights split(vu words) { return weights(words); }
    static void add(vf& sum, vector x, weights w) { sum = vf(_mm512_dpbf16_ps(__m512(sum), x, w)); }
    static void arrange(const float* row, int64_t in, number* to) {
        for (int64_t k = 0; k < in; k++) narrow(row[k], to + k);
        std::fill(to + in, to + arranged<bf16>(in), 0);
    }
};
#else
template <> struct Row<bf16> {  // weights are widened: even numbers to one vector of floats, odd ones to another
    typedef float number;
    struct vector { vf even, odd; };
    typedef vector weights;
    static vector read(const number* x) { return {load<vf>(x), load<vf>(x + LANES)}; }
    static weights split(vu words) { return {vf(words << 16), vf(words & 0xffff0000u)}; }
    static void add(vf& sum, vector x, weights w) { sum += x.even * w.even, sum += x.odd * w.odd; }
    static void arrange(const float* row, int64_t in, number* to) {
        for (int64_t k = 0; k < in; k += 2 * LANES)
            for (int i = 0; i < LANES; i++) {
                to[k + i] = k + 2 * i < in ? row[k + 2 * i] : 0.f;
                to[k + LANES + i] = k + 2 * i + 1 < in ? row[k + 2 * i + 1] : 0.f;
            }
    }
};
#endif
template <class T> using number = typename Row<T>::number;

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

static inline void put(float x, float* to) { *to = x; }
static inline void put(float x, bf16* to) {
    uint32_t bits; std::memcpy(&bits, &x, 4);
    *to = uint16_t(bits >> 16);  // it is rounded
}

// Outputs n .. n + OUTPUTS, of which the first `count` are there, of R rows of x, arranged.
template <class T, int R, class O>
static inline void tile(const Linear& at, int64_t n, int count, const number<T>* x, O* out, int64_t stride) {
    const int64_t in = at.in, wide_in = arranged<T>(in);
    const T* weight[OUTPUTS];
    for (int c = 0; c < OUTPUTS; c++) weight[c] = (const T*)at.weight + (n + std::min(c, count - 1)) * in;
    vf sums[R][OUTPUTS + 1] = {};
    const auto add = [&](int64_t k, const vu* words) {
        typename Row<T>::weights w[OUTPUTS];
        for (int c = 0; c < OUTPUTS; c++) w[c] = Row<T>::split(words[c]);
        for (int r = 0; r < R; r++) {
            const auto numbers = Row<T>::read(x + r * wide_in + k);
            for (int c = 0; c < OUTPUTS; c++) Row<T>::add(sums[r][c], numbers, w[c]);
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
    for (int r = 0; r < R; r++) {
        v4 all = added(sums[r]);
        if (at.bias)
            for (int c = 0; c < count; c++) all[c] += widen(((const T*)at.bias)[n + c]);
        all = rounded(all, T());
        if (count == OUTPUTS)
            for (int c = 0; c < OUTPUTS; c++) put(all[c], out + r * stride + n + c);
        else
            for (int c = 0; c < count; c++) put(all[c], out + r * stride + n + c);
    }
}
template <class T, int R, class O>
static void tiles(const Linear& at, int64_t first, int64_t last, const number<T>* x, O* out, int64_t stride) {
    int64_t n = first;
    for (; n + OUTPUTS <= last; n += OUTPUTS) tile<T, R>(at, n, OUTPUTS, x, out, stride);
    if (n < last) tile<T, R>(at, n, int(last - n), x, out, stride);
}

// Calls run(row, count, from, to): at most `most` rows at a time, over blocks of outputs that stay near while more rows
// pass; a row of weights has so many bytes.
template <class F>
static void in_groups(int64_t rows, int64_t most, int64_t bytes, int64_t unit, int64_t first, int64_t last, F run) {
    const int64_t groups = (rows + most - 1) / most, fitting = FAR_BYTES / bytes / unit * unit;
    const int64_t block = groups == 1 ? last : rows <= NEAR ? unit : std::max(unit, fitting);
    for (int64_t from = first; from < last; from += block)
        for (int64_t group = 0; group < groups; group++) {
            const int64_t row = group * rows / groups, count = (group + 1) * rows / groups - row;
            run(row, count, from, std::min(from + block, last));
        }
}
#define FOR_ROWS(count, CALL)                                                          \
    switch (count) {                                                                   \
        case 8: CALL(8); break; case 7: CALL(7); break; case 6: CALL(6); break;        \
        case 5: CALL(5); break; case 4: CALL(4); break; case 3: CALL(3); break;        \
        case 2: CALL(2); break; default: CALL(1);                                      \
    }

// Outputs first .. last of all rows.
template <class T, class O>
static void linear(const Linear& at, const number<T>* x, int64_t rows, O* out, int64_t stride, int64_t first, int64_t last) {
    in_groups(rows, ROWS, at.in * sizeof(T), OUTPUTS, first, last, [&](int64_t row, int64_t count, int64_t from, int64_t to) {
#define CALL(R) tiles<T, R>(at, from, to, x + row * arranged<T>(at.in), out + row * stride, stride)
        FOR_ROWS(count, CALL)
#undef CALL
    });
}

// How a pass meets weights as they are.
template <class T> struct Plain {
    typedef ::number<T> number;
    static constexpr int64_t UNIT = STEP<T>;       // numbers of a row that are arranged without the others
    static constexpr int64_t OUTPUTS = ::OUTPUTS;  // of a tile
    struct Thread { ~Thread() {} };                // what a thread of a team needs
    static int64_t room(int64_t in) { return arranged<T>(in); }  // numbers of a row, arranged
    static int64_t rows(int64_t count) { return count; }         // that so many take up
    // Numbers of a row, from a column on, among rows with so much room each.
    static void arrange(const float* numbers, int64_t count, number* to, int64_t room, int64_t row, int64_t column) {
        Row<T>::arrange(numbers, count, to + row * room + column);
    }
    template <class O>
    static void linear(const Linear& at, const number* x, int64_t rows, O* out, int64_t stride, int64_t first, int64_t last) {
        ::linear<T>(at, x, rows, out, stride, first, last);
    }
};

// A thread's share of count things, in units of which none is divided.
struct Share {
    int64_t first, last;
    Share(int64_t count, int64_t unit, int thread, int threads) {
        const int64_t units = (count + unit - 1) / unit;
        first = std::min(count, units * thread / threads * unit), last = std::min(count, units * (thread + 1) / threads * unit);
    }
};
