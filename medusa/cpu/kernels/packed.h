// Linear layers over packed weights where there is neither a matrix unit nor products of bytes (whole.h), and how a pass meets
// weights as they are.
//
// No weight is rounded: whole numbers meet a row's numbers, and the sum over half a run is multiplied by its factor. A vector
// holds inputs of LANES outputs. Every sum is one chain along `in`, whatever rows stand beside it.
#pragma once
#include <cassert>

#include "linear.h"

// FAST: products of whole numbers of two bytes take less time than those of floats. Then rows that meet packed weights are such
// numbers (whole.h), and `packed_linear` is not compiled.
#if defined(__AVX512VNNI__) || (defined(__AVX2__) && !defined(__AVX512F__))
constexpr bool FAST = true;
#else
constexpr bool FAST = false;
#endif
constexpr int IN_PANEL = PANEL / LANES;  // vectors of a panel
constexpr int PACKED_ROWS = 8;           // whose sums are in registers
#define EACH_SUM UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int v = 0; v < IN_PANEL; v++)

// Input i of a run, of a panel's vector v of outputs.
static inline vu words_from(const uint8_t (&four)[PANEL][4], int v) { return load<vu>((const uint32_t*)four[v * LANES]); }
static inline vu bits_from(const uint8_t (&four)[PANEL][4], int v, int i, int above) {
    return words_from(four, v) >> (vu{} + uint32_t(8 * BYTE[i % 4] + above));
}
// Numbers of 4 and 5 bits stay where they are in their words, which is times a power of 2: rows are divided by it, see `divide`.
// Only the uppermost, which would be signs, are shifted.
constexpr bool uppermost(int i) { return i / 16 && BYTE[i % 4] == 3; }
constexpr int power(int i) { return uppermost(i) ? 0 : 8 * BYTE[i % 4] + i / 16 * 4; }
static inline vu four_bits(const FourLanes& all, int v, int i) {
    const vu words = words_from(all.pairs[i / 4 % 4], v);
    return uppermost(i) ? words >> 28 : words & 15u << power(i);
}
static inline vf input(const FourLanes& all, int v, int i) { return floats(vi(four_bits(all, v, i))); }
static inline vf input(const FiveLanes& all, int v, int i) {
    const vu fifth = words_from(all.fifth, v);
    const vu moved = uppermost(i) ? fifth >> (20 + i / 4) : fifth << (4 + i / 16 * 4 - i / 4);  // bit 8 * BYTE[i % 4] + i / 4
    return floats(vi(four_bits(all, v, i) | (moved & 16u << power(i))));
}
static inline vf input(const E2M1Lanes& all, int v, int i) {
    const vu bits = bits_from(all.pairs[i / 4 % 4], v, i, i / 16 * 4);
#ifdef __AVX512F__
    return vf(_mm512_permutexvar_ps(__m512i(bits), __m512(vf{0, 1, 2, 3, 4, 6, 8, 12, -0.f, -1, -2, -3, -4, -6, -8, -12})));
#else
    return vf(vu(floats(size_of_e2m1(vi(bits & 7)))) | (bits & 8) << 28);
#endif
}
static inline vf input(const EightLanes& all, int v, int i) {
    return floats(load<vi>((const int32_t*)all.numbers[i / 4][v * LANES]) << (24 - 8 * BYTE[i % 4]) >> 24);
}

// How a row's numbers meet COUNT of these inputs at a time.
template <class Number> struct Step {
    static constexpr int COUNT = 1;
    typedef vf Inputs;
    template <class N> static Inputs inputs(const N& all, int v, int i) { return input(all, v, i); }
    static constexpr int place(int i) {  // of input i among a run's numbers as they are arranged
        constexpr int BOTH = 2 * LANES;
        return i / BOTH * BOTH + i % 2 * LANES + i % BOTH / 2;
    }
    static vf meet(vf sum, Inputs inputs, const float* numbers) { return fma(inputs, splat(*numbers), sum); }
    static vf total(const float* numbers) {
        vf sum = load<vf>(numbers);
        for (int i = LANES; i < RUN; i += LANES) sum += load<vf>(numbers + i);
        return sum;
    }
};
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <> struct Step<bf16> {
    static constexpr int COUNT = 2;
    typedef vu Inputs;  // pairs
    template <class N> static Inputs inputs(const N& all, int v, int i) { return vu(input(all, v, i)) >> 16 | vu(input(all, v, i + 1)); }
#ifdef __AVX512BF16__
    static vf dot(vf sum, vu a, vu b) { return vf(_mm512_dpbf16_ps(__m512(sum), (__m512bh)a, (__m512bh)b)); }
#else
    static vf dot(vf sum, vu a, vu b) { return vf(vbfdotq_f32(float32x4_t(sum), bfloat16x8_t(a), bfloat16x8_t(b))); }
#endif
    static constexpr int place(int i) { return i; }
    static vf meet(vf sum, Inputs inputs, const bf16* numbers) { return dot(sum, inputs, vu{} + load<uint32_t>((const uint32_t*)numbers)); }
    static vf total(const bf16* numbers) {
        vf sum{};
        vu ones = vu{} + 0x3f803f80;
        IN_REGISTER(ones);  // GCC 12 would use an instruction for it that not every such processor has (fmov of halves)
        for (int i = 0; i < RUN; i += 2 * LANES) sum = dot(sum, load<vu>((const uint32_t*)(numbers + i)), ones);
        return sum;
    }
};
#endif

// Sums of a panel's outputs of R rows: to[r * STRIP + output]. totals: of each row's runs.
template <int R, class Panel>
static void panel_sums(const Panel& panel, int64_t runs, const number<bf16>* x, int64_t room, const float* totals, float* to) {
    typedef Step<number<bf16>> Step;
    constexpr bool SIGN = SIGNED<typename Panel::Numbers>;
    constexpr int HALVES = R * IN_PANEL <= 4 ? 2 : 1;  // that take turns: each sum waits for its last product
    vf sums[R][IN_PANEL] = {};
    for (int64_t run = 0; run < runs; run++) {
        const auto& numbers = panel.numbers(run);
        fetch<Panel::BYTES>((const char*)&numbers);
        const Values& values = panel.values(run);
        const number<bf16>* row[R];
        UNROLLED for (int r = 0; r < R; r++) {
            row[r] = x + r * room + run * RUN;
            FORGET(row[r]);  // the compiler would find the place of every number first
        }
        UNROLLED for (int first = 0; first < 2; first += HALVES) {
            vf part[HALVES][R][IN_PANEL] = {};
            UNROLLED for (int step = 0; step < RUN / 2; step += Step::COUNT) UNROLLED for (int half = 0; half < HALVES; half++) {
                const int i = (first + half) * RUN / 2 + step;
                typename Step::Inputs inputs[IN_PANEL];
                UNROLLED for (int v = 0; v < IN_PANEL; v++) inputs[v] = Step::inputs(numbers, v, i);
                EACH_SUM {
                    part[half][r][v] = Step::meet(part[half][r][v], inputs[v], row[r] + Step::place(i));
                    IN_REGISTER(part[half][r][v]);  // in this order: it would keep all inputs
                }
            }
            UNROLLED for (int half = 0; half < HALVES; half++)
                EACH_SUM sums[r][v] = fma(part[half][r][v], load<vf>(values[SIGN ? first + half : 0] + v * LANES), sums[r][v]);
        }
        if (!SIGN) EACH_SUM sums[r][v] = fma(splat(totals[r * runs + run]), load<vf>(values[1] + v * LANES), sums[r][v]);
    }
    EACH_SUM store(to + r * STRIP + v * LANES, sums[r][v]);
}

// Numbers of a row, each divided by the power of 2 of its place in a run, exactly.
struct Shares {
    alignas(64) float all[RUN] = {};
    constexpr Shares() {
        for (int i = 0; i < RUN; i++) all[Step<number<bf16>>::place(i)] = 1.f / float(1 << power(i));
    }
};
static constexpr Shares SHARES;
static inline void divide(const number<bf16>* numbers, int64_t count, number<bf16>* to) {
    for (int64_t k = 0; k < count; k += LANES) put(wide(numbers + k) * load<vf>(SHARES.all + k % RUN), to + k);
}

// Sums of each run of rows: to[row][run].
static inline void find_totals(const number<bf16>* x, int64_t rows, int64_t room, int64_t runs, float* to) {
    for (int64_t r = 0; r < rows; r++, x += room, to += runs)
        for (int64_t run = 0; run < runs; run += 4) {
            const int count = int(std::min<int64_t>(4, runs - run));
            vf four[4] = {};
            for (int i = 0; i < count; i++) four[i] = Step<number<bf16>>::total(x + (run + i) * RUN);
            const v4 all = added(four[0], four[1], four[2], four[3]);
            for (int i = 0; i < count; i++) to[run + i] = all[i];
        }
}

// Outputs first .. last of all rows.
template <class O>
static void packed_linear(const Linear& at, const number<bf16>* x, int64_t rows, O out, int64_t stride, int64_t first, int64_t last) {
    assert(at.in_lanes() && at.in % RUN == 0);  // Packed.for_here sees to it
    const int64_t runs = at.in / RUN, room = apart<bf16>(at.in);
    alignas(64) float sums[PACKED_ROWS * STRIP + LANES];
    const Form& form = FORMS[at.kind()];
    const bool divided = form.bits < 8 && !form.sign;  // numbers of 4 and 5 bits are times `power`
    thread_local Buffer<float> totals;
    thread_local Buffer<number<bf16>> shares;
    grow(totals, rows * runs), grow(shares, divided ? PACKED_ROWS * room : 0);
    if (!form.sign) find_totals(x, rows, room, runs, totals.data());
    in_groups(rows, PACKED_ROWS, at.in, PANEL, first, last, [&](int64_t row, int64_t count, int64_t from, int64_t to) {
        const number<bf16>* numbers = x + row * room;
        if (divided) {
            for (int64_t r = 0; r < count; r++) divide(numbers + r * room, at.in, &shares[r * room]);
            numbers = shares.data();
        }
        for (int64_t n = from, next; n < to; n = next) {
            next = std::min(to, n / PANEL * PANEL + PANEL);
            with_form(at, n / PANEL, [&](const auto& panel) {
                with_constant<PACKED_ROWS>(int(count), [&](auto some) {
                    panel_sums<decltype(some)::value>(panel, runs, numbers, room, &totals[row * runs], sums);
                });
            });
            finish<bf16>(at, n, int(next - n), sums + n % PANEL, count, out + row * stride, stride);
        }
    });
}

// Outputs of a layer that stay together where threads share it.
template <class W> static inline int64_t together(const Linear& at) {
    return at.packing == NUMBERS ? W::OUTPUTS : std::max<int64_t>(W::OUTPUTS, PANEL);
}

// How a pass meets weights as they are.
template <class T> struct Plain {
    typedef ::number<T> number;
    static constexpr bool MATRIX_UNIT = false;
    static constexpr int64_t UNIT = STEP<T>;       // numbers of a row that are arranged without the others
    static constexpr int64_t OUTPUTS = ::OUTPUTS;  // of a tile
    struct Thread { ~Thread() {} };                // what a thread of a team needs
    static int64_t room(int64_t in) { return apart<T>(in); }  // numbers of a row, arranged
    static constexpr int64_t rows(int64_t count) { return count; }  // that so many take up
    // Numbers of a row, from a column on, among rows with so much room each.
    static void arrange(const float* numbers, int64_t count, number* to, int64_t room, int64_t row, int64_t column) {
        Row<T>::arrange(numbers, count, to + row * room + column);
    }
    template <class O>
    static void linear(const Linear& at, const number* x, int64_t rows, O out, int64_t stride, int64_t first, int64_t last) {
        if constexpr (std::is_same_v<T, bf16> && !FAST)
            if (at.packing != NUMBERS && rows) return packed_linear(at, x, rows, out, stride, first, last);
        assert(at.packing == NUMBERS || !rows);
        ::linear<T>(at, x, rows, out, stride, first, last);
    }
};
