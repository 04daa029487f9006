// Linear layers over packed weights that multiply whole numbers of bytes.
//
// A row comes in runs, each of which is brought to whole numbers by its own scale. Weights are packed as in weights.h and
// stay what they are: a run's sum is that of the products of whole numbers, which is exact, times both scales. A row's sums
// do not depend on the rows beside it. Whole numbers have
//   two bytes  the scale is a power of 2, so that numbers of bfloat16 are what they were down to a 128th of the run's
//              largest; what is smaller is off by at most a 2^15th of it, which bfloat16 itself holds to a 2^8th
//   one byte   LOSSY, see medusa/cpu/int8.py
//
// A vector holds four inputs of each of LANES outputs. The processor multiplies unsigned bytes by signed ones: weights of 8
// bits are ZERO too large, and their sums start at minus ZERO times the row's numbers. Two bytes of a number are signed
// both, and meet weights one after the other; or they meet weights of two bytes (pairs.h).
#pragma once
#include "pairs.h"

constexpr int ZERO = 128, ZERO_OF_SIX = ZERO >> 2, ZERO_OF_E2M1 = ZERO >> 3;
constexpr int NEAR_WHOLE = 16;  // rows that stay near while weights pass by

// A run of a row.
template <int BYTES> struct alignas(16) Whole {
    static constexpr int ROWS = LANES == 16 ? 8 : 5 - BYTES;  // whose sums are in registers
    typedef int8_t some __attribute__((vector_size(LANES)));
    int8_t numbers[BYTES][RUN];  // the lower bytes first; in the order of BYTE
    float scale, total;          // of a 1; of all numbers
    int32_t start[2];            // of sums over either half, with weights that are ZERO too large

    static vf ordered(vf numbers) { return ordered(numbers, std::make_integer_sequence<int, LANES>()); }
    template <int... J> static vf ordered(vf x, std::integer_sequence<int, J...>) { return SHUFFLE(x, x, (J / 4 * 4 + BYTE[J % 4])...); }
    void set(int i, vi whole) {
        store(numbers[0] + i, __builtin_convertvector(whole, some));
        if (BYTES > 1) store(numbers[BYTES - 1] + i, __builtin_convertvector((whole + 128) >> 8, some));
    }
    vi get(int i) const {
        return __builtin_convertvector(load<some>(numbers[0] + i), vi) + (__builtin_convertvector(load<some>(numbers[BYTES - 1] + i), vi) << 8);
    }
    void add_up(float first, float last) {  // all numbers of either half
        total = scale * (first + last);
        start[0] = -ZERO * int32_t(first), start[1] = -ZERO * int32_t(last);
    }
};

template <class W> static inline vi add_signed(vi sum, W weights, vi four);

// Adds products of unsigned bytes and four signed ones, each to its lane. Where no instruction adds up all four, sums are
// SHORT: of pairs, in 16 bits. Eight products of weights of 4 bits fit, four of 5 bits, two of 6, and none of 8.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define VNNI " and VNNI"
constexpr bool SHORT = false;
typedef vi Products;
static inline Products meet(Products sum, vbytes weights, vi four) {
#ifdef __AVX512VNNI__
    return vi(_mm512_dpbusd_epi32(__m512i(sum), __m512i(weights), __m512i(four)));
#else
    return vi(_mm256_dpbusd_avx_epi32(__m256i(sum), __m256i(weights), __m256i(four)));
#endif
}
static inline vi whole(Products sum) { return sum; }
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define VNNI ""
constexpr bool SHORT = true;
typedef vs Products;
static inline Products meet(Products sum, vbytes weights, vi four) {
#ifdef __AVX512BW__
    return sum + vs(_mm512_maddubs_epi16(__m512i(weights), __m512i(four)));
#else
    return sum + vs(_mm256_maddubs_epi16(__m256i(weights), __m256i(four)));
#endif
}
static inline vi whole(Products sum) {
#ifdef __AVX512BW__
    return vi(_mm512_madd_epi16(__m512i(sum), _mm512_set1_epi16(1)));
#else
    return vi(_mm256_madd_epi16(__m256i(sum), _mm256_set1_epi16(1)));
#endif
}
// With signed weights: their sizes, by numbers with their signs.
template <class W> static inline vi add_signed(vi sum, W weights, vi four) {
#ifdef __AVX512BW__
    const __m512i sizes = _mm512_abs_epi8(__m512i(weights)), negative = _mm512_sub_epi8(__m512i{}, __m512i(four));
    const __m512i numbers = _mm512_mask_mov_epi8(__m512i(four), _mm512_movepi8_mask(__m512i(weights)), negative);
#else
    const __m256i sizes = _mm256_abs_epi8(__m256i(weights)), numbers = _mm256_sign_epi8(__m256i(four), __m256i(weights));
#endif
    return sum + whole(meet(Products{}, vbytes(sizes), vi(numbers)));
}
#else
#define VNNI ""
constexpr bool SHORT = false;
typedef vi Products;
static inline Products meet(Products sum, vbytes weights, vi four) {
    for (int c = 0; c < 32; c += 8) sum += (vi(weights) >> c & 255) * (four << (24 - c) >> 24);
    return sum;
}
static inline vi whole(Products sum) { return sum; }
#endif
static inline vi spread(const int8_t* four) { return vi{} + load<int32_t>(four); }

// Weights of a panel's vector v, inputs 4 g .. 4 g + 3.
static inline vbytes weights(const FourLanes& all, int v, int g) {
    const vs both = load<vs>(all.pairs[g % 4][v * LANES]);
    return vbytes(g < 4 ? both : both >> 4) & 15;
}
static inline vbytes weights(const FiveLanes& all, int v, int g) {
    const vs fifth = load<vs>(all.fifth[v * LANES]);
    return weights((const FourLanes&)all, v, g) | (vbytes(g < 4 ? fifth << (4 - g) : fifth >> (g - 4)) & 16);
}
static inline vbytes weights(const E2M1Lanes& all, int v, int g) {  // ZERO_OF_E2M1 too large
    return twice_e2m1(weights((const FourLanes&)all, v, g)) + uint8_t(ZERO_OF_E2M1);
}
static inline vbytes weights(const EightLanes& all, int v, int g) { return load<vbytes>(all.numbers[g][v * LANES]); }

// Sums of products of R rows and a panel, each in its lane.
template <int R, int BYTES, class Sum = vi> using Dots = Sum[R][BYTES][IN_PANEL];
#define EACH_DOT UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int b = 0; b < BYTES; b++) UNROLLED for (int v = 0; v < IN_PANEL; v++)

// Calls add(i, sum, weights, numbers) for inputs 4 g .. 4 g + 3 and COUNT of g, the i-th time: FIRST and those behind it, or
// where weights stand in PAIRS, those too that stand above them.
template <int FIRST, int COUNT, bool PAIRS, int R, int BYTES, class Sum, class From, class Add>
static inline void in_fours(From weights, const Whole<BYTES>* x, int64_t room, Sum (&sums)[R][BYTES][IN_PANEL], Add add) {
    UNROLLED for (int i = 0; i < COUNT; i++) {
        const int g = PAIRS ? FIRST + i / 2 + i % 2 * 4 : FIRST + i;
        vbytes here[IN_PANEL];
        UNROLLED for (int v = 0; v < IN_PANEL; v++) here[v] = weights(v, g);
        UNROLLED for (int r = 0; r < R; r++) UNROLLED for (int b = 0; b < BYTES; b++) {
            const vi four = spread(x[r * room].numbers[b] + 4 * g);
            UNROLLED for (int v = 0; v < IN_PANEL; v++) {
                add(i, sums[r][b][v], here[v], four);
                IN_REGISTER(sums[r][b][v]);  // in this order: the compiler would keep all products
            }
        }
    }
}
template <int FIRST, int COUNT, bool PAIRS, int R, int BYTES, class From>
static inline void dots(From weights, const Whole<BYTES>* x, int64_t room, vi (&to)[R][BYTES][IN_PANEL]) {
    Dots<R, BYTES, Products> sums;
    in_fours<FIRST, COUNT, PAIRS>(weights, x, room, sums, [](int i, Products& sum, vbytes weights, vi four) {
        sum = meet(i ? sum : Products{}, weights, four);
    });
    EACH_DOT to[r][b][v] += whole(sums[r][b][v]);
}
// Over half a run of weights of 8 bits, or of 6.
template <int HALF, bool SIX, int R, int BYTES>
static inline void half_dots(const EightLanes& all, const Whole<BYTES>* x, int64_t room, vi (&to)[R][BYTES][IN_PANEL]) {
    constexpr int G = 4 * HALF;
    if constexpr (SHORT && !SIX) {  // sums of pairs would not fit with a ZERO
        const auto from = [&](int v, int g) { return weights(all, v, g); };
        EACH_DOT to[r][b][v] = vi{};
        in_fours<G, 4, false>(from, x, room, to, [](int, vi& sum, vbytes weights, vi four) { sum = add_signed(sum, weights, four); });
    } else {
        const auto from = [&](int v, int g) { return weights(all, v, g) + uint8_t(SIX ? ZERO_OF_SIX : ZERO); };
        EACH_DOT to[r][b][v] = vi{} + (b ? 0 : x[r * room].start[HALF] >> (SIX ? 2 : 0));
        if constexpr (SHORT) dots<G, 2, false>(from, x, room, to), dots<G + 2, 2, false>(from, x, room, to);
        else dots<G, 4, false>(from, x, room, to);
    }
}

// Sums of a panel's outputs of R rows: to[r * STRIP + output].
template <int R, int BYTES, class Panel> static void panel_sums(const Panel& panel, int64_t runs, const Whole<BYTES>* x, int64_t room, float* to) {
    typedef typename Panel::Numbers Numbers;
    vf sums[R][IN_PANEL] = {};
    for (int64_t run = 0; run < runs; run++, x++) {
        const Numbers& numbers = panel.numbers(run);
        fetch<Panel::BYTES>((const char*)&numbers);
        alignas(64) Values values;
        panel.find(run, &values);
        Dots<R, BYTES> all;
        const auto add = [&](const float* factors) {
            EACH_SUM {
                const vi sum = BYTES > 1 ? all[r][0][v] + (all[r][BYTES - 1][v] << 8) : all[r][0][v];
                sums[r][v] = fma(floats(sum) * splat(x[r * room].scale), load<vf>(factors + v * LANES), sums[r][v]);
            }
        };
        if constexpr (std::is_same_v<Numbers, EightLanes>) {
            half_dots<0, Panel::SIX>(numbers, x, room, all);
            add(values[0]);
            half_dots<1, Panel::SIX>(numbers, x, room, all);
            add(values[1]);
        } else {
            const auto from = [&](int v, int g) { return weights(numbers, v, g); };
            constexpr bool IS_E2M1 = std::is_same_v<Numbers, E2M1Lanes>;
            EACH_DOT all[r][b][v] = vi{} + (IS_E2M1 && !b ? (x[r * room].start[0] + x[r * room].start[1]) / (ZERO / ZERO_OF_E2M1) : 0);
            if constexpr (SHORT && (IS_E2M1 || std::is_same_v<Numbers, FiveLanes>)) dots<0, 4, true>(from, x, room, all), dots<2, 4, true>(from, x, room, all);
            else dots<0, 8, true>(from, x, room, all);
            add(values[0]);
            if (!IS_E2M1) EACH_SUM sums[r][v] = fma(splat(x[r * room].total), load<vf>(values[1] + v * LANES), sums[r][v]);
        }
    }
    EACH_SUM store(to + r * STRIP + v * LANES, sums[r][v]);
}

// A run's whole numbers, of which the largest has this size: a scale, and its inverse, by which they were.
struct Scale { float one, inverse; };
static inline float of_bits(int32_t bits) { float x; return std::memcpy(&x, &bits, 4), x; }
template <int BYTES> static inline Scale scale_of(int32_t largest) {  // as its bits are
    const int power = largest >> 23;  // of 2, and 127
    if (power == 255) return {NAN, 0};
    if (BYTES == 1) return {of_bits(largest) / 127, largest > 0 ? 127 / of_bits(largest) : 0};
    if (power < 15) return {0, 0};  // no number of this size would change a sum
    return {of_bits((power - 14) << 23), of_bits((254 + 14 - power) << 23)};
}

// How a pass meets packed weights; numbers between its layers are of type T. Rows of two bytes meet others too, as numbers.
template <class T, int BYTES> struct InBytes {
    typedef std::conditional_t<BYTES == 2 && IN_PAIRS, Pairs, Whole<BYTES>> number;
    static constexpr bool MATRIX_UNIT = false;
    static constexpr int64_t UNIT = RUN, OUTPUTS = PANEL;
    struct Thread { ~Thread() {} };
    static int64_t room(int64_t in) { return (in + RUN - 1) / RUN; }
    static constexpr int64_t rows(int64_t count) { return count; }

    static void arrange(const float* numbers, int64_t in, number* to, int64_t room, int64_t row, int64_t column) {
        constexpr int LARGEST = 127 * 257;  // whose lower byte has a sign too
        to += row * room + column / RUN;
        for (int64_t k = 0; k < in; k += RUN, to++) {
            vf parts[RUN / LANES];
            vi most = {};
            UNROLLED for (int i = 0; i < RUN / LANES; i++) {
                const int64_t from = k + i * LANES, left = in - from;
                parts[i] = number::ordered(left > 0 ? wide(numbers + from, int(std::min<int64_t>(LANES, left))) : vf{});
                const vi size = vi(parts[i]) & 0x7fffffff;  // as its bits are: what is no number is larger than all numbers
                most = size > most ? size : most;
            }
            const Scale scale = scale_of<BYTES>(largest(most));
            if (std::isnan(scale.one)) UNROLLED for (vf& part : parts) part = vf{};
            vi halves[2] = {};
            UNROLLED for (int i = 0; i < RUN / LANES; i++) {  // added to 1.5 * 2^23, a number loses what is behind its point
                vi whole = __builtin_convertvector((parts[i] * splat(scale.inverse) + splat(12582912.f)) - splat(12582912.f), vi);
                if (BYTES > 1) whole = whole > LARGEST ? vi{} + LARGEST : whole;
                halves[2 * i * LANES / RUN] += whole;
                to->set(i * LANES, whole);
            }
            const v4 sums = added(floats(halves[0]), floats(halves[1]), vf{}, vf{});
            to->scale = scale.one, to->add_up(sums[0], sums[1]);
        }
    }

    // A row's numbers.
    static void numbers_of(const number* x, int64_t in, float* to) {
        for (int64_t k = 0; k < in; k += RUN, x++)
            UNROLLED for (int i = 0; i < RUN; i += LANES) put(number::ordered(floats(x->get(i)) * splat(x->scale)), to + k + i);
    }

    // Outputs first .. last of all rows.
    template <class O>
    static void linear(const Linear& at, const number* x, int64_t rows, O out, int64_t stride, int64_t first, int64_t last) {
        if constexpr (BYTES > 1) if (at.packing == NUMBERS) {
            thread_local Buffer<float> row;
            thread_local Buffer<::number<T>> numbers;
            grow(row, room(at.in) * RUN), grow(numbers, rows * Plain<T>::room(at.in));
            for (int64_t r = 0; r < rows; r++) {
                numbers_of(x + r * room(at.in), at.in, row.data());
                Plain<T>::arrange(row.data(), at.in, numbers.data(), Plain<T>::room(at.in), r, 0);
            }
            return Plain<T>::linear(at, numbers.data(), rows, out, stride, first, last);
        }
        constexpr int MOST = number::ROWS;
        const int64_t room = InBytes::room(at.in);
        alignas(64) float sums[MOST * STRIP + LANES];
        in_groups(rows, NEAR_WHOLE, room * RUN, PANEL, first, last, [&](int64_t row, int64_t count, int64_t from, int64_t to) {
            const int64_t parts = (count + MOST - 1) / MOST, each = (count + parts - 1) / parts;
            for (int64_t n = from, next; n < to; n = next) {
                next = std::min(to, n / PANEL * PANEL + PANEL);
                with_form(at, n / PANEL, [&](const auto& panel) {
                    for (int64_t r = row; r < row + count; r += each) {
                        const int some = int(std::min(each, row + count - r));
                        with_constant<MOST>(some, [&](auto rows) { panel_sums<decltype(rows)::value>(panel, room, x + r * room, room, sums); });
                        finish<T>(at, n, int(next - n), sums + n % PANEL, some, out + r * stride, stride);
                    }
                });
            }
        });
    }
};
