// The same by a processor's matrix unit (tiles.h), for numbers of type bf16.
//
// Weights are rounded to bf16. Positions are weighed by groups of 32 with fixed borders: the products of even positions
// are one chain, those of odd ones another, and both together are added to what stands before. `weigh_group` computes the
// same, bit by bit, where a row's values do not stand side by side.
#pragma once
#include "attention_vectors.h"
#include "tiles.h"
#ifdef MEDUSA_TILES

static_assert(SEGMENT % DEPTH == 0 && BLOCK % SIDE == 0, "whole tiles");
constexpr int FOUR = 4;  // sums wait long for those before them: so many are computed at a time, in registers 0 to 3

// Adds products of a tile with each of up to four others to the sums; LEFT: it is the left operand. Rows are so many
// bytes apart.
template <bool LEFT, class Other> static inline void meet_four(const void* one, int64_t step, int count, Other other) {
#define MEET(I)                                       \
    if (count > I) {                                  \
        const auto [at, other_step] = other(I);       \
        _tile_loadd(7, at, other_step);               \
        if (LEFT) _tile_dpbf16ps(I, 6, 7);            \
        else _tile_dpbf16ps(I, 7, 6);                 \
    }
    _tile_loadd(6, one, step);
    MEET(0) MEET(1) MEET(2) MEET(3)
#undef MEET
}

// A group of queries [SIDE, words] as the unit wants its right operand: columns of BLOCK.
static void turn_queries(const uint32_t* query, int words, uint32_t* to) {
    for (int d = 0; d < words; d += SIDE) {
        vu x[LANES];
        UNROLLED for (int i = 0; i < LANES; i++) x[i] = load<vu>(query + i * words + d);
        transpose(x);
        UNROLLED for (int i = 0; i < LANES; i++) store(to + (d + i) * BLOCK, x[i]);
    }
    MEMORY_SEEN;
}

// Columns first .. first + 3 of a tile. Words that come from memory four by four ask less of the unit that shuffles.
static inline void four_columns(const float (*tile)[SIDE], int first, vf (&to)[4]) {
    const auto words = [&](int i) { return _mm_load_ps(&tile[i][first]); };
    __m512 x[4];
    UNROLLED for (int j = 0; j < 4; j++) {
        x[j] = _mm512_castps128_ps512(words(j));
        x[j] = _mm512_mask_broadcast_f32x4(x[j], 0x00f0, words(4 + j));
        x[j] = _mm512_mask_broadcast_f32x4(x[j], 0x0f00, words(8 + j));
        x[j] = _mm512_mask_broadcast_f32x4(x[j], 0xf000, words(12 + j));
    }
    const __m512 a = _mm512_unpacklo_ps(x[0], x[1]), b = _mm512_unpackhi_ps(x[0], x[1]);
    const __m512 c = _mm512_unpacklo_ps(x[2], x[3]), d = _mm512_unpackhi_ps(x[2], x[3]);
    to[0] = vf(_mm512_shuffle_ps(a, c, 0x44)), to[1] = vf(_mm512_shuffle_ps(a, c, 0xee));
    to[2] = vf(_mm512_shuffle_ps(b, d, 0x44)), to[3] = vf(_mm512_shuffle_ps(b, d, 0xee));
}

// The first numbers of DEPTH, zeros behind them.
static inline __m512i first_numbers(const bf16* from, int count) {
    return _mm512_maskz_loadu_epi16(count >= DEPTH ? ~0u : (1u << count) - 1, from);
}

// Products [rows, count] of at most SIDE turned queries with keys where they stand, `step` numbers apart. A tile of them is
// [keys, rows].
static void tile_products(const uint32_t* query, int rows, const bf16* keys, int64_t step, int count, int dim, float* out, int stride) {
    alignas(64) Sums sums[FOUR];
    for (int k = 0; k < count; k += FOUR * SIDE) {
        const int tiles = std::min(FOUR, (count - k + SIDE - 1) / SIDE);
        no_sums();
        for (int d = 0; d < dim; d += DEPTH) {
            alignas(64) bf16 copies[FOUR][SIDE][DEPTH];
            meet_four<false>(query + d / 2 * BLOCK, BLOCK * 4, tiles, [&](int i) {
                const int here = std::min(SIDE, count - k - i * SIDE), numbers = std::min(DEPTH, dim - d);
                const bf16* at = keys + (k + i * SIDE) * step + d;
                if (here == SIDE && numbers == DEPTH) return std::pair(at, step * 2);
                for (int j = 0; j < SIDE; j++) store(copies[i][j], first_numbers(at + j * step, j < here ? numbers : 0));
                MEMORY_SEEN;
                return std::pair((const bf16*)copies[i], int64_t(DEPTH * 2));
            });
        }
        put_four(tiles, sums[0][0], SIDE, SIDE * SIDE);
        for (int tile = 0; tile < tiles; tile++)
            for (int r = 0; r < rows; r += 4) {
                vf x[4];
                four_columns(sums[tile], r, x);
                UNROLLED for (int i = 0; i < 4; i++) store(out + (r + i) * stride + k + tile * SIDE, x[i]);
            }
    }
}

// Two rows of values as pairs of numbers.
static inline void pair_up(const bf16* low, const bf16* high, int dim, uint32_t* to) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // then halves of lanes give what follows each other
    for (int d = 0; d < dim; d += DEPTH) {
        const __m512i a = _mm512_permutexvar_epi64(order, first_numbers(low + d, dim - d));
        const __m512i b = _mm512_permutexvar_epi64(order, first_numbers(high + d, dim - d));
        store(to + d, _mm512_unpacklo_epi16(a, b));
        if (dim - d > 16) store(to + d + 16, _mm512_unpackhi_epi16(a, b));
    }
}

// Whether all numbers of a group of values are finite.
static inline bool finite(const bf16* const* values, int dim) {
    const __m512i power = _mm512_set1_epi16(0x7f80);
    __mmask32 infinite = 0;
    for (int j = 0; j < DEPTH; j++)
        for (int d = 0; d < dim; d += DEPTH)
            infinite |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(first_numbers(values[j] + d, dim - d), power), power);
    return !infinite;
}

// Numbers that are too small for a normal float are 0, as they are to the unit.
struct NoDenormals {
    const unsigned before = _mm_getcsr();
    NoDenormals() { _mm_setcsr(before | 0x8040); }
    ~NoDenormals() { _mm_setcsr(before); }
};

// Adds a group's weights [R, DEPTH] times its values to the sums of R rows, C vectors of them, `width` numbers apart; null = not
// seen.
template <int R, int C> static void weigh_group(const float* weights, const bf16* const* values, int from, int room, float* sums, int width) {
    vf parts[R][2][C] = {};
    UNROLLED for (int j = 0; j < DEPTH; j++) {
        if (!values[j]) continue;
        vf value[C];
        UNROLLED for (int c = 0; c < C; c++) value[c] = C > 1 ? wide(values[j] + from + c * LANES) : wide(values[j] + from, room);
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int c = 0; c < C; c++) parts[r][j % 2][c] = fma(splat(weights[r * DEPTH + j]), value[c], parts[r][j % 2][c]);
    }
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int c = 0; c < C; c++) {
            float* sum = sums + r * width + c * LANES;
            store(sum, load<vf>(sum) + (parts[r][0][c] + parts[r][1][c]));
        }
}
template <int R> static void weigh_group(const bf16 (*weights)[DEPTH], const bf16* const* values, int dim, float* sums, int width) {
    constexpr int WIDE = VECTORS * LANES;
    alignas(64) float nearest[R * DEPTH];
    for (int j = 0; j < R * DEPTH; j += LANES) store(nearest + j, wide(weights[0] + j));
    int d = 0;
    for (; d + WIDE <= dim; d += WIDE) weigh_group<R, VECTORS>(nearest, values, d, 0, sums + d, width);
    for (; d < dim; d += LANES) weigh_group<R, 1>(nearest, values, d, dim - d, sums + d, width);
}
#endif
