// Where a linear layer's weights stand: as numbers, or packed as GGUF files hold them (medusa/cpu/packed.py).
//
// Packed weights are expanded to the numbers of the pass in blocks of outputs that stay in a core's cache, and are met
// there as others are. So sums are those of a model whose weights were expanded when it was loaded, bit by bit.
#pragma once
#include "vectors.h"

constexpr int64_t PANEL = 16;                  // outputs whose packed weights stand together
constexpr int64_t RUN = 32;                    // numbers along `in` that share a scale, or two
constexpr int64_t EXPANDED_BYTES = 64 << 10;   // of expanded weights at a time, about
constexpr int64_t PACKED_AHEAD = 2048;         // bytes that are on their way

enum Packing : int64_t { NUMBERS, FOUR_BITS, EIGHT_BITS, WIDE_FOUR_BITS, WIDE_EIGHT_BITS };

struct Linear {
    const void *weight, *bias;  // [outputs, in] and [outputs] or null
    int64_t outputs, in;
    const float* scales;  // [outputs] where weights are rounded to 8 bits: [outputs, whole groups] bytes; else null
    int64_t packing;      // otherwise the weight is [panels of outputs, runs of `in`] of these:
};

// Number i of output r is scale[r] * q + offset[r]: q is 4 bits of word i % 8, from bit i / 8 * 4 on.
template <class S> struct FourBits {
    S scale[PANEL], offset[PANEL];
    uint16_t words[PANEL][8];
};
// scale[i / (RUN / SCALES)][r] * numbers[r][i].
template <class S, int SCALES> struct EightBits {
    S scale[SCALES][PANEL];
    int8_t numbers[PANEL][RUN];
};
template <class P> constexpr bool IS_FOUR_BITS = false;
template <class S> constexpr bool IS_FOUR_BITS<FourBits<S>> = true;

// Calls use(what a packed weight is made of).
template <class Use> static inline void with_parts(int64_t packing, Use use) {
    if (packing == FOUR_BITS) use(FourBits<f16>());
    else if (packing == EIGHT_BITS) use(EightBits<f16, 1>());
    else if (packing == WIDE_FOUR_BITS) use(FourBits<float>());
    else use(EightBits<float, 2>());
}

// The 16 numbers that a scale and an offset make of 4 bits.
template <class T> static inline void levels(float scale, float offset, T* to) {
    for (int i = 0; i < 16; i += LANES) {
        vf steps;
        for (int j = 0; j < LANES; j++) steps[j] = float(i + j);
        put(rounded(fma(splat(scale), steps, splat(offset)), T()), to + i, 16 - i);
    }
}
template <class T> static inline void expand(const uint16_t* words, float scale, float offset, T* to) {
    T level[16];
    levels(scale, offset, level);
    for (int i = 0; i < RUN; i++) to[i] = level[words[i % 8] >> i / 8 * 4 & 15];
}
template <class T> static inline void expand(const int8_t* numbers, float first, float second, T* to) {
    for (int i = 0; i < RUN; i += LANES) {
#if defined(__AVX512F__)
        const vf whole = vf(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(numbers + i)))));
#elif defined(__AVX2__)
        const vf whole = vf(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(numbers + i)))));
#else
        typedef int8_t bytes __attribute__((vector_size(LANES)));
        const vf whole = __builtin_convertvector(load<bytes>(numbers + i), vf);
#endif
        put(rounded(splat(i < RUN / 2 ? first : second) * whole, T()), to + i);
    }
}
#if defined(__AVX512BW__)
static inline void expand(const uint16_t* words, float scale, float offset, bf16* to) {
    const __m512 steps = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 level = _mm512_fmadd_ps(_mm512_set1_ps(scale), steps, _mm512_set1_ps(offset));
#ifdef __AVX512BF16__
    const __m512i twice = __m512i(_mm512_cvtne2ps_pbh(level, level));
#else
    const __m512i twice = _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_srli_epi32(__m512i(rounded(vf(level), bf16())), 16)));
#endif
    // The levels stand there twice: a fifth bit of the index, of the next number, changes nothing.
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)words));
    alignas(64) static constexpr uint16_t SHIFTS[] = {0, 0, 0, 0, 0, 0, 0, 0, 4,  4,  4,  4,  4,  4,  4,  4,
                                                      8, 8, 8, 8, 8, 8, 8, 8, 12, 12, 12, 12, 12, 12, 12, 12};
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(_mm512_srlv_epi16(all, _mm512_load_si512(SHIFTS)), twice));
}
#elif defined(__AVX2__)
static inline void expand(const uint16_t* words, float scale, float offset, bf16* to) {
    const auto upper_half = [&](vf steps) { return __m256i(vu(rounded(fma(splat(scale), steps, splat(offset)), bf16())) >> 16); };
    const __m256i level = _mm256_permute4x64_epi64(  // the levels, then their bytes, in both halves
        _mm256_packus_epi32(upper_half(vf{0, 1, 2, 3, 4, 5, 6, 7}), upper_half(vf{8, 9, 10, 11, 12, 13, 14, 15})), 0xd8);
    const auto bytes = [](__m256i x) { return _mm256_permute4x64_epi64(_mm256_packus_epi16(x, x), 0x88); };
    const __m256i lower = bytes(_mm256_and_si256(level, _mm256_set1_epi16(255))), upper = bytes(_mm256_srli_epi16(level, 8));
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)words));
    const __m256i index = _mm256_and_si256(_mm256_srlv_epi64(all, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(lower, index), high = _mm256_shuffle_epi8(upper, index), byte = _mm256_set1_epi16(255);
    // Numbers 0 .. 7 and 8 .. 15 are in even bytes, the others in odd ones.
    const __m256i even = _mm256_or_si256(_mm256_and_si256(low, byte), _mm256_slli_epi16(high, 8));
    const __m256i odd = _mm256_or_si256(_mm256_srli_epi16(low, 8), _mm256_andnot_si256(byte, high));
    _mm256_storeu_si256((__m256i*)to, even), _mm256_storeu_si256((__m256i*)(to + 16), odd);
}
#endif
#if defined(__AVX512BF16__)
static inline void expand(const int8_t* numbers, float first, float second, bf16* to) {
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)numbers)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(numbers + 16))));
    const __m512 front = _mm512_mul_ps(low, _mm512_set1_ps(first)), back = _mm512_mul_ps(high, _mm512_set1_ps(second));
    _mm512_storeu_si512(to, __m512i(_mm512_cvtne2ps_pbh(back, front)));
}
#endif

// Numbers k .. k + RUN of outputs first .. first + count: to[output - first], `stride` numbers apart. They are of one panel.
template <class T> static inline void expand(const Linear& at, int64_t first, int64_t count, int64_t k, T* to, int64_t stride) {
    alignas(64) float spread[2][PANEL];
    const float *front = spread[0], *back = spread[1];
    const int64_t place = first / PANEL * (at.in / RUN) + k / RUN, row = first % PANEL;
    const auto widened = [&](int which, const auto* from) {
        for (int i = 0; i < PANEL; i += LANES) store(spread[which] + i, wide(from + i));
    };
    const auto rows = [count](auto one) {
        if (count < PANEL) for (int64_t r = 0; r < count; r++) one(r);
        else UNROLLED for (int64_t r = 0; r < PANEL; r++) one(r);
    };
    with_parts(at.packing, [&](const auto& kind) {
        using Part = std::decay_t<decltype(kind)>;
        const Part& part = ((const Part*)at.weight)[place];
        for (size_t i = 0; i < sizeof part; i += 64) __builtin_prefetch((const char*)&part + PACKED_AHEAD + i, 0, 3);
        if constexpr (IS_FOUR_BITS<Part>) widened(0, part.scale), widened(1, part.offset);
        else widened(0, part.scale[0]), widened(1, part.scale[sizeof part.scale / sizeof part.scale[0] - 1]);
        FORGET(front);  // read from memory, which spreads a number without the units that shuffle
        FORGET(back);
        rows([&](int64_t r) {
            if constexpr (IS_FOUR_BITS<Part>) expand(part.words[row + r], front[row + r], back[row + r], to + r * stride);
            else expand(part.numbers[row + r], front[row + r], back[row + r], to + r * stride);
        });
    });
}

// All numbers of outputs first .. last: to[output - first][in].
template <class T> static void expand(const Linear& at, int64_t first, int64_t last, T* to) {
    for (int64_t n = first, next; n < last; n = next) {
        next = std::min(last, n / PANEL * PANEL + PANEL);
        for (int64_t k = 0; k < at.in; k += RUN) expand(at, n, next - n, k, to + (n - first) * at.in + k, at.in);
    }
}

// Calls use(layer of numbers, from, to) for outputs first .. last, as many at a time as stay near where they are packed.
template <class T, class Use> static void expanded(const Linear& at, int64_t first, int64_t last, Use use) {
    if (at.packing == NUMBERS) return use(at, first, last);
    thread_local Buffer<T> numbers;
    const int64_t fitting = EXPANDED_BYTES / int64_t(at.in * sizeof(T)), block = std::max(3 * PANEL, fitting / 48 * 48);
    grow(numbers, block * at.in);
    for (int64_t from = first; from < last; from += block) {
        const int64_t to = std::min(from + block, last);
        expand(at, from, to, numbers.data());
        Linear there = at;
        there.weight = numbers.data() - from * at.in, there.packing = NUMBERS;
        use(there, from, to);
    }
}
