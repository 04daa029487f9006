// LOSSY: linear layers whose weights and rows are rounded to 8 bits, see medusa/cpu/int8.py.
//
// A row comes in groups of GROUP numbers, each rounded by its own largest one: whole numbers that fit a byte, their scale,
// and where their sums start. Weights travel as unsigned bytes (the processor multiplies unsigned by signed ones), so a
// sum of products is too large by WEIGHT_ZERO times the row's numbers, and starts at minus that. Products of whole numbers
// are exact.
#pragma once
#include "linear.h"

constexpr int64_t GROUP = 128;
constexpr int WEIGHT_ZERO = 128, LARGEST = 127, BYTES = 4 * LANES;
constexpr int TILE8 = 4;  // rows, and outputs, whose sums are in registers

typedef int8_t vb __attribute__((vector_size(LANES)));

struct alignas(64) Group {
    int8_t numbers[GROUP];
    vi start;  // of each lane's sum
    float scale;
};

static inline vi multiply_add(vi sum, const uint8_t* weights, const int8_t* numbers) {
#if defined(__AVX512VNNI__)
    return vi(_mm512_dpbusd_epi32(__m512i(sum), _mm512_loadu_si512(weights), _mm512_loadu_si512(numbers)));
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return vi(_mm256_dpbusd_avx_epi32(__m256i(sum), _mm256_loadu_si256((const __m256i*)weights), _mm256_loadu_si256((const __m256i*)numbers)));
#elif defined(__AVX2__)
    for (int i = 0; i < BYTES; i += 16) {  // in 16 bits: products of bytes would not fit into sums of two
        const __m256i wide_weights = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(weights + i)));
        const __m256i wide_numbers = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(numbers + i)));
        const __m256i products = _mm256_madd_epi16(wide_weights, wide_numbers);
#ifdef __AVX512F__
        sum += vi(_mm512_zextsi256_si512(products));
#else
        sum += vi(products);
#endif
    }
    return sum;
#else
    for (int j = 0; j < LANES; j++) {
        int32_t products = 0;
        for (int i = 0; i < 4; i++) products += int32_t(weights[4 * j + i]) * numbers[4 * j + i];
        sum[j] += products;
    }
    return sum;
#endif
}

// How a pass meets weights of 8 bits; numbers between its layers are of type T.
template <class T> struct Rounded {
    typedef Group number;
    static constexpr bool MATRIX_UNIT = false;
    static constexpr int64_t UNIT = GROUP, OUTPUTS = TILE8;
    struct Thread { ~Thread() {} };
    static int64_t room(int64_t in) { return (in + GROUP - 1) / GROUP; }
    static constexpr int64_t rows(int64_t count) { return count; }

    static void arrange(const float* numbers, int64_t in, Group* to, int64_t room, int64_t row, int64_t column) {
        to += row * room + column / GROUP;
        for (int64_t k = 0; k < in; k += GROUP, to++) {
            vf parts[GROUP / LANES], most = {};
            for (int i = 0; i < GROUP / LANES; i++) {
                const int64_t from = k + i * LANES, left = in - from;
                const vf part = parts[i] = left > 0 ? wide(numbers + from, int(std::min<int64_t>(LANES, left))) : vf{};
                const vf size = part < vf{} ? -part : part;
                most = size > most ? size : most;
            }
            float largest = most[0];
            for (int j = 1; j < LANES; j++) largest = std::max(largest, float(most[j]));
            to->scale = largest / LARGEST;
            const vf factor = splat(largest > 0 ? LARGEST / largest : 0);
            for (int i = 0; i < GROUP / LANES; i++) {  // added to 1.5 * 2^23, a number loses what is behind its point
                const vi whole = __builtin_convertvector((parts[i] * factor + splat(12582912.f)) - splat(12582912.f), vi);
                store(to->numbers + i * LANES, __builtin_convertvector(whole, vb));
            }
            uint8_t zeros[BYTES];
            std::fill(zeros, zeros + BYTES, WEIGHT_ZERO);
            to->start = vi{};
            for (int k = 0; k < GROUP; k += BYTES) to->start = multiply_add(to->start, zeros, to->numbers + k);
            to->start = -to->start;
        }
    }

    // Outputs n .. n + count of R rows.
    template <int R, class O>
    static inline void tile(const Linear& at, int64_t n, int count, const Group* x, O out, int64_t stride) {
        const int64_t groups = room(at.in);
        const uint8_t* weight[TILE8];
        for (int c = 0; c < TILE8; c++) weight[c] = (const uint8_t*)at.weight + (n + std::min(c, count - 1)) * groups * GROUP;
        vf sums[R][TILE8] = {};
        for (int64_t g = 0; g < groups; g++) {
            for (int c = 0; c < TILE8; c++)
                for (int64_t k = 0; k < GROUP; k += 64) __builtin_prefetch(weight[c] + (g + TILE8 * groups) * GROUP + k);
            for (int r = 0; r < R; r++) {
                const Group& group = x[r * groups + g];
                for (int c = 0; c < TILE8; c++) {
                    vi sum = group.start;
                    for (int k = 0; k < GROUP; k += BYTES) sum = multiply_add(sum, weight[c] + g * GROUP + k, group.numbers + k);
                    sums[r][c] = fma(__builtin_convertvector(sum, vf), splat(group.scale), sums[r][c]);
                }
            }
        }
        v4 scales = {}, biases = {};
        for (int c = 0; c < count; c++) scales[c] = at.scales[n + c], biases[c] = at.bias ? widen(((const T*)at.bias)[n + c]) : 0;
        for (int r = 0; r < R; r++) {
            const v4 all = added(sums[r][0], sums[r][1], sums[r][2], sums[r][3]) * scales + biases;
            for (int c = 0; c < count; c++) narrow(rounded<T>(all[c]), out + r * stride + n + c);
        }
    }
    template <int R, class O>
    static void tiles(const Linear& at, int64_t first, int64_t last, const Group* x, O out, int64_t stride) {
        for (int64_t n = first; n < last; n += TILE8) tile<R>(at, n, int(std::min<int64_t>(TILE8, last - n)), x, out, stride);
    }

    // Outputs first .. last of all rows.
    template <class O>
    static void linear(const Linear& at, const Group* x, int64_t rows, O out, int64_t stride, int64_t first, int64_t last) {
        in_groups(rows, TILE8, room(at.in) * GROUP, TILE8, first, last, [&](int64_t row, int64_t count, int64_t from, int64_t to) {
            with_constant<TILE8>(int(count), [&](auto some) {
                tiles<decltype(some)::value>(at, from, to, x + row * room(at.in), out + row * stride, stride);
            });
        });
    }
};
