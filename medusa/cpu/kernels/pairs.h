// Rows as whole numbers of two bytes that meet packed weights as such, two inputs at a time (see whole.h).
//
// A vector holds two inputs of each of LANES outputs. AVX2 adds up the products of both in one instruction, sixteen at a time,
// where it multiplies eight floats, and takes half as many instructions to make weights of 4 bits numbers.
#pragma once
#include "packed.h"

typedef int16_t vs __attribute__((vector_size(4 * LANES)));
typedef uint16_t vus __attribute__((vector_size(4 * LANES)));
typedef uint8_t vbytes __attribute__((vector_size(4 * LANES)));
static inline vi add_products(vi sum, vs weights, vi two);

#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
constexpr bool IN_PAIRS = true;
static inline vi add_products(vi sum, vs weights, vi two) { return sum + vi(_mm256_madd_epi16(__m256i(weights), __m256i(two))); }
#else
constexpr bool IN_PAIRS = false;  // with VNNI bytes meet weights (whole.h), and elsewhere floats (packed.h)
#endif

// A run of a row.
struct alignas(16) Pairs {
    static constexpr int ROWS = 5;  // whose sums are in registers
    typedef int16_t some __attribute__((vector_size(2 * LANES)));
    int16_t numbers[RUN];
    float scale, total;  // of a 1; of all numbers

    static vf ordered(vf numbers) { return numbers; }  // as they are set and got
    void set(int i, vi whole) { store(numbers + i, __builtin_convertvector(whole, some)); }
    vi get(int i) const { return __builtin_convertvector(load<some>(numbers + i), vi); }
    void add_up(float first, float last) { total = scale * (first + last); }  // all numbers of either half
};

// Twice the numbers of E2M1, of four bits each in a byte.
static inline vbytes twice_e2m1(vbytes four) {
#if defined(__AVX512BW__)
    const __m128i twice = _mm_load_si128((const __m128i*)E2M1_TWICE);
    return vbytes(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(twice), __m512i(four)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m128i twice = _mm_load_si128((const __m128i*)E2M1_TWICE);
    return vbytes(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(twice), __m256i(four)));
#else
    const vbytes size = size_of_e2m1(four & 7), sign = vbytes(four > 7);
    return (size ^ sign) - sign;
#endif
}

// Inputs 2 P and 2 P + 1 of a panel's vector v. Numbers of 4 and 5 bits stay where they are in their words, which is times a
// power of 2; only the uppermost, which would be signs, are shifted.
template <int P> constexpr int POWER = P % 2 ? P < 8 ? 8 : 0 : P < 8 ? 0 : 4;
template <int P> static inline vs pair(const FourLanes& all, int v) {
    const vus words = load<vus>(all.pairs[P / 2 % 4][v * LANES]);
    return vs(P >= 8 && P % 2 ? words >> 12 : words & uint16_t(15 << POWER<P>));
}
template <int P> static inline vs pair(const FiveLanes& all, int v) {
    constexpr int LEFT = (P < 8 ? 4 : P % 2 ? -4 : 8) - P / 2;
    const vus fifth = load<vus>(all.fifth[v * LANES]), moved = LEFT < 0 ? fifth >> -LEFT : fifth << LEFT;
    return pair<P>((const FourLanes&)all, v) | vs(moved & uint16_t(16 << POWER<P>));
}
template <int P> static inline vs of_bytes(vs words) { return (P % 2 ? words : words << 8) >> 8; }
template <int P> static inline vs pair(const EightLanes& all, int v) { return of_bytes<P>(load<vs>(all.numbers[P / 2][v * LANES])); }
template <int P> static inline vs pair(const E2M1Lanes& all, int v) {
    const vus both = load<vus>(all.pairs[P / 2 % 4][v * LANES]);
    return of_bytes<P>(vs(twice_e2m1(vbytes(P < 8 ? both : both >> 4) & 15)));
}

// Adds products of R rows and inputs 2 P and 2 P + 1, for each P, to the sums of their vectors.
template <int P, int R, class Numbers>
[[gnu::always_inline]] static inline void add_pair(const Numbers& numbers, const Pairs* x, int64_t room, vi (&sums)[R][IN_PANEL]) {
    vs here[IN_PANEL];
    UNROLLED for (int v = 0; v < IN_PANEL; v++) {
        here[v] = pair<P>(numbers, v);
        IN_REGISTER(here[v]);
    }
    UNROLLED for (int r = 0; r < R; r++) {
        const vi two = in_register(vi{} + load<int32_t>(x[r * room].numbers + 2 * P));
        UNROLLED for (int v = 0; v < IN_PANEL; v++) sums[r][v] = in_register(add_products(sums[r][v], here[v], two));
    }
}
template <int... P, int R, class Numbers>
[[gnu::always_inline]] static inline void add_pairs(const Numbers& numbers, const Pairs* x, int64_t room, vi (&sums)[R][IN_PANEL]) {
    (add_pair<P>(numbers, x, room, sums), ...);
}

// Sums of a panel's outputs of R rows: to[r * STRIP + output].
template <int R, class Panel> static void panel_sums(const Panel& panel, int64_t runs, const Pairs* x, int64_t room, float* to) {
    vf sums[R][IN_PANEL] = {};
    for (int64_t run = 0; run < runs; run++, x++) {
        const auto& numbers = panel.numbers(run);
        fetch<Panel::BYTES>((const char*)&numbers);
        alignas(64) Values values;
        panel.find(run, &values);
        vi all[R][IN_PANEL];
        EACH_SUM all[r][v] = vi{};
        const auto add = [&](const float* factors) {
            EACH_SUM sums[r][v] = fma(floats(all[r][v]) * splat(x[r * room].scale), load<vf>(factors + v * LANES), sums[r][v]);
        };
        if constexpr (!SIGNED<typename Panel::Numbers>) {  // no sum of a power is too large, and each is a multiple of it
            add_pairs<1, 3, 5, 7>(numbers, x, room, all);
            EACH_SUM all[r][v] >>= 4;
            add_pairs<8, 10, 12, 14>(numbers, x, room, all);
            EACH_SUM all[r][v] >>= 4;
            add_pairs<0, 2, 4, 6, 9, 11, 13, 15>(numbers, x, room, all);
            add(values[0]);
            EACH_SUM sums[r][v] = fma(splat(x[r * room].total), load<vf>(values[1] + v * LANES), sums[r][v]);
        } else {
            add_pairs<0, 1, 2, 3, 4, 5, 6, 7>(numbers, x, room, all);
            if constexpr (Panel::SIX) {
                add(values[0]);
                EACH_SUM all[r][v] = vi{};
            }
            add_pairs<8, 9, 10, 11, 12, 13, 14, 15>(numbers, x, room, all);
            add(values[1]);
        }
    }
    EACH_SUM store(to + r * STRIP + v * LANES, sums[r][v]);
}
