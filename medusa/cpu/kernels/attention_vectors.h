// How queries meet keys, and weights values, by vectors: products along D for scores, along positions for what is weighed.
#pragma once
#include "vectors.h"

constexpr int SEGMENT = 128;  // positions; a multiple of LANES
constexpr int BLOCK = 48;     // rows (nodes x query heads of a key head) that share a segment's keys
constexpr int TILE = 6;       // rows in registers, times so many vectors:
constexpr int VECTORS = LANES == 8 ? 2 : 4;
constexpr int COMING = 32;    // positions whose keys or values are on their way
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
        store(to, from_f16(narrowed(word & 0xffff))), store(to + stride, from_f16(narrowed(word >> 16)));
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
            UNROLLED for (int i = 0; i < LANES; i++) __builtin_prefetch(key + (i + COMING) * step, 0, 2);
            if (first + LANES <= count && d + PER_VECTOR <= dim)
                UNROLLED for (int i = 0; i < LANES; i++) rows[i] = load<vu>(key + i * step);
            else
                for (int i = 0; i < LANES; i++) {
                    T part[PER_VECTOR] = {};
                    if (first + i < count) std::memcpy(part, key + i * step, std::min(PER_VECTOR, dim - d) * sizeof(T));
                    rows[i] = load<vu>(part);
                }
            transpose(rows);
            uint32_t* words = to + int64_t(d / Score<T>::PER_WORD) * stride + first;
            UNROLLED for (int i = 0; i < LANES; i++) spread<T>(rows[i], words + int64_t(i) * ROWS_OF_WORD * stride, stride);
        }
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

// The largest of the scores that are seen.
static inline float largest_of(const float* scores, int seen) {
    vf best = splat(NOTHING);
    for (int j = 0; j < seen; j += LANES) {
        const vf x = load<vf>(scores + j);
        best = x > best ? x : best;
    }
    return largest(best);
}

// Scores to weights, relative to the largest, and what they sum up to. Those from `seen` on are hidden. HALVES: weights
// are rounded to bf16 and stand where the first half of the scores stood.
template <bool HALVES> static inline float weights_of(float* scores, int seen, float scaling, float top) {
    if (top == NOTHING) seen = 0;
    vf sum = {};
    const auto put = [&](int j, const vf(&x)[ABREAST]) {
#ifdef __AVX512BF16__
        if constexpr (HALVES) {
            UNROLLED for (int i = 0; i < ABREAST; i += 2)
                store((bf16*)scores + j + i * LANES, _mm512_cvtne2ps_pbh(__m512(x[i + 1]), __m512(x[i])));
            return;
        }
#endif
        UNROLLED for (int i = 0; i < ABREAST; i++) store(scores + j + i * LANES, x[i]);
    };
    int j = 0;
    for (; j < seen; j += ABREAST * LANES) {
        vf x[ABREAST];
        UNROLLED for (int i = 0; i < ABREAST; i++) x[i] = fma(load<vf>(scores + j + i * LANES), splat(scaling), splat(-top));
        exponential(x);
        put(j, x);
        UNROLLED for (int i = 0; i < ABREAST; i++) sum += x[i];
    }
    for (; j < SEGMENT; j += ABREAST * LANES) put(j, {});
    return ::sum(sum);
}

// Scores are scaled, and bent to stay below a cap.
static inline void cap(float* scores, int seen, float scaling, float softcap) {
    for (int j = 0; j < seen; j += LANES) {
        const vf x = load<vf>(scores + j), y = x * splat(scaling) / splat(softcap), size = y < vf{} ? -y : y;
        const vf e = exponential(splat(-2.f) * size), t = (splat(1.f) - e) / (splat(1.f) + e);
        store(scores + j, x == splat(NOTHING) ? x : splat(softcap) * (y < vf{} ? -t : t));
    }
}

// Adds weights [R, count] times values [count, C x LANES] to sums: each a chain along positions.
template <int R, int C, class T>
static void weigh(const float* weights, const T* values, int64_t step, int count, int room, float* sums, int width) {
    vf total[R][C];
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int c = 0; c < C; c++) total[r][c] = load<vf>(sums + r * width + c * LANES);
    for (int j = 0; j < count; j++) {
        vf value[C];
        UNROLLED for (int c = 0; c < C; c += 64 / (LANES * sizeof(T))) __builtin_prefetch(values + (j + COMING) * step + c * LANES, 0, 2);
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
