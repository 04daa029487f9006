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

#include "packed.h"

constexpr int SIDE = 16, DEPTH = 32;  // outputs and rows of a tile of sums; numbers along `in` of the operands
constexpr int DEEP = 576;             // numbers along `in` of the weights that stay in the nearest cache
constexpr int64_t NEAR_BYTES = 1 << 20;  // rows that stay in a core's cache while weights pass by

// Whether the system lets this process use the unit.
static inline bool has_tiles() {
    static const bool granted = syscall(SYS_arch_prctl, /* ARCH_REQ_XCOMP_PERM */ 0x1023, /* tile data */ 18) == 0;
    return granted;
}

// GCC does not know that these instructions read and write memory.
#define MEMORY_SEEN asm volatile("" ::: "memory")

typedef float Sums[SIDE][SIDE];     // of outputs x rows
typedef bf16 Pair[2][SIDE][DEPTH];  // weights of two times SIDE outputs

// Weights of two times SIDE outputs, of one layer or of two, and how many of either are there.
struct Outputs {
    const Linear* layers[2];
    int64_t first[2];
    int there[2];
    int64_t in = layers[0]->in;

    bool packed() const { return layers[0]->packing != NUMBERS || layers[1]->packing != NUMBERS; }
    const bf16* row(int i) const { return (const bf16*)layers[i / SIDE]->weight + (first[i / SIDE] + i % SIDE) * in; }
    bool whole(int64_t k) const { return there[0] + there[1] == 2 * SIDE && k + DEPTH <= in && !packed(); }
    void copy(int half, int64_t k, bf16 (&to)[SIDE][DEPTH]) const {  // what is not there is zero
        const Linear& layer = *layers[half];
        const bool packed = layer.packing != NUMBERS;
        if (!packed || there[half] < SIDE) std::memset(to, 0, sizeof to);
        for (int i = 0, count; i < there[half]; i += count) {
            const int64_t n = first[half] + i;
            count = packed ? int(std::min<int64_t>(there[half] - i, PANEL - n % PANEL)) : 1;
            if (packed) with_panel(layer, n / PANEL, [&](const auto& panel) { expand(panel, k / RUN, n % PANEL, count, to[i], DEPTH); });
            else std::memcpy(to[i], row(half * SIDE + i) + k, std::min<int64_t>(DEPTH, in - k) * 2);
        }
        MEMORY_SEEN;
    }
    // Calls use(what copies them: copy(k, to)) for one half.
    template <class Use> void copies(int half, Use use) const {
        const Linear& layer = *layers[half];
        if (layer.packing == NUMBERS || there[half] < SIDE || first[half] % PANEL)
            return use([&](int64_t k, bf16(&to)[SIDE][DEPTH]) { copy(half, k, to); });
        with_panel(layer, first[half] / PANEL, [&](const auto& panel) {
            use([&](int64_t k, bf16(&to)[SIDE][DEPTH]) {
                expand(panel, k / RUN, 0, PANEL, to[0], DEPTH);
                MEMORY_SEEN;
            });
        });
    }
};

// Sums in registers 0 to 3.
[[gnu::always_inline]] static inline void no_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}
// Writes up to four tiles of sums, `next` numbers apart.
[[gnu::always_inline]] static inline void put_four(int count, float* to, int64_t step, int64_t next) {
    _tile_stored(0, to, step * 4);
    if (count > 1) _tile_stored(1, to + next, step * 4);
    if (count > 2) _tile_stored(2, to + 2 * next, step * 4);
    if (count > 3) _tile_stored(3, to + 3 * next, step * 4);
    MEMORY_SEEN;
}

// Adds to the sums in register 0, or 1 for the SECOND outputs, of one group of rows.
template <bool SECOND> static inline void multiply_one(const bf16* weights, int64_t step, const bf16* x) {
    _tile_loadd(4, weights, step * 2);
    _tile_stream_loadd(6, x, 64);
    if (SECOND) _tile_dpbf16ps(1, 4, 6);
    else _tile_dpbf16ps(0, 4, 6);
}

// The same from k on along `in`, of weights that copy(k, to) gives. They are met one step later: then they have arrived in
// the cache.
template <bool SECOND, class Copy> static inline void multiply_copies(int64_t k, int64_t in, const bf16* x, Copy copy) {
    alignas(64) Pair parts;
    const auto part = [&](int64_t k) -> bf16(&)[SIDE][DEPTH] { return parts[k / DEPTH % 2]; };
    if (k < in) copy(k, part(k));
    for (; k < in; k += DEPTH) {
        if (k + DEPTH < in) copy(k + DEPTH, part(k + DEPTH));
        multiply_one<SECOND>(part(k)[0], DEPTH, x + SIDE * k);
    }
}

// The same along all of `in`.
template <bool SECOND> static inline void multiply_half(const Outputs& at, const bf16* x) {
    const int64_t whole = at.whole(0) ? at.in / DEPTH * DEPTH : 0;
    for (int64_t k = 0; k < whole; k += DEPTH) {  // some of the next weights come near; the processor's prefetcher brings the others
        const bf16* weights = at.row(SECOND * SIDE) + k;
        for (int i = SIDE; i < 2 * SIDE; i += 4) __builtin_prefetch(weights + i * at.in, 0, 2);
        multiply_one<SECOND>(weights, at.in, x + SIDE * k);
    }
    at.copies(SECOND, [&](auto copy) { multiply_copies<SECOND>(whole, at.in, x, copy); });
}

// Sums of one group of rows: one half of the outputs after the other, as memory gives 16 rows of weights sooner than 32.
static inline void few(const Outputs& at, const bf16* x, Sums* sums) {
    _tile_zero(0);
    _tile_zero(1);
    multiply_half<false>(at, x);
    multiply_half<true>(at, x);
    put_four(2, sums[0][0], SIDE, SIDE * SIDE);
}

// Adds to the sums in registers 0 .. 3: two times SIDE outputs, two groups of rows. Weights are kept as they come from memory,
// so that later rows find them in whole cache lines; what is read of the rows leaves them the nearest cache.
template <bool KEPT> static inline void multiply(const Outputs& at, int64_t k, Pair& kept, const bf16* x, const bf16* more_x) {
    _tile_stream_loadd(6, x, 64);
    if (KEPT) _tile_loadd(4, kept[0], 64);
    else _tile_loadd(4, at.row(0) + k, at.in * 2);
    _tile_dpbf16ps(0, 4, 6);
    if (KEPT) _tile_loadd(5, kept[1], 64);
    else _tile_loadd(5, at.row(SIDE) + k, at.in * 2);
    _tile_dpbf16ps(1, 5, 6);
    _tile_stream_loadd(7, more_x, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
    if (!KEPT) {
        _tile_stored(4, kept[0], 64);
        _tile_stored(5, kept[1], 64);
    }
}

// Calls take(row, sums) for each group of many rows. They meet as many weights at a time as stay in the nearest cache;
// meanwhile the next ones come near, and the core takes the sums of the two groups before: the unit does not wait for it.
template <class Take> static void many(const Outputs& at, const Outputs& next, const bf16* x, int64_t rows, Take take) {
    alignas(64) Sums sums[2][4];
    alignas(64) Pair kept[DEEP / DEPTH];
    thread_local Buffer<float> partial;
    const int64_t wide_in = (at.in + DEPTH - 1) / DEPTH * DEPTH, slices = (wide_in + DEEP - 1) / DEEP;
    const int64_t deep = (wide_in / DEPTH + slices - 1) / slices * DEPTH, blocks = (rows + 2 * SIDE - 1) / (2 * SIDE);
    const bool packed = at.packed();  // then what is expanded fetches what comes
    const int apart = blocks <= 2 ? 4 : 1;  // where rows are few, the processor's prefetcher brings the weights between
    if (slices > 1) grow(partial, blocks * sizeof sums[0] / sizeof(float));
    for (int64_t from = 0; from < wide_in; from += deep) {
        const int64_t to = std::min(from + deep, wide_in), third = (to - from) / (3 * DEPTH) * DEPTH;
        const bool last = to == wide_in;
        const Outputs& coming = last ? next : at;
        const int64_t ahead = last ? -from : deep;
        for (int64_t b = 0; b < blocks; b++) {
            const bf16 *here = x + b * 2 * SIDE * wide_in, *more = rows - b * 2 * SIDE > SIDE ? here + SIDE * wide_in : here;
            Sums* waiting = slices > 1 ? (Sums*)&partial[b * sizeof sums[0] / sizeof(float)] : sums[b % 2];
            if (from == 0) no_sums();
            else {
                _tile_loadd(0, waiting[0], 64);
                _tile_loadd(1, waiting[1], 64);
                _tile_loadd(2, waiting[2], 64);
                _tile_loadd(3, waiting[3], 64);
            }
            for (int half = 0; half < 2 && b == 0; half++)
                at.copies(half, [&](auto copy) {
                    for (int64_t k = from; k < to; k += DEPTH)
                        if (!at.whole(k)) copy(k, kept[(k - from) / DEPTH][half]);
                });
            const int64_t begin = 2 * SIDE * b / blocks, end = packed ? begin : 2 * SIDE * (b + 1) / blocks;
            const auto steps = [&](int64_t k, int64_t to) {
                for (; k < to; k += DEPTH) {
                    for (int64_t i = begin; i < end; i += apart) __builtin_prefetch(coming.row(i) + k + ahead, 0, 2);
                    Pair& weights = kept[(k - from) / DEPTH];
                    if (b == 0 && at.whole(k)) multiply<false>(at, k, weights, here + SIDE * k, more + SIDE * k);
                    else multiply<true>(at, k, weights, here + SIDE * k, more + SIDE * k);
                }
            };
            steps(from, from + third);
            if (last && b) take(b * 2 * SIDE - 2 * SIDE, sums[(b + 1) % 2]);
            steps(from + third, from + 2 * third);
            if (last && b) take(b * 2 * SIDE - SIDE, sums[(b + 1) % 2] + 2);
            steps(from + 2 * third, to);
            if (last) waiting = sums[b % 2];
            put_four(4, waiting[0][0], SIDE, SIDE * SIDE);
        }
    }
    take(blocks * 2 * SIDE - 2 * SIDE, sums[(blocks + 1) % 2]);
    if (rows > blocks * 2 * SIDE - SIDE) take(blocks * 2 * SIDE - SIDE, sums[(blocks + 1) % 2] + 2);
}

// Numbers of even and of odd outputs, rounded: pairs.
static inline vu pairs(vf even, vf odd) {
    alignas(64) static constexpr uint16_t ORDER[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return vu(_mm512_permutexvar_epi16(_mm512_load_si512(ORDER), __m512i(_mm512_cvtne2ps_pbh(__m512(odd), __m512(even)))));
}

// Outputs n .. n + count of at most SIDE rows, from two tiles of sums: biases are added, and all are rounded.
template <class O> static inline void put_rows(const Linear& at, int64_t n, int count, const Sums* sums, int64_t rows, O out, int64_t stride) {
    const float* sum = sums[0][0];
    vu words[SIDE];
    float bias[2 * SIDE] = {};
    for (int i = 0; at.bias && i < count; i++) bias[i] = widen(((const bf16*)at.bias)[n + i]);
    UNROLLED for (int i = 0; i < SIDE; i++) {
        vf even = load<vf>(sum + 2 * i * SIDE), odd = load<vf>(sum + (2 * i + 1) * SIDE);
        if (at.bias) even += splat(bias[2 * i]), odd += splat(bias[2 * i + 1]);
        words[i] = pairs(even, odd);
    }
    transpose(words);
    for (int64_t r = 0; r < std::min<int64_t>(SIDE, rows); r++) {
        const O to = out + (r * stride + n);
        if constexpr (std::is_same_v<O, bf16*>)
            if (count == 2 * SIDE) { store(to, words[r]); continue; }
        vf even = vf(words[r] << 16), odd = vf(words[r] & 0xffff0000u);
        if constexpr (std::is_same_v<O, Sum<bf16>>)
            if (count == 2 * SIDE) {
                const vu before = load<vu>(to.at);
                if (to.factor != 1) even = rounded(even * splat(to.factor), bf16()), odd = rounded(odd * splat(to.factor), bf16());
                store(to.at, pairs(vf(before << 16) + even, vf(before & 0xffff0000u) + odd));
                continue;
            }
        put(SHUFFLE(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), to, count);
        if (count > LANES) put(SHUFFLE(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31), to + LANES, count - LANES);
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
    static constexpr int64_t rows(int64_t count) { return (count + SIDE - 1) / SIDE * SIDE; }

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

    // The same of a group of at most SIDE rows, `count` numbers each.
    static void arrange_group(const float* numbers, int64_t rows, int64_t count, bf16* to, int64_t room, int64_t row) {
        bf16* pairs = to + row * room;
        for (int64_t k = 0; k < count; k += DEPTH, pairs += SIDE * DEPTH) {
            vu words[SIDE] = {};
            for (int64_t r = 0; r < rows; r++) {
                const float* from = numbers + r * count + k;
                const int here = int(count - k);
                const vf low = wide(from, here), high = here > LANES ? wide(from + LANES, here - LANES) : vf{};
                words[r] = vu(_mm512_cvtne2ps_pbh(__m512(high), __m512(low)));
            }
            transpose(words);
            UNROLLED for (int i = 0; i < SIDE; i++) store(pairs + i * DEPTH, words[i]);
        }
    }

    // Calls take(n, row, sums) for outputs first .. last, `step` at a time, and each group of rows: blocks of rows that stay
    // near, for each of them all weights. from(n) says where these stand.
    template <class From, class Take>
    static void each(int64_t first, int64_t last, int64_t step, const bf16* x, int64_t rows, From from, Take take) {
        if (rows == 0) return;
        const int64_t wide_in = room(from(first).in), fitting = std::max<int64_t>(2 * SIDE, NEAR_BYTES / (wide_in * 2));
        const int64_t blocks = (rows + fitting - 1) / fitting, most = (rows + blocks * 2 * SIDE - 1) / (blocks * 2 * SIDE) * 2 * SIDE;
        for (int64_t n = first; n < last && rows <= SIDE; n += step) {
            alignas(64) Sums sums[2];
            few(from(n), x, sums);
            take(n, 0, sums);
        }
        for (int64_t row = 0; row < rows && rows > SIDE; row += most)
            for (int64_t n = first; n < last; n += step)
                many(from(n), from(n + step < last ? n + step : first), x + row * wide_in, std::min(most, rows - row),
                     [&](int64_t r, const Sums* sums) { take(n, row + r, sums); });
    }

    // Outputs first .. last of all rows.
    template <class O>
    static void linear(const Linear& at, const bf16* x, int64_t rows, O out, int64_t stride, int64_t first, int64_t last) {
        const auto from = [&](int64_t n) {
            const int count = int(std::min<int64_t>(OUTPUTS, last - n));
            return Outputs{{&at, &at}, {n, n + SIDE}, {std::min(count, SIDE), std::max(0, count - SIDE)}};
        };
        each(first, last, OUTPUTS, x, rows, from, [&](int64_t n, int64_t row, const Sums* sums) {
            put_rows(at, n, int(std::min<int64_t>(OUTPUTS, last - n)), sums, rows - row, out + row * stride, stride);
        });
    }

    // What join(gates, what they let through) makes of gates for outputs first .. last of many rows, rounded and arranged as
    // the next layer wants it: pairs of outputs, row by row, as sums are.
    template <class Join>
    static void gated(const Linear& gate, const Linear& up, const bf16* x, int64_t rows, bf16* to, int64_t first, int64_t last, Join join) {
        const int64_t wide_to = room(gate.outputs);
        const auto from = [&](int64_t n) {
            const int count = int(std::min<int64_t>(SIDE, last - n));
            return Outputs{{&gate, &up}, {n, n}, {count, count}};
        };
        each(first, last, SIDE, x, rows, from, [&](int64_t n, int64_t row, const Sums* sums) {
            bf16* place = to + row * wide_to + n * SIDE;
            const auto number = [&](const Linear& layer, const Sums& sums, int i) {
                const bf16* bias = (const bf16*)layer.bias;
                const vf sum = load<vf>(sums[i]);
                return rounded(bias && n + i < last ? sum + splat(widen(bias[n + i])) : sum, bf16());
            };
            for (int i = 0; i < SIDE; i += ABREAST) {
                vf gates[ABREAST], ups[ABREAST];
                UNROLLED for (int j = 0; j < ABREAST; j++) gates[j] = number(gate, sums[0], i + j), ups[j] = number(up, sums[1], i + j);
                join(gates, ups);
                UNROLLED for (int j = 0; j < ABREAST; j += 2, place += DEPTH) store(place, pairs(gates[j], gates[j + 1]));
            }
        });
    }
};
#endif
