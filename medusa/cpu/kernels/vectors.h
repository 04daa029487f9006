// Vectors of floats, and of numbers of 16 bits read as floats. Needs GCC's vector extensions (g++ 11, clang++ 14).
//
// The compiler must not contract a product and a sum by itself (-ffp-contract=off): it does so in one place and not in
// another, and rows would differ in their last bits. Where one operation is meant, fma() says so.
#pragma once
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__ARM_NEON)
constexpr int LANES = 4;
#else
constexpr int LANES = 8;
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef uint16_t bf16;
struct f16 { uint16_t bits; };  // C++ has no such number everywhere

enum NumberType : int64_t { FLOAT32, BFLOAT16, FLOAT16 };  // as DTYPES of medusa/cpu/native.py
// Calls use(a number of that type).
template <class Use> static inline void with_number(int64_t type, Use use) {
    if (type == BFLOAT16) use(bf16());
    else if (type == FLOAT16) use(f16());
    else use(float());
}

#define UNROLLED _Pragma("GCC unroll 16")
// The compiler takes what a pointer points to for unknown.
#define FORGET(pointer) asm volatile("" : "+r"(pointer))
// It forgets what memory holds.
#define READ_AGAIN asm volatile("" : : : "memory")
// A vector is read from memory once, not by every operation that takes it.
#if defined(__AVX__)
#define IN_REGISTER(vector) asm("" : "+v"(vector))
#elif defined(__ARM_NEON)
#define IN_REGISTER(vector) asm("" : "+w"(vector))
#else
#define IN_REGISTER(vector) (void)0
#endif

// Memory that begins at a cache line: a vector read from it lies in one.
template <class T> struct Aligned {
    typedef T value_type;
    Aligned() = default;
    template <class U> Aligned(const Aligned<U>&) {}
    T* allocate(size_t count) { return (T*)::operator new(count * sizeof(T), std::align_val_t(64)); }
    void deallocate(T* memory, size_t) { ::operator delete(memory, std::align_val_t(64)); }
    bool operator==(const Aligned&) const { return true; }
    bool operator!=(const Aligned&) const { return false; }
};
template <class T> using Buffer = std::vector<T, Aligned<T>>;
template <class T> static inline void grow(Buffer<T>& buffer, size_t count) { if (buffer.size() < count) buffer.resize(count); }

template <class V, class T> static inline V load(const T* from) { V x; std::memcpy(&x, from, sizeof x); return x; }
template <class V, class T> static inline void store(T* to, V x) { std::memcpy(to, &x, sizeof x); }
static inline vf splat(float x) { return x - vf{}; }

// a * b + c, rounded once where the processor can do so.
static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
    return vf(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#elif defined(__FMA__)
    return vf(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#elif defined(__ARM_NEON)
    return vf(vfmaq_f32(float32x4_t(c), float32x4_t(a), float32x4_t(b)));
#else
    return a * b + c;
#endif
}

// Words of a and b by their numbers, which are constants.
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define SHUFFLE4 SHUFFLE
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#define SHUFFLE4(a, b, ...) __builtin_shuffle(a, b, i4{__VA_ARGS__})
#endif

// Words of 16 bits as words of 32, and the lower halves of these. (GCC 12 would go by halves of a vector.)
static inline vu widened(vh x) {
#if defined(__AVX512F__)
    return vu(_mm512_cvtepu16_epi32(__m256i(x)));
#elif defined(__AVX2__)
    return vu(_mm256_cvtepu16_epi32(__m128i(x)));
#else
    return __builtin_convertvector(x, vu);
#endif
}
static inline vh narrowed(vu x) {
#if defined(__AVX512F__)
    return vh(_mm512_cvtepi32_epi16(__m512i(x)));
#else
    return __builtin_convertvector(x, vh);
#endif
}

// Numbers of float16 as floats.
static inline vf from_f16(vh x) {
#if defined(__AVX512F__)
    return vf(_mm512_cvtph_ps(__m256i(x)));
#elif defined(__F16C__)
    return vf(_mm256_cvtph_ps(__m128i(x)));
#elif defined(__ARM_NEON)
    return vf(vcvt_f32_f16(vreinterpret_f16_u16(uint16x4_t(x))));
#else
    const vu all = widened(x), size = (all & 0x7fff) << 13, power = size & 0xf800000;
    const vu normal = size + (power == 0xf800000 ? vu{} + (224 << 23) : vu{} + (112 << 23));  // infinities stay such
    const vf denormal = vf(size + (113 << 23)) - splat(0x1p-14f);
    return vf((power == 0 ? vu(denormal) : normal) | (all & 0x8000) << 16);
#endif
}
// The nearest numbers of float16, of equally near ones the even; infinite from 65520 on.
static inline vh to_f16(vf x) {
#if defined(__AVX512F__)
    return vh(_mm512_cvtps_ph(__m512(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    return vh(_mm256_cvtps_ph(__m256(x), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__ARM_NEON)
    return vh(vreinterpret_u16_f16(vcvt_f16_f32(float32x4_t(x))));
#else
    const vu all = vu(x), size = all & 0x7fffffff;
    const vu normal = (size - (112 << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    const vu denormal = vu(vf(size) + splat(0.5f)) - vu(splat(0.5f));  // a sum with 0.5 has steps of 2^-24
    const vu large = size > 0x7f800000 ? vu{} + 0x7e00 : vu{} + 0x7c00;
    const vu number = size >= (143u << 23) ? large : size < (113u << 23) ? denormal : normal;
    return narrowed(number | (all >> 16 & 0x8000));
#endif
}

static inline uint32_t bits(float x) { uint32_t y; std::memcpy(&y, &x, 4); return y; }
static inline float widen(float x) { return x; }
static inline float widen(bf16 x) { uint32_t bits = uint32_t(x) << 16; float y; std::memcpy(&y, &bits, 4); return y; }
static inline float widen(f16 x) { return from_f16(vh{} + x.bits)[0]; }
static inline void narrow(float x, float* to) { *to = x; }
static inline void narrow(float x, bf16* to) {
    *to = x != x ? 0x7fc0 : uint16_t((bits(x) + 0x7fff + (bits(x) >> 16 & 1)) >> 16);
}
static inline void narrow(float x, f16* to) { to->bits = to_f16(splat(x))[0]; }
// The nearest numbers that T holds, and they alone.
static inline vf rounded(vf x, float) { return x; }
static inline vf rounded(vf x, bf16) {
    const vu bits = vu(x);
    return x != x ? x : vf((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}
static inline vf rounded(vf x, f16) { return from_f16(to_f16(x)); }
static inline void put(vf x, float* to) { store(to, x); }
static inline void put(vf x, bf16* to) { store(to, narrowed(vu(x) >> 16)); }  // x is rounded
static inline void put(vf x, f16* to) { store(to, to_f16(x)); }
template <class T> static inline void put(vf x, T* to, int count) {  // the first numbers only
    if (count >= LANES) return put(x, to);
    T part[LANES];
    put(x, part), std::memcpy(to, part, count * sizeof(T));
}
static inline vf wide(const float* from) { return load<vf>(from); }
static inline vf wide(const bf16* from) { return vf(widened(load<vh>(from)) << 16); }
static inline vf wide(const f16* from) { return from_f16(load<vh>(from)); }
template <class T> static inline vf wide(const T* from, int count) {  // the first numbers only, zeros behind them
    if (count >= LANES) return wide(from);
    T part[LANES] = {};
    std::memcpy(part, from, count * sizeof(T));
    return wide(part);
}
// Vectors that go through a long computation together: a step of one waits for the step before.
constexpr int ABREAST = LANES == 8 ? 2 : 4;
#define EACH UNROLLED for (int i = 0; i < N; i++)

// Calls use(i, how many numbers there) for the vectors of so many numbers; of whole ones the compiler knows it.
template <class Use> static inline void for_vectors(int64_t count, Use use) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) use(i, LANES);
    if (i < count) use(i, int(count - i));
}
// Numbers as floats.
template <class T> static inline void copied(const T* from, int64_t count, float* to) {
    for_vectors(count, [&](int64_t i, int here) { put(wide(from + i, here), to + i, here); });
}
// Calls use(i, how many vectors there, how many numbers in each).
template <class Use> static inline void for_abreast(int64_t count, Use use) {
    int64_t i = 0;
    for (; i + ABREAST * LANES <= count; i += ABREAST * LANES) use(i, std::integral_constant<int, ABREAST>(), LANES);
    for_vectors(count - i, [&](int64_t more, int here) { use(i + more, std::integral_constant<int, 1>(), here); });
}

// e^x for x <= 0: 2.2 units in the last place; 0 below -87. A whole power of 2, times the polynomial with the least relative
// error between -log(2) / 2 and log(2) / 2.
template <int N> [[gnu::always_inline]] static inline void exponential(vf (&x)[N]) {
    vf shifted[N], r[N], y[N];
    EACH shifted[i] = fma(x[i], splat(1.44269504f), splat(12582912.f));  // the whole power of 2 stands in its last bits
    EACH y[i] = shifted[i] - splat(12582912.f);
    EACH r[i] = fma(y[i], splat(-0.693359375f), x[i]);
    EACH r[i] = fma(y[i], splat(2.12194440e-4f), r[i]);
    EACH y[i] = fma(splat(8.29031318e-3f), r[i], splat(4.18979377e-2f));
    EACH y[i] = fma(y[i], r[i], splat(0.166676357f));
    EACH y[i] = fma(y[i], r[i], splat(0.499991506f));
    EACH y[i] = fma(y[i], r[i], splat(0.999999702f));
    EACH y[i] = fma(y[i], r[i], splat(1.f));
    EACH x[i] = x[i] < splat(-87.f) ? vf{} : vf(vi(y[i]) + (vi(shifted[i]) << 23));
}
static inline vf exponential(vf x) {
    vf one[] = {x};
    return exponential(one), one[0];
}
// The natural logarithm of x > 0 that is no denormal number, after Cephes: 2 units in the last place.
static inline vf logarithm(vf x) {
    vi power = (vi(x) >> 23) - 126;
    vf m = vf((vi(x) & 0x7fffff) | 0x3f000000);  // in [0.5, 1)
    const vi small = m < splat(0.70710678f);
    power += small;  // -1 where it is so
    m = (small ? m + m : m) - splat(1.f);
    const vf e = __builtin_convertvector(power, vf), z = m * m;
    vf y = splat(7.0376836292e-2f);
    y = fma(y, m, splat(-1.1514610310e-1f));
    y = fma(y, m, splat(1.1676998740e-1f));
    y = fma(y, m, splat(-1.2420140846e-1f));
    y = fma(y, m, splat(1.4249322787e-1f));
    y = fma(y, m, splat(-1.6668057665e-1f));
    y = fma(y, m, splat(2.0000714765e-1f));
    y = fma(y, m, splat(-2.4999993993e-1f));
    y = fma(y, m, splat(3.3333331174e-1f));
    y = fma(splat(-0.5f), z, fma(e, splat(-2.12194440e-4f), y * m * z));
    return fma(e, splat(0.693359375f), m + y);
}
static inline float exponential(float x) { return exponential(splat(x))[0]; }
// 1 / x for x in [1, 2]: 2 units in the last place.
static inline vf inverse(vf x) {
#if defined(__AVX512F__)
    const vf y = vf(_mm512_rcp14_ps(__m512(x)));  // with the step below 3 cycles of a division's 10
    return fma(y, fma(-x, y, splat(1.f)), y);
#else
    return splat(1.f) / x;
#endif
}
// x times the sigmoid of y, rounded to T.
template <class T, int N> [[gnu::always_inline]] static inline void times_sigmoid(vf (&x)[N], const vf (&y)[N]) {
    vf e[N], below[N];
    EACH e[i] = y[i] < vf{} ? y[i] : -y[i];
    exponential(e);
    EACH below[i] = inverse(splat(1.f) + e[i]);
    EACH x[i] = rounded(x[i] * ((y[i] < vf{} ? e[i] : splat(1.f)) * below[i]), T());
}
template <class T> static inline vf sigmoid(vf y) {
    vf one[1] = {splat(1.f)};
    const vf at[1] = {y};
    times_sigmoid<T>(one, at);
    return one[0];
}
template <class T, int N> [[gnu::always_inline]] static inline void silu(vf (&x)[N]) { times_sigmoid<T>(x, x); }

// GELU's approximation by tanh (Hendrycks and Gimpel 2016), x / 2 * (1 + tanh(y / 2)), which is x times a sigmoid.
template <class T, int N> [[gnu::always_inline]] static inline void tanh_gelu(vf (&x)[N]) {
    constexpr float SLOPE = 1.5957691f, CUBIC = 0.044715f;  // 2 sqrt(2 / pi)
    vf y[N];
    EACH y[i] = splat(SLOPE) * (x[i] + splat(CUBIC) * x[i] * x[i] * x[i]);
    times_sigmoid<T>(x, y);
}

// All lanes joined by an operation that does not ask for their order, or in one fixed order.
template <int S, class V, class Join, int... J> static inline V joined(V x, Join join, std::integer_sequence<int, J...>) {
    return join(x, SHUFFLE(x, x, (J ^ S)...));
}
template <class V, class Join> static inline auto across(V x, Join join) {
    constexpr std::make_integer_sequence<int, LANES> all;
    if constexpr (LANES >= 16) x = joined<8>(x, join, all);
    if constexpr (LANES >= 8) x = joined<4>(x, join, all);
    return joined<1>(joined<2>(x, join, all), join, all)[0];
}
template <class V> static inline auto largest(V x) { return across(x, [](V a, V b) { return a > b ? a : b; }); }
static inline float sum(vf x) { return across(x, [](vf a, vf b) { return a + b; }); }

// LANES vectors of LANES words change rows for columns.
template <int S, int... J> [[gnu::always_inline]] static inline void swap_blocks(vu (&rows)[LANES], std::integer_sequence<int, J...>) {
    UNROLLED for (int i = 0; i < LANES; i++)
        if (!(i & S)) {
            const vu a = rows[i], b = rows[i + S];
            rows[i] = SHUFFLE(a, b, (J & S ? LANES + J - S : J)...);
            rows[i + S] = SHUFFLE(a, b, (J & S ? LANES + J : J + S)...);
        }
}
[[gnu::always_inline]] static inline void transpose(vu (&rows)[LANES]) {
    constexpr std::make_integer_sequence<int, LANES> all;
    swap_blocks<1>(rows, all), swap_blocks<2>(rows, all);
    if constexpr (LANES >= 8) swap_blocks<4>(rows, all);
    if constexpr (LANES >= 16) swap_blocks<8>(rows, all);
}
