// Linear layers over few rows, at the speed at which memory gives the weights.
//
// Weights stay where torch has them, [outputs, in] row by row. A vector holds numbers along `in`; every output is one
// chain of such vectors, whose lanes are added up at the end. So a row's sums do not depend on the rows beside it, nor
// on the threads.
#pragma once
#include "weights.h"

constexpr int FOR_FEW = 3, FOR_MANY = LANES == 8 ? 2 : 3;  // outputs that meet few rows at a time, and more rows
constexpr int OUTPUTS = LANES == 8 ? 6 : 3;                // a multiple of both: what is left over takes longer
// Rows that C outputs meet at a time: their sums, C vectors of weights and one of a row stay in registers.
template <int C> constexpr int ROWS = LANES != 8 ? 8 : C == FOR_MANY ? 5 : 3;
constexpr int STRIP = FOR_FEW * std::max(LANES, 8);  // outputs whose sums are finished together
constexpr int NEAR = 3 * ROWS<FOR_MANY>;  // so few rows meet weights as these pass by
constexpr int AHEAD = 4;                  // tiles whose weights are on their way
constexpr int64_t FAR_BYTES = 256 << 10;  // weights that stay in a core's cache while more rows pass by
// Of rows that stay in the nearest cache. Wider vectors take too few numbers of rows for each weight for that to matter.
constexpr int64_t PART_BYTES = LANES == 8 ? 24 << 10 : 1ll << 62;

template <class T> constexpr int STEP = LANES * 4 / sizeof(T);  // numbers in a vector of weights
template <class T> constexpr int64_t arranged(int64_t in) { return (in + STEP<T> - 1) / STEP<T> * STEP<T>; }
// From an arranged row to the next: cache lines of rows some pages apart would have the same few places in the cache.
template <class T> constexpr int64_t apart(int64_t in) { return arranged<T>(in) + (arranged<T>(in) % 512 ? 0 : 64); }

// Numbers of the residual stream, to which what is put there is added.
template <class T> struct Sum {
    T* at;
    float factor;
    Sum operator+(int64_t n) const { return {at + n, factor}; }
};
template <class T> static inline void put(vf x, Sum<T> to, int count) {
    put(rounded(wide(to.at, count) + rounded(x * splat(to.factor), T()), T()), to.at, count);
}

template <class V> [[gnu::always_inline]] static inline V in_register(V x) {
    IN_REGISTER(x);
    return x;
}
template <int C> [[gnu::always_inline]] static inline void meet(vf (&sums)[C], vf numbers, const vf (&w)[C]) {
    UNROLLED for (int c = 0; c < C; c++) sums[c] = fma(numbers, w[c], sums[c]);
}

// How rows travel, arranged, and how R of them meet a vector of C outputs' weights, from input k on.
template <class T> struct Row {
    typedef float number;
    template <int R, int C>
    static void add(vf (&sums)[R][C], const number* const (&x)[R], const T* const (&weights)[C], int64_t k) {
        vf w[C];
        UNROLLED for (int c = 0; c < C; c++) w[c] = in_register(load<vf>(weights[c] + k));
        UNROLLED for (int r = 0; r < R; r++) meet(sums[r], in_register(load<vf>(x[r] + k)), w);
    }
    static void arrange(const float* row, int64_t in, number* to) {
        std::memcpy(to, row, in * 4), std::fill(to + in, to + arranged<T>(in), 0.f);
    }
};
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <> struct Row<bf16> {  // one instruction adds the products of pairs
    typedef bf16 number;
    template <int R, int C>
    static void add(vf (&sums)[R][C], const number* const (&x)[R], const bf16* const (&weights)[C], int64_t k) {
#ifdef __AVX512BF16__
        typedef __m512bh pairs;
        const auto meet = [](vf sum, pairs a, pairs b) { return vf(_mm512_dpbf16_ps(__m512(sum), a, b)); };
#else
        typedef bfloat16x8_t pairs;
        const auto meet = [](vf sum, pairs a, pairs b) { return vf(vbfdotq_f32(float32x4_t(sum), a, b)); };
#endif
        pairs w[C];
        UNROLLED for (int c = 0; c < C; c++) w[c] = load<pairs>(weights[c] + k);
        UNROLLED for (int r = 0; r < R; r++) {
            const pairs numbers = load<pairs>(x[r] + k);
            UNROLLED for (int c = 0; c < C; c++) sums[r][c] = meet(sums[r][c], numbers, w[c]);
        }
    }
    static void arrange(const float* row, int64_t in, number* to) {
        int64_t k = 0;
        for (; k + LANES <= in; k += LANES) put(rounded(load<vf>(row + k), bf16()), to + k);
        for (; k < in; k++) narrow(row[k], to + k);
        std::fill(to + in, to + arranged<bf16>(in), 0);
    }
};
#else
template <> struct Row<bf16> {  // weights are widened: even numbers to one vector of floats, odd ones to another
    typedef float number;
    template <int R, int C>
    static void add(vf (&sums)[R][C], const number* const (&x)[R], const bf16* const (&weights)[C], int64_t k) {
        UNROLLED for (int half = 0; half < 2; half++) {
            vf w[C];
            UNROLLED for (int c = 0; c < C; c++) {
                const vu both = load<vu>(weights[c] + k);
                w[c] = vf(half ? both & 0xffff0000u : both << 16);
            }
            if (R * C + 2 * C + 2 > (LANES == 8 ? 16 : 32)) READ_AGAIN;  // there is no register to keep both halves
            UNROLLED for (int r = 0; r < R; r++) meet(sums[r], in_register(load<vf>(x[r] + k + half * LANES)), w);
        }
    }
    static void arrange(const float* row, int64_t in, number* to) {
        for (int64_t k = 0; k < in; k += 2 * LANES)
            for (int i = 0; i < LANES; i++) {
                to[k + i] = k + 2 * i < in ? row[k + 2 * i] : 0.f;
                to[k + LANES + i] = k + 2 * i + 1 < in ? row[k + 2 * i + 1] : 0.f;
            }
    }
};
#endif
template <> struct Row<f16> {  // weights are widened as they come
    typedef float number;
    template <int R, int C>
    static void add(vf (&sums)[R][C], const number* const (&x)[R], const f16* const (&weights)[C], int64_t k) {
        UNROLLED for (int64_t half = k; half < k + 2 * LANES; half += LANES) {
            vf w[C];
            UNROLLED for (int c = 0; c < C; c++) w[c] = wide(weights[c] + half);
            UNROLLED for (int r = 0; r < R; r++) meet(sums[r], in_register(load<vf>(x[r] + half)), w);
        }
    }
    static void arrange(const float* row, int64_t in, number* to) {
        std::memcpy(to, row, in * 4), std::fill(to + in, to + arranged<f16>(in), 0.f);
    }
};
template <class T> using number = typename Row<T>::number;

// The lanes of four vectors added up, each in the same order.
static inline v4 added(vf a, vf b, vf c, vf d) {
#if defined(__AVX512F__)
    const vf low = SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                   SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    const vf high = SHUFFLE(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
                    SHUFFLE(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    const vf all = SHUFFLE(low, high, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
                   SHUFFLE(low, high, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(__m512(all)), _mm512_extractf32x8_ps(__m512(all), 1));
    return v4(_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#else
    const vf x[4] = {a, b, c, d};
    v4 part[4];
    for (int i = 0; i < 4; i++) {
        std::memcpy(&part[i], &x[i], sizeof part[i]);
        if constexpr (LANES == 8) {
            v4 upper;
            std::memcpy(&upper, (const char*)&x[i] + sizeof upper, sizeof upper);
            part[i] += upper;
        }
    }
    const v4 front = SHUFFLE4(part[0], part[1], 0, 4, 1, 5) + SHUFFLE4(part[0], part[1], 2, 6, 3, 7);
    const v4 back = SHUFFLE4(part[2], part[3], 0, 4, 1, 5) + SHUFFLE4(part[2], part[3], 2, 6, 3, 7);
    return SHUFFLE4(front, back, 0, 1, 4, 5) + SHUFFLE4(front, back, 2, 3, 6, 7);
#endif
}

// Sums of C outputs of R rows over inputs first .. last, added to those over inputs before: after the last input the lanes
// are added up to[r * STRIP + c], else sums are kept. coming: C outputs' weights that are used soon.
template <class T, int R, int C>
static inline void tile(const T* weights, int64_t in, const number<T>* x, int64_t room, int64_t first, int64_t last, const T* coming, vf* kept, float* to) {
    const number<T>* rows[R];
    const T* outputs[C];
    vf sums[R][C] = {};
    UNROLLED for (int r = 0; r < R; r++) rows[r] = x + r * room;
    UNROLLED for (int c = 0; c < C; c++) outputs[c] = weights + c * in;
    if (first)
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int c = 0; c < C; c++) sums[r][c] = kept[r * STRIP + c];
    int64_t k = first;
    for (int c = 0; c < C && k + STEP<T> <= last; c++, coming += in) {
        // In the order of memory, which the processor's own prefetcher follows: all of the inputs, or one output's after another.
        const T* ahead = coming - C * k;
        for (const int64_t until = last - first == in ? last : first + (last - first) * (c + 1) / C; k + STEP<T> <= until; k += STEP<T>) {
            UNROLLED for (int i = 0; i < C; i++) __builtin_prefetch(ahead + C * k + i * STEP<T>, 0, 2);
            Row<T>::add(sums, rows, outputs, k);
        }
    }
    if (k < last) {
        alignas(64) T part[C][STEP<T>] = {};
        UNROLLED for (int c = 0; c < C; c++) std::memcpy(part[c], outputs[c] + k, (last - k) * sizeof(T)), outputs[c] = part[c];
        UNROLLED for (int r = 0; r < R; r++) rows[r] += k;
        Row<T>::add(sums, rows, outputs, 0);
    }
    if (last < in) {
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int c = 0; c < C; c++) kept[r * STRIP + c] = sums[r][c];
        return;
    }
    UNROLLED for (int r = 0; r < R; r++) {
        const v4 all = added(sums[r][0], sums[r][C > 1], sums[r][C > 2 ? 2 : 0], vf{});
        UNROLLED for (int c = 0; c < C; c++) to[r * STRIP + c] = all[c];
    }
}

// Calls use(a constant from 1 to MOST) for a count.
template <int MOST, class Use> static inline void with_constant(int count, Use use) {
    if constexpr (MOST > 1)
        if (count < MOST) return with_constant<MOST - 1>(count, use);
    use(std::integral_constant<int, MOST>());
}

// Outputs n .. n + count of some rows, at most STRIP: biases are added, and all are rounded as T is.
template <class T, class O>
static inline void finish(const Linear& at, int64_t n, int count, const float* sums, int64_t rows, O out, int64_t stride) {
    for (int i = 0; i < count; i += LANES) {
        const vf bias = at.bias ? wide((const T*)at.bias + n + i, count - i) : vf{};
        for (int64_t r = 0; r < rows; r++)
            put(rounded(load<vf>(sums + r * STRIP + i) + bias, T()), out + r * stride + n + i, count - i);
    }
}

// Outputs first .. last of at most NEAR rows, C at a time, over so many inputs at a time: each weight comes from memory once.
template <class T, int C, class O>
static void strips(const Linear& at, int64_t part, int64_t first, int64_t last, const number<T>* x, int64_t rows, O out, int64_t stride) {
    alignas(64) float sums[NEAR * STRIP + LANES];
    alignas(64) vf kept[LANES == 8 ? NEAR * STRIP : 1];
    const int64_t room = apart<T>(at.in), groups = (rows + ROWS<C> - 1) / ROWS<C>;
    for (int64_t n = first; n < last; n += STRIP) {
        const int count = int(std::min<int64_t>(STRIP, last - n));
        for (int64_t k = 0; k < at.in; k += part) {
            const int64_t end = std::min(k + part, at.in);
            for (int c = 0; c < count; c += c + C <= count ? C : 1) {
                const T* weights = (const T*)at.weight + (n + c) * at.in;
                // In this part, the next part of this strip, or the next strip.
                const int64_t coming = c + AHEAD * C < STRIP ? k : end < at.in ? end - STRIP * at.in : 0;
                for (int64_t group = 0; group < groups; group++) {
                    const int64_t row = group * rows / groups;
                    with_constant<ROWS<C>>(int((group + 1) * rows / groups - row), [&](auto some) {
                        constexpr int R = decltype(some)::value;
                        vf* before = part < at.in ? kept + row * STRIP + c : kept;
                        float* to = sums + row * STRIP + c;
                        if (c + C <= count) tile<T, R, C>(weights, at.in, x + row * room, room, k, end, weights + AHEAD * C * at.in + coming, before, to);
                        else tile<T, R, 1>(weights, at.in, x + row * room, room, k, end, weights + AHEAD * C * at.in + coming, before, to);
                    });
                }
            }
        }
        finish<T>(at, n, count, sums, rows, out, stride);
    }
}

// Calls run(row, count, from, to): at most `most` rows at a time, over blocks of outputs that stay near while more rows
// pass; a row of weights has so many bytes.
template <class F>
static void in_groups(int64_t rows, int64_t most, int64_t bytes, int64_t unit, int64_t first, int64_t last, F run) {
    const int64_t groups = (rows + most - 1) / most, fitting = FAR_BYTES / bytes / unit * unit;
    const int64_t block = groups == 1 ? last : std::max(unit, fitting);
    for (int64_t from = first; from < last; from += block)
        for (int64_t group = 0; group < groups; group++) {
            const int64_t row = group * rows / groups, count = (group + 1) * rows / groups - row;
            run(row, count, from, std::min(from + block, last));
        }
}

// Outputs first .. last of all rows.
template <class T, class O>
static void linear(const Linear& at, const number<T>* x, int64_t rows, O out, int64_t stride, int64_t first, int64_t last) {
    // A few rows need no parts: they wait for weights.
    const int64_t most = rows <= NEAR ? NEAR : ROWS<FOR_MANY>, bytes = std::min(rows, most) * at.in * sizeof(number<T>);
    const int64_t part = rows > ROWS<FOR_MANY> && bytes > PART_BYTES ? arranged<T>(at.in / (bytes / PART_BYTES + 1)) : at.in;
    in_groups(rows, most, at.in * sizeof(T), STRIP, first, last, [&](int64_t row, int64_t count, int64_t from, int64_t to) {
        const bool few = count <= ROWS<FOR_FEW> || count == 2 * ROWS<FOR_FEW>;
        (few ? strips<T, FOR_FEW, O> : strips<T, FOR_MANY, O>)(at, part, from, to, x + row * apart<T>(at.in), count, out + row * stride, stride);
    });
}
