// Vectors of floats, and of bfloat16 numbers read as floats. Needs GCC's vector extensions (g++, clang++).
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#include <vector>

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
typedef uint16_t bf16;

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

template <class V, class T> static inline V load(const T* from) { V x; std::memcpy(&x, from, sizeof x); return x; }
template <class V, class T> static inline void store(T* to, V x) { std::memcpy(to, &x, sizeof x); }
static inline vf splat(float x) { return x - vf{}; }

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) { uint32_t bits = uint32_t(x) << 16; float y; std::memcpy(&y, &bits, 4); return y; }
static inline void narrow(float x, float* to) { *to = x; }
static inline void narrow(float x, bf16* to) {
    uint32_t bits; std::memcpy(&bits, &x, 4);
    *to = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
// The nearest numbers that T holds, and they alone.
static inline vf rounded(vf x, float) { return x; }
static inline vf rounded(vf x, bf16) {
    const vu bits = vu(x);
    return x != x ? x : vf((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}
static inline void put(vf x, float* to) { store(to, x); }
static inline void put(vf x, bf16* to) { store(to, __builtin_convertvector(vu(x) >> 16, vh)); }  // x is rounded
template <class T> static inline void put(vf x, T* to, int count) {  // the first numbers only
    if (count >= LANES) return put(x, to);
    T part[LANES];
    put(x, part), std::memcpy(to, part, count * sizeof(T));
}
static inline vf wide(const float* from) { return load<vf>(from); }
static inline vf wide(const bf16* from) { return vf(__builtin_convertvector(load<vh>(from), vu) << 16); }
template <class T> static inline vf wide(const T* from, int count) {  // the first numbers only, zeros behind them
    if (count >= LANES) return wide(from);
    T part[LANES] = {};
    std::memcpy(part, from, count * sizeof(T));
    return wide(part);
}

// e^x for x <= 0, after Cephes: 2 units in the last place; 0 below -87.
static inline vf exponential(vf x) {
    vf whole = (x * splat(1.44269504f) + splat(12582912.f)) - splat(12582912.f);
    vf kept = x < splat(-87.f) ? vf{} : whole;
    vf r = x - kept * splat(0.693359375f) - kept * splat(-2.12194440e-4f);
    r = x < splat(-87.f) ? vf{} : r;
    vf y = splat(1.9875691500e-4f);
    y = y * r + splat(1.3981999507e-3f);
    y = y * r + splat(8.3334519073e-3f);
    y = y * r + splat(4.1665795894e-2f);
    y = y * r + splat(1.6666665459e-1f);
    y = y * r + splat(5.0000001201e-1f);
    y = y * r * r + r + splat(1.f);
    vf scale = vf((__builtin_convertvector(kept, vi) + 127) << 23);
    return x < splat(-87.f) ? vf{} : y * scale;
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
    y = y * m - splat(1.1514610310e-1f);
    y = y * m + splat(1.1676998740e-1f);
    y = y * m - splat(1.2420140846e-1f);
    y = y * m + splat(1.4249322787e-1f);
    y = y * m - splat(1.6668057665e-1f);
    y = y * m + splat(2.0000714765e-1f);
    y = y * m - splat(2.4999993993e-1f);
    y = y * m + splat(3.3333331174e-1f);
    y = y * m * z + e * splat(-2.12194440e-4f) - splat(0.5f) * z;
    return m + y + e * splat(0.693359375f);
}
static inline float exponential(float x) { return exponential(splat(x))[0]; }
static inline vf sigmoid(vf x) {
    const vf e = exponential(x < vf{} ? x : -x);
    return (x < vf{} ? e : splat(1.f)) / (splat(1.f) + e);
}

// LANES vectors of LANES words change rows for columns.
template <int S> static inline void swap_blocks(vu* rows) {
    vu low, high;
    for (int j = 0; j < LANES; j++) low[j] = j & S ? LANES + j - S : j, high[j] = j & S ? LANES + j : j + S;
    for (int i = 0; i < LANES; i++)
        if (!(i & S)) {
            vu a = rows[i], b = rows[i + S];
            rows[i] = __builtin_shuffle(a, b, low), rows[i + S] = __builtin_shuffle(a, b, high);
        }
}
static inline void transpose(vu* rows) {
    swap_blocks<1>(rows), swap_blocks<2>(rows), swap_blocks<4>(rows);
    if constexpr (LANES == 16) swap_blocks<8>(rows);
}
