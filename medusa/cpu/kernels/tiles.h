// Linear layers in bfloat16 on a processor with a matrix unit (AMX): one instruction multiplies 16 outputs with 16 rows
// along 32 numbers. A product costs so little there that many rows still wait for the weights.
//
// Weights stay where torch has them and are the left operand. Rows travel in groups of 16, pair of numbers by pair, as the
// right operand wants them. Every sum is one chain along `in`, whatever rows stand beside it.
#pragma once
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define MEDUSA_TILES
#include <sys/syscall.h>
#include <unistd.h>

#include "linear.h"

constexpr int SIDE = 16, DEPTH = 32;  // outputs and rows of a tile of sums; numbers along `in` of the operands
constexpr int64_t NEAR_BYTES = 512 << 10;  // rows that stay in a core's cache while weights pass by

// Whether the system lets this process use the unit.
static inline bool has_tiles() {
    static const bool granted = syscall(SYS_arch_prctl, /* ARCH_REQ_XCOMP_PERM */ 0x1023, /* tile data */ 18) == 0;
    return granted;
}

// GCC does not know that these instructions read and write memory.
#define MEMORY_SEEN asm volatile("" ::: "memory")

// Adds to the sums in registers 0 .. 3: outputs n and n + SIDE, rows and the next SIDE rows.
static inline void multiply(const bf16* weights, int64_t step, const bf16* more_weights, int64_t more_step, const bf16* x, int64_t group) {
    _tile_loadd(4, weights, step * 2);
    _tile_loadd(6, x, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, more_weights, more_step * 2);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(7, x + group, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
}

// Adds to the sums in register 0, or 1 for the SECOND outputs, of one group of rows.
template <bool SECOND> static inline void multiply_one(const bf16* weights, int64_t step, const bf16* x) {
    _tile_loadd(4, weights, step * 2);
    _tile_loadd(6, x, 64);
    if (SECOND) _tile_dpbf16ps(1, 4, 6);
    else _tile_dpbf16ps(0, 4, 6);
}

// Outputs n .. n + 2 SIDE, of which the first `count` are there, of one or two groups of rows; meanwhile `lines` of memory
// come near for every step along `in`, from `next` on.
template <int GROUPS, class O>
static inline void block(const Linear& at, int64_t n, int count, const bf16* x, int64_t rows, O* out, int64_t stride, const bf16* next, int lines) {
    const int64_t in = at.in, wide_in = (in + DEPTH - 1) / DEPTH * DEPTH, group = SIDE * wide_in;
    const bf16* weight = (const bf16*)at.weight + n * in;
    const bool whole = count == 2 * SIDE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int64_t k = 0;
    const auto fetch = [&](int count) {
        for (int i = 0; i < count; i++) __builtin_prefetch(next + i * DEPTH, 0, 2);
        next += count * DEPTH;
    };
    if (whole && GROUPS == 1) {  // one output tile after the other: memory gives 16 rows of weights sooner than 32
        for (k = 0; k + DEPTH <= in; k += DEPTH) fetch(lines / 2), multiply_one<false>(weight + k, in, x + SIDE * k);
        for (k = 0; k + DEPTH <= in; k += DEPTH) fetch(lines - lines / 2), multiply_one<true>(weight + SIDE * in + k, in, x + SIDE * k);
    } else if (whole)
        for (; k + DEPTH <= in; k += DEPTH) fetch(lines), multiply(weight + k, in, weight + SIDE * in + k, in, x + SIDE * k, group);
    for (; k < in; k += DEPTH) {  // what is not there is zero
        bf16 part[2 * SIDE][DEPTH] = {};
        for (int i = 0; i < count; i++) std::memcpy(part[i], weight + i * in + k, std::min<int64_t>(DEPTH, in - k) * 2);
        MEMORY_SEEN;
        if (GROUPS == 2) multiply(part[0], DEPTH, part[SIDE], DEPTH, x + SIDE * k, group);
        else multiply_one<false>(part[0], DEPTH, x + SIDE * k), multiply_one<true>(part[SIDE], DEPTH, x + SIDE * k);
    }
    alignas(64) float sums[2 * GROUPS][SIDE][SIDE];
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (GROUPS == 2) {
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
    }
    MEMORY_SEEN;
    for (int part = 0; part < 2 * GROUPS; part++) {
        const int first = part % 2 * SIDE, there = std::min(count - first, SIDE), row = part / 2 * SIDE;
        if (there <= 0) continue;
        vf columns[SIDE], bias = {};
        for (int i = 0; i < SIDE; i++) columns[i] = load<vf>(sums[part][i]);
        transpose((vu*)columns);
        if (at.bias) bias = wide((const bf16*)at.bias + n + first, there);
        for (int r = 0; r < std::min<int64_t>(SIDE, rows - row); r++) {
            const vu all = __builtin_convertvector(vh(_mm512_cvtneps_pbh(__m512(columns[r] + bias))), vu) << 16;
            put(vf(all), out + (row + r) * stride + n + first, there);
        }
    }
}

// How a pass meets weights in bfloat16 on such a processor.
struct Tiles {
    typedef bf16 number;
    static constexpr bool MATRIX_UNIT = true;
    static constexpr int64_t UNIT = DEPTH, OUTPUTS = 2 * SIDE;

    struct Thread {  // has the unit while it lives
        Thread() {
            struct alignas(64) {
                uint8_t palette = 1, start = 0, none[14] = {};
                uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
                uint8_t rows[16] = {SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE, SIDE};
            } shapes;
            MEMORY_SEEN;
            _tile_loadconfig(&shapes);
        }
        ~Thread() { _tile_release(); }
    };

    static int64_t room(int64_t in) { return (in + DEPTH - 1) / DEPTH * DEPTH; }
    static int64_t rows(int64_t count) { return (count + SIDE - 1) / SIDE * SIDE; }

    static void arrange(const float* numbers, int64_t count, bf16* to, int64_t room, int64_t row, int64_t column) {
        bf16* pairs = to + row / SIDE * SIDE * room + column * SIDE + row % SIDE * 2;
        for (int64_t k = 0; k < count; k += DEPTH, pairs += SIDE * DEPTH) {
            const int here = int(std::min<int64_t>(DEPTH, count - k));
            const vf low = wide(numbers + k, here), high = here > LANES ? wide(numbers + k + LANES, here - LANES) : vf{};
            const vf even = SHUFFLE(low, high, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            const vf odd = SHUFFLE(low, high, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
            const vu both = vu(rounded(even, bf16())) >> 16 | vu(rounded(odd, bf16()));
            for (int i = 0; i < SIDE; i++) std::memcpy(pairs + i * DEPTH, (char*)&both + 4 * i, 4);
        }
    }

    // Outputs first .. last of all rows: blocks of rows that stay near, for each of them all weights.
    template <class O>
    static void linear(const Linear& at, const bf16* x, int64_t rows, O* out, int64_t stride, int64_t first, int64_t last) {
        const int64_t wide_in = room(at.in), fitting = NEAR_BYTES / (wide_in * 2) / (2 * SIDE) * (2 * SIDE);
        const int64_t most = std::max<int64_t>(2 * SIDE, fitting);
        for (int64_t from = 0; from < rows; from += most) {
            const int64_t to = std::min(rows, from + most), blocks = (to - from + 2 * SIDE - 1) / (2 * SIDE);
            for (int64_t n = first; n < last; n += OUTPUTS) {
                const int count = int(std::min<int64_t>(OUTPUTS, last - n));
                const int lines = n + 2 * OUTPUTS > last || rows <= SIDE ? 0 : int((OUTPUTS + blocks - 1) / blocks);
                const bf16* next = (const bf16*)at.weight + (n + OUTPUTS) * at.in;
                for (int64_t row = from; row < to; row += 2 * SIDE, next += lines * at.in) {
                    const bf16* here = x + row * wide_in;
                    if (rows - row > SIDE) block<2>(at, n, count, here, rows - row, out + row * stride, stride, next, lines);
                    else block<1>(at, n, count, here, rows - row, out + row * stride, stride, next, lines);
                }
            }
        }
    }
};
#endif
