// The same by a processor's matrix unit (tiles.h), for numbers of type bf16.
//
// Weights are rounded to bf16. Positions are weighed by groups of 32 with fixed borders: the products of even positions
// are one chain, those of odd ones another, and both together are added to what stands before. `weigh_group` computes the
// same, bit by bit, where a row's values do not stand side by side.
#pragma once
#include "attention_vectors.h"
#include "tiles.h"
#ifdef MEDUSA_TILES

constexpr int SIDES = BLOCK / SIDE;    // tiles of rows, at most
static_assert(SIDES == 3 && SEGMENT % DEPTH == 0, "registers 0 to 2 hold sums");

// Adds to the sums of up to three tiles of rows; these and the columns are so many words apart.
static inline void meet_tiles(int rows, const void* from, int64_t step, const void* columns, int64_t columns_step) {
    const char* at = (const char*)from;
    _tile_loadd(7, columns, columns_step * 4);
    _tile_loadd(4, at, step * 4);
    _tile_dpbf16ps(0, 4, 7);
    if (rows > SIDE) {
        _tile_loadd(5, at + SIDE * step * 4, step * 4);
        _tile_dpbf16ps(1, 5, 7);
    }
    if (rows > 2 * SIDE) {
        _tile_loadd(6, at + 2 * SIDE * step * 4, step * 4);
        _tile_dpbf16ps(2, 6, 7);
    }
}
static inline void no_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
}
template <int TILE> static inline void put_tile(float* to, int64_t step) {
    if (TILE == 0) _tile_stored(0, to, step * 4);
    if (TILE == 1) _tile_stored(1, to, step * 4);
    if (TILE == 2) _tile_stored(2, to, step * 4);
}
// Writes the sums of `rows` rows and, where there is room, of those that fill up the last tile.
static inline void put_sums(int rows, float* to, int64_t step, bool room) {
    alignas(64) float last[SIDE][SIDE];
    const int whole = room ? SIDES * SIDE : rows / SIDE * SIDE;
    const auto put = [&](auto tile) {
        constexpr int ROW = decltype(tile)::value * SIDE;
        if (rows <= ROW) return;
        if (whole > ROW) put_tile<decltype(tile)::value>(to + ROW * step, step);
        else put_tile<decltype(tile)::value>(last[0], SIDE);
    };
    put(std::integral_constant<int, 0>()), put(std::integral_constant<int, 1>()), put(std::integral_constant<int, 2>());
    MEMORY_SEEN;
    for (int r = whole; r < rows; r++) std::memcpy(to + r * step, last[r % SIDE], sizeof last[0]);
}

// Products [rows, count] of queries with turned keys; words of both are a multiple of SIDE, with zeros behind dim.
static void tile_products(const uint32_t* query, int words, int rows, const uint32_t* keys, int stride, int count, float* out) {
    MEMORY_SEEN;
    for (int k = 0; k < count; k += SIDE) {
        no_sums();
        for (int d = 0; d < words; d += SIDE) meet_tiles(rows, query + d, words, keys + int64_t(d) * stride + k, stride);
        put_sums(rows, out + k, stride, true);
    }
}

// Two rows of values as pairs of numbers; null = zeros. Whether all are finite.
static inline bool pair_up(const bf16* low, const bf16* high, int dim, uint32_t* to) {
    static const auto places = [](int first) {
        alignas(64) uint16_t index[32];
        for (int i = 0; i < 16; i++) index[2 * i] = first + i, index[2 * i + 1] = 32 + first + i;
        return load<__m512i>(index);
    };
    static const __m512i front = places(0), back = places(16), power = _mm512_set1_epi16(0x7f80);
    bool finite = true;
    for (int d = 0; d < dim; d += 32) {
        const __mmask32 there = dim - d >= 32 ? ~0u : (1u << (dim - d)) - 1;
        const __m512i a = low ? _mm512_maskz_loadu_epi16(there, low + d) : _mm512_setzero_si512();
        const __m512i b = high ? _mm512_maskz_loadu_epi16(there, high + d) : _mm512_setzero_si512();
        store(to + d, _mm512_permutex2var_epi16(a, front, b));
        if (dim - d > 16) store(to + d + 16, _mm512_permutex2var_epi16(a, back, b));
        finite &= !(_mm512_cmpeq_epi16_mask(_mm512_and_si512(a, power), power) | _mm512_cmpeq_epi16_mask(_mm512_and_si512(b, power), power));
    }
    return finite;
}

// Numbers that are too small for a normal float are 0, as they are to the unit.
struct NoDenormals {
    const unsigned before = _mm_getcsr();
    NoDenormals() { _mm_setcsr(before | 0x8040); }
    ~NoDenormals() { _mm_setcsr(before); }
};

// Adds a group's weights times its values to the sums of one row, C vectors of them; null = not seen.
template <int C> static void weigh_group(const float* weights, const bf16* const* values, int from, int room, float* sums) {
    vf parts[2][C] = {};
    for (int j = 0; j < DEPTH; j++) {
        if (!values[j]) continue;
        const vf weight = splat(weights[j]);
        UNROLLED for (int c = 0; c < C; c++) {
            const vf value = C > 1 ? wide(values[j] + from + c * LANES) : wide(values[j] + from, room);
            parts[j % 2][c] = fma(weight, value, parts[j % 2][c]);
        }
    }
    UNROLLED for (int c = 0; c < C; c++) store(sums + c * LANES, load<vf>(sums + c * LANES) + (parts[0][c] + parts[1][c]));
}
static void weigh_group(const float* weights, const bf16* const* values, int dim, float* sums) {
    constexpr int WIDE = VECTORS * LANES;
    alignas(64) float nearest[DEPTH];
    for (int j = 0; j < DEPTH; j += LANES) store(nearest + j, rounded(load<vf>(weights + j), bf16()));
    int d = 0;
    for (; d + WIDE <= dim; d += WIDE) weigh_group<VECTORS>(nearest, values, d, 0, sums + d);
    for (; d < dim; d += LANES) weigh_group<1>(nearest, values, d, dim - d, sums + d);
}
#endif
