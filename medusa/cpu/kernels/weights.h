// Where a linear layer's weights stand: as numbers, or packed as GGUF files and group-wise checkpoints hold them
// (medusa/cpu/packed.py).
//
// A matrix unit meets them expanded, as a model has them whose weights were expanded when it was loaded (tiles.h). Elsewhere
// sums are those of the whole numbers, times their factors (packed.h, whole.h). Each way has an order of its own.
#pragma once
#include "vectors.h"

constexpr int64_t PANEL = 16;                 // outputs whose packed weights stand together
constexpr int64_t RUN = 32;                   // numbers along `in` that share a scale, or two
constexpr int64_t PACKED_AHEAD = 4096;        // bytes that are on their way

enum Packing : int64_t { NUMBERS, SIMPLE_FOUR, SIMPLE_FIVE, SIMPLE_EIGHT, SUPER_FOUR, SUPER_FIVE, SUPER_EIGHT, GROUP_FOUR, GROUP_EIGHT, MX_FOUR };
// Added to a packing: its numbers stand as vectors of outputs take them; rows that meet it are rounded to 8 bits (whole.h).
constexpr int64_t IN_LANES = 16, ROUNDED_ROWS = 2 * IN_LANES;

struct Linear {
    const void *weight, *bias;  // [outputs, in] and [outputs] or null
    int64_t outputs, in;
    int64_t packing;  // of NUMBERS of the pass's type; else each panel is a `Form`
    int64_t runs;     // of `in` that share factors, a power of two

    bool in_lanes() const { return packing > IN_LANES; }
    // Of the whole numbers that rows may be (whole.h); 0 = rows are not whole numbers.
    int bytes() const { return packing > ROUNDED_ROWS ? 1 : in_lanes() ? 2 : 0; }
    int64_t kind() const { return (packing - 1) % IN_LANES + 1; }  // without what was added
};

// A whole number q for every input of a run, for each output of a panel.
struct Four {
    uint16_t words[PANEL / 4][RUN];  // bits 4 j .. 4 j + 3 of [v][i]: input i of output 4 v + j
};
struct Five : Four {
    uint32_t fifth[PANEL];  // bit i: of input i, above the other four
};
struct Eight {
    int8_t numbers[PANEL][RUN];
};
// Numbers of MXFP4 (Open Compute Project, Microscaling Formats 1.0): a sign above two bits of exponent and one of mantissa.
struct E2M1 : Four {};
alignas(16) static constexpr int8_t E2M1_TWICE[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // as whole numbers
// The same for vectors of outputs: four inputs of an output stand side by side, then those of the next output. The two in the
// middle change places, so that every second number is one of a pair.
constexpr int BYTE[] = {0, 2, 1, 3};  // of input i % 4
struct FourLanes {
    uint8_t pairs[RUN / 8][PANEL][4];  // [j][r][BYTE[i]]: input 4 j + i of output r, and above it input 16 + 4 j + i
};
struct FiveLanes : FourLanes {
    uint8_t fifth[PANEL][4];  // bit j of [r][BYTE[i]]: of input 4 j + i, above the other four
};
struct EightLanes {
    int8_t numbers[RUN / 4][PANEL][4];  // of SUPER_EIGHT -32 .. 31
};
struct E2M1Lanes : FourLanes {};
// Whether numbers have signs; then there is no second value that is added (see Values).
template <class N> constexpr bool SIGNED = std::is_base_of_v<Eight, N> || std::is_base_of_v<EightLanes, N> || std::is_same_v<N, E2M1> || std::is_same_v<N, E2M1Lanes>;

// Input i of output r, and what makes it q where it is 0.
static inline int number_of(const Four& all, int64_t r, int64_t i) { return all.words[r / 4][i] >> r % 4 * 4 & 15; }
static inline int number_of(const Five& all, int64_t r, int64_t i) { return number_of((const Four&)all, r, i) | (all.fifth[r] >> i & 1) << 4; }
static inline int number_of(const Eight& all, int64_t r, int64_t i) { return all.numbers[r][i]; }
static inline int number_of(const FourLanes& all, int64_t r, int64_t i) { return all.pairs[i / 4 % 4][r][BYTE[i % 4]] >> i / 16 * 4 & 15; }
static inline int number_of(const FiveLanes& all, int64_t r, int64_t i) {
    return number_of((const FourLanes&)all, r, i) | (all.fifth[r][BYTE[i % 4]] >> i / 4 & 1) << 4;
}
static inline int number_of(const EightLanes& all, int64_t r, int64_t i) { return all.numbers[i / 4][r][BYTE[i % 4]]; }
static inline int number_of(const E2M1& all, int64_t r, int64_t i) { return E2M1_TWICE[number_of((const Four&)all, r, i)]; }
static inline int number_of(const E2M1Lanes& all, int64_t r, int64_t i) { return E2M1_TWICE[number_of((const FourLanes&)all, r, i)]; }
static inline void set(Four& all, int64_t r, int64_t i, int q) { all.words[r / 4][i] |= (q & 15) << r % 4 * 4; }
static inline void set(Five& all, int64_t r, int64_t i, int q) { set((Four&)all, r, i, q), all.fifth[r] |= uint32_t(q >> 4) << i; }
static inline void set(Eight& all, int64_t r, int64_t i, int q) { all.numbers[r][i] = int8_t(q); }
static inline void set(FourLanes& all, int64_t r, int64_t i, int q) { all.pairs[i / 4 % 4][r][BYTE[i % 4]] |= (q & 15) << i / 16 * 4; }
static inline void set(FiveLanes& all, int64_t r, int64_t i, int q) { set((FourLanes&)all, r, i, q), all.fifth[r][BYTE[i % 4]] |= q >> 4 << i / 4; }
static inline void set(EightLanes& all, int64_t r, int64_t i, int q) { all.numbers[i / 4][r][BYTE[i % 4]] = int8_t(q); }
// Numbers of output r in another order.
template <class From, class To> static inline void reorder(const From& from, int64_t r, To& to) {
    for (int64_t i = 0; i < RUN; i++) set(to, r, i, number_of(from, r, i));
}
static inline void reorder(const E2M1& from, int64_t r, E2M1Lanes& to) { reorder((const Four&)from, r, (FourLanes&)to); }
static inline void reorder(const E2M1Lanes& from, int64_t r, E2M1& to) { reorder((const FourLanes&)from, r, (Four&)to); }

// Whole numbers of 8 or 16 bits, as they stand in memory.
template <class B> static inline vi whole(const B* from) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<B, uint8_t>) return vi(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
    if constexpr (std::is_same_v<B, int8_t>) return vi(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    if constexpr (std::is_same_v<B, uint8_t>) return vi(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from)));
    if constexpr (std::is_same_v<B, int8_t>) return vi(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#endif
    typedef B numbers __attribute__((vector_size(LANES * sizeof(B))));
    return __builtin_convertvector(load<numbers>(from), vi);
}
static inline vf floats(vi x) { return __builtin_convertvector(x, vf); }
// Powers of 2: 1 for 127, and 0 for 0.
struct e8m0 { uint8_t exponent; };
static inline vf wide(const e8m0* from) { return vf(whole(&from->exponent) << 23); }

// Twice the sizes of E2M1 with these three bits.
template <class Integers> static inline Integers size_of_e2m1(Integers bits) {
    return bits + (Integers(bits > 4) & (bits - 4)) + (Integers(bits > 6) & (2 * (bits - 6)));
}

// A panel is blocks of runs: factors of the block, codes of each run, numbers of each run. They give an output two values in
// a run:
//   no codes   the first factor, the last factor
//   one        the factor, -factor * code
//   two        first factor * first code, last factor * second code; the latter negative where numbers have no sign
// An input is first * q + second; of SIGNED numbers first * q in the run's first half and second * q in the other.
typedef float Values[2][PANEL];
// Where a panel's runs stand.
struct Runs {
    const char* from;
    int64_t shift, size, before;  // logarithm of the runs of a block; bytes of a block, and of those before its numbers
    int64_t in_block(int64_t run) const { return run & ((1 << shift) - 1); }
    const char* block(int64_t run) const { return from + (run >> shift) * size; }
};
template <class F, int FACTORS, class C, int CODES, bool SIGN>
[[gnu::always_inline]] static inline void find_values(const Runs& at, int64_t run, int64_t count, Values* to) {
    for (int64_t end = run + count; run < end; run++, to++) {
        const F* factors = (const F*)at.block(run);
        const C* codes = (const C*)(factors + FACTORS * PANEL) + at.in_block(run) * CODES * PANEL;
        for (int i = 0; i < PANEL; i += LANES) {
            vf first = wide(factors + i), second = wide(factors + (FACTORS - 1) * PANEL + i);
            if (CODES == 1) second = -(first * floats(whole(codes + i)));
            if (CODES == 2) first *= floats(whole(codes + i)), second *= floats(whole(codes + PANEL + i));
            if (CODES == 2 && !SIGN) second = -second;
            store((*to)[0] + i, first), store((*to)[1] + i, second);
        }
    }
}
struct Form {
    int bits;   // in which a number is kept
    bool sign;  // of numbers
    int64_t head, coded;  // bytes of a block's factors, and of a run's codes
    void (*find)(const Runs&, int64_t run, int64_t count, Values*);
};
template <class F, int FACTORS, class C, int CODES, bool SIGN> constexpr Form form(int bits) {
    return {bits, SIGN, FACTORS * PANEL * sizeof(F), CODES * PANEL * sizeof(C), find_values<F, FACTORS, C, CODES, SIGN>};
}
static constexpr Form FORMS[] = {
    {},
    form<f16, 2, uint8_t, 0, false>(4),    // SIMPLE_FOUR
    form<f16, 2, uint8_t, 0, false>(5),    // SIMPLE_FIVE
    form<f16, 1, int8_t, 0, true>(8),      // SIMPLE_EIGHT
    form<f16, 2, uint8_t, 2, false>(4),    // SUPER_FOUR
    form<f16, 2, uint8_t, 2, false>(5),    // SUPER_FIVE
    form<f16, 1, int8_t, 2, true>(8),      // SUPER_EIGHT
    form<float, 1, uint8_t, 1, false>(4),  // GROUP_FOUR
    form<float, 1, int8_t, 0, true>(8),    // GROUP_EIGHT
    form<e8m0, 1, uint8_t, 0, true>(4),    // MX_FOUR
};

// A panel whose numbers are N. What meets it is compiled for each N: values of some runs are found at a time. Where that takes
// too long it is compiled for each FORM.
template <class N, int64_t FORM = NUMBERS> class Panel : Runs {
    static constexpr int64_t AT_ONCE = FORM ? 1 : 8;  // a power of two
    const int64_t all;
    const Form& form;
    alignas(64) mutable Values kept[AT_ONCE];
    mutable int64_t known = -1;

  public:
    typedef N Numbers;
    static constexpr bool SIX = FORM == SUPER_EIGHT;  // numbers have 6 bits, and each half of a run has a factor of its own
    static constexpr int64_t BYTES = sizeof(N) + 64;  // of a run and its values, about

    Panel(const Linear& at, int64_t panel, const Form& form = FORMS[FORM]) : all((at.in + RUN - 1) / RUN), form(form) {
        shift = __builtin_ctzll(at.runs), before = form.head + at.runs * form.coded, size = before + at.runs * sizeof(N);
        from = (const char*)at.weight + panel * (all >> shift) * size;
    }
    const N& numbers(int64_t run) const { return ((const N*)(block(run) + before))[in_block(run)]; }
    const Values& values(int64_t run) const {
        const int64_t in_kept = run & (AT_ONCE - 1), first = run - in_kept;
        if (first != known) find(known = first, kept);
        return kept[in_kept];
    }
    // The same of a run and of those that are found with it.
    void find(int64_t run, Values* to) const {
        if constexpr (FORM) FORMS[FORM].find(*this, run, 1, to);
        else form.find(*this, run, std::min(AT_ONCE, all - run), to);
    }
};

// The type of a run's numbers in the other order; never called.
Four other_order(const FourLanes&);
Five other_order(const FiveLanes&);
Eight other_order(const EightLanes&);
E2M1 other_order(const E2M1Lanes&);
FourLanes other_order(const Four&);
FiveLanes other_order(const Five&);
EightLanes other_order(const Eight&);
E2M1Lanes other_order(const E2M1&);

// Calls use(a panel of a packed weight), whose numbers are of these kinds.
template <class FourBits, class FiveBits, class EightBits, class Floats, class Use>
static inline void with_kind(const Linear& at, int64_t panel, Use use) {
    const Form& form = FORMS[at.kind()];
    if (form.bits == 4 && form.sign) use(Panel<Floats>(at, panel, form));
    else if (form.bits == 4) use(Panel<FourBits>(at, panel, form));
    else if (form.bits == 5) use(Panel<FiveBits>(at, panel, form));
    else use(Panel<EightBits>(at, panel, form));
}
template <class Use> static inline void with_panel(const Linear& at, int64_t panel, Use use) {
    with_kind<Four, Five, Eight, E2M1>(at, panel, use);
}
// The same of one in lanes, compiled for each form.
template <class Use> static inline void with_form(const Linear& at, int64_t panel, Use use) {
    switch (at.kind()) {
        case SIMPLE_FOUR: return use(Panel<FourLanes, SIMPLE_FOUR>(at, panel));
        case SIMPLE_FIVE: return use(Panel<FiveLanes, SIMPLE_FIVE>(at, panel));
        case SIMPLE_EIGHT: return use(Panel<EightLanes, SIMPLE_EIGHT>(at, panel));
        case SUPER_FOUR: return use(Panel<FourLanes, SUPER_FOUR>(at, panel));
        case SUPER_FIVE: return use(Panel<FiveLanes, SUPER_FIVE>(at, panel));
        case SUPER_EIGHT: return use(Panel<EightLanes, SUPER_EIGHT>(at, panel));
        case GROUP_FOUR: return use(Panel<FourLanes, GROUP_FOUR>(at, panel));
        case GROUP_EIGHT: return use(Panel<EightLanes, GROUP_EIGHT>(at, panel));
        default: return use(Panel<E2M1Lanes, MX_FOUR>(at, panel));
    }
}

// Inputs of output r in a run, in bfloat16.
template <class N> static inline void expand(const N& numbers, int64_t r, float first, float second, bf16* to) {
    for (int64_t i = 0; i < RUN; i++) {
        const float q = float(number_of(numbers, r, i));
        narrow(SIGNED<N> ? q * (i < RUN / 2 ? first : second) : first * q + second, to + i);
    }
}
template <int COUNT, class N> static inline void expand(const N& numbers, int64_t row, const float* first, const float* second, bf16* to, int64_t stride) {
    UNROLLED for (int c = 0; c < COUNT; c++) expand(numbers, row + c, first[c], second[c], to + c * stride);
}
#ifdef __AVX512BF16__
static inline __m512 level(float first, float second, float from = 0) {
    const vf steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return __m512(fma(splat(first), from ? steps + from : steps, splat(second)));
}
typedef uint16_t Words __attribute__((vector_size(64)));
static inline Words indices(const Four& numbers, int64_t r) { return load<Words>(numbers.words[r / 4]) >> Words(_mm512_set1_epi16(r % 4 * 4)) & 15; }
static inline void expand(const Five& numbers, int64_t r, float first, float second, bf16* to) {
    const __m512i lower = __m512i(indices(numbers, r)), index = _mm512_mask_add_epi16(lower, numbers.fifth[r], lower, _mm512_set1_epi16(16));
    const __m512i levels = __m512i(_mm512_cvtne2ps_pbh(level(first, second, 16), level(first, second)));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(index, levels));
}
static inline void expand(const Eight& numbers, int64_t r, float first, float second, bf16* to) {
    const vf front = floats(whole(numbers.numbers[r])) * splat(first), back = floats(whole(numbers.numbers[r] + RUN / 2)) * splat(second);
    _mm512_storeu_si512(to, __m512i(_mm512_cvtne2ps_pbh(__m512(back), __m512(front))));
}
static inline __m512 levels(const Four&, float first, float second) { return level(first, second); }
static inline __m512 levels(const E2M1&, float first, float) { return __m512(floats(whole(E2M1_TWICE)) * splat(first)); }
// Levels of two outputs stand side by side.
template <int COUNT, class N> static inline void expand_four(const N& numbers, int64_t row, const float* first, const float* second, bf16* to, int64_t stride) {
    row = row / COUNT * COUNT;  // as it is: now the compiler knows most shifts
    UNROLLED for (int c = 0; c < COUNT; c += 2) {
        const bool two = c + 1 < COUNT;
        const __m512 here = levels(numbers, first[c], second[c]), next = levels(numbers, first[c + two], second[c + two]);
        const __m512i both = __m512i(_mm512_cvtne2ps_pbh(next, here));
        _mm512_storeu_si512(to + c * stride, _mm512_permutexvar_epi16(__m512i(indices(numbers, row + c)), both));
        if (two) _mm512_storeu_si512(to + (c + 1) * stride, _mm512_permutexvar_epi16(__m512i(indices(numbers, row + c + 1) | 16), both));
    }
}
template <int COUNT> static inline void expand(const Four& numbers, int64_t row, const float* first, const float* second, bf16* to, int64_t stride) {
    expand_four<COUNT>(numbers, row, first, second, to, stride);
}
template <int COUNT> static inline void expand(const E2M1& numbers, int64_t row, const float* first, const float* second, bf16* to, int64_t stride) {
    expand_four<COUNT>(numbers, row, first, second, to, stride);
}
#endif

// Brings near as many bytes as are used now, of those that are used later.
template <int64_t BYTES> static inline void fetch(const char* from) {
    UNROLLED for (int64_t i = 0; i < BYTES; i += 64) __builtin_prefetch(from + PACKED_AHEAD + i, 0, 2);
}

// Numbers of a run of `count` outputs of a panel, from `row` on: to[output - row], `stride` numbers apart.
template <class Panel> static inline void expand(const Panel& panel, int64_t run, int64_t row, int64_t count, bf16* to, int64_t stride) {
    const auto& numbers = panel.numbers(run);
    fetch<Panel::BYTES>((const char*)&numbers);
    const Values& values = panel.values(run);
    const float *front = values[0] + row, *back = values[1] + row;
    FORGET(front);  // read from memory, which spreads a number without the units that shuffle
    FORGET(back);
    if (count == PANEL) return expand<PANEL>(numbers, 0, front, back, to, stride);
    for (int64_t r = 0; r < count; r++) expand<1>(numbers, row + r, front + r, back + r, to + r * stride, stride);
}

// Calls use(a panel of a weight that is packed in either order).
template <class Use> static inline void with_any(const Linear& at, int64_t panel, Use use) {
    if (at.in_lanes()) with_kind<FourLanes, FiveLanes, EightLanes, E2M1Lanes>(at, panel, use);
    else with_panel(at, panel, use);
}

// All numbers of outputs first .. last: to[output - first][in].
static void expand(const Linear& at, int64_t first, int64_t last, bf16* to) {
    for (int64_t n = first, next; n < last; n = next) {
        next = std::min(last, n / PANEL * PANEL + PANEL);
        with_any(at, n / PANEL, [&](const auto& panel) {
            for (int64_t k = 0; k < at.in; k += RUN) expand(panel, k / RUN, n % PANEL, next - n, to + (n - first) * at.in + k, at.in);
        });
    }
}

// The numbers of output n, where they stand or, if they are packed, in `room`.
template <class T> static inline const T* row_of(const Linear& at, int64_t n, Buffer<T>& room) {
    if constexpr (std::is_same_v<T, bf16>)
        if (at.packing != NUMBERS) {
            grow(room, at.in);
            expand(at, n, n + 1, room.data());
            return room.data();
        }
    return (const T*)at.weight + n * at.in;
}

// The same times a factor, rounded to T.
template <class T> static inline const T* row_of(const Linear& at, int64_t n, Buffer<T>& room, float factor) {
    const T* row = row_of(at, n, room);
    if (factor == 1) return row;
    grow(room, at.in);
    T* to = room.data();
    for_vectors(at.in, [&](int64_t i, int here) { put(rounded(wide(row + i, here) * splat(factor), T()), to + i, here); });
    return to;
}
