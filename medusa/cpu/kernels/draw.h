// The largest number of a row, and one token drawn from it: the largest after filters and noise that is a pure function
// of (seed, position, token), see medusa/noise.py. A vocabulary is looked through a few times at a vector per step, and
// logarithms are taken only where noise can still win.
#pragma once
#include <functional>

#include "vectors.h"

// The first column with the largest number; a NaN is larger than all, as in torch.
template <class T> static int64_t largest(const T* row, int64_t columns) {
    const int64_t whole = columns / LANES * LANES;
    vf best = splat(-std::numeric_limits<float>::infinity()), sum = {};
    for (int64_t i = 0; i < whole; i += LANES) {
        const vf here = wide(row + i);
        best = here > best ? here : best, sum += here * splat(0.f);
    }
    float most = -std::numeric_limits<float>::infinity(), nothing = 0;
    for (int j = 0; j < LANES; j++) most = std::max(most, float(best[j])), nothing += sum[j];
    for (int64_t i = whole; i < columns; i++) most = std::max(most, widen(row[i])), nothing += widen(row[i]) * 0;
    // Infinities times zero are no numbers either, so only the search below tells.
    int64_t found = 0;
    if (nothing != nothing)
        while (found < columns && widen(row[found]) == widen(row[found])) found++;
    if (nothing == nothing || found == columns)
        for (found = 0; found < columns && widen(row[found]) != most;) found++;
    return found;
}

template <class U> static inline U mixed(U x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

// The key of the noise of all tokens at a position of a text with this seed.
static inline uint32_t key_of(int64_t seed, int64_t position, uint32_t stream) {
    const uint32_t of_seed = mixed(uint32_t(seed) ^ 0x9E3779B9u) ^ mixed(uint32_t(seed >> 32) + 0x7F4A7C15u);
    return mixed(of_seed ^ mixed(uint32_t(position) ^ stream));
}

// Gumbel noise of these tokens at one position: out [count], as noise() below but for the last bits.
static void gumbel(uint32_t key, const int64_t* tokens, int64_t count, float* out) {
    for (int64_t i = 0; i < count; i += LANES) {
        const int here = int(std::min<int64_t>(LANES, count - i));
        vu ids = {};
        for (int j = 0; j < here; j++) ids[j] = uint32_t(tokens[i + j]);
        const vf whole = __builtin_convertvector(mixed((vu{} + key) ^ mixed(ids ^ 0xC2B2AE35u)), vf);
        vf v = (whole + splat(0.5f)) * splat(0x1p-32f);
        v = v > splat(1 - 0x1p-24f) ? splat(1 - 0x1p-24f) : v;
        // Near 0, 1 - v has lost most of v.
        const vf near = v + v * v * (splat(0.5f) + v * splat(1 / 3.f));
        const vf noise = -logarithm(v < splat(0x1p-8f) ? near : -logarithm(splat(1.f) - v));
        std::memcpy(out + i, &noise, here * sizeof(float));
    }
}

struct Drawing {
    int64_t number_type, threads, rows, columns, top_k;
    float temperature, top_p, min_p;
    const void* logits;   // [rows, columns]
    const int64_t* keys;  // [rows]
    int64_t* out;         // [rows]
};

class Draw {
    static constexpr int64_t BLOCK = 4 * LANES;
    const Drawing& at;
    std::vector<float> scores;  // of one row, as many as whole blocks hold: 0 for the likeliest token, others below

    static float noise(uint32_t key, int64_t token) {
        const float v = (float(mixed(key ^ mixed(uint32_t(token) ^ 0xC2B2AE35u))) + 0.5f) * 0x1p-32f;
        return -std::log(-std::log1p(-std::min(v, 1 - 0x1p-24f)));
    }

    // What the noise of these tokens cannot exceed: -log(-log1p(-v)) <= -log v <= -ln 2 (v's exponent + its fraction).
    static vf highest_noise(vu key, vu tokens) {
        const vf v = (__builtin_convertvector(mixed(key ^ mixed(tokens ^ 0xC2B2AE35u)), vf) + splat(0.5f)) * splat(0x1p-32f);
        const vf log2 = __builtin_convertvector(vi(v), vf) * splat(0x1p-23f) - splat(127.f);
        return splat(0.001f) - log2 * splat(0.69314718f);
    }

    // The token that wins among those that score at least `floor`; the likeliest one is among them.
    int64_t winner(uint32_t key, float floor, int64_t likeliest) const {
        int64_t best = likeliest;
        float most = noise(key, likeliest);
        vu tokens;
        for (int j = 0; j < LANES; j++) tokens[j] = j;
        for (int64_t i = 0; i < int64_t(scores.size()); i += BLOCK) {
            vf bounds[4], top = splat(-std::numeric_limits<float>::infinity());
            for (int c = 0; c < 4; c++, tokens += LANES) {
                const vf score = load<vf>(&scores[i + c * LANES]);
                bounds[c] = score + highest_noise(vu{} + key, tokens);
                bounds[c] = score < splat(floor) ? splat(-std::numeric_limits<float>::infinity()) : bounds[c];
                top = bounds[c] > top ? bounds[c] : top;
            }
            float highest = top[0];
            for (int j = 1; j < LANES; j++) highest = std::max(highest, float(top[j]));
            if (highest < most) continue;
            for (int64_t j = 0; j < BLOCK; j++) {
                if (bounds[j / LANES][j % LANES] < most) continue;
                const float score = scores[i + j] + noise(key, i + j);
                if (score > most || (score == most && i + j < best)) most = score, best = i + j;
            }
        }
        return best;
    }

    // The mass of the tokens that score at least, or above, `floor`; the likeliest one has 1.
    float mass(float floor, bool above) const {
        vf sums = {};
        for (size_t i = 0; i < scores.size(); i += LANES) {
            const vf score = load<vf>(&scores[i]), weight = exponential(score);
            sums += (above ? score > splat(floor) : score >= splat(floor)) ? weight : vf{};
        }
        float sum = 0;
        for (int j = 0; j < LANES; j++) sum += sums[j];
        return sum;
    }

    float kth_largest(int64_t k) const {
        std::vector<float> kept(scores.begin(), scores.begin() + k);
        std::make_heap(kept.begin(), kept.end(), std::greater<float>());
        for (auto score = scores.begin() + k; score != scores.begin() + at.columns; score++)
            if (*score > kept.front()) {
                std::pop_heap(kept.begin(), kept.end(), std::greater<float>());
                kept.back() = *score;
                std::push_heap(kept.begin(), kept.end(), std::greater<float>());
            }
        return kept.front();
    }

  public:
    explicit Draw(const Drawing& drawing) : at(drawing) {
        scores.assign((at.columns + BLOCK - 1) / BLOCK * BLOCK, -std::numeric_limits<float>::infinity());
    }

    // Top-k, then top-p among what it leaves, then min-p. Tokens that score the same stay or go together, so each filter
    // keeps what scores at least some number, and a nucleus is judged at the winner: what is likelier has less than
    // top_p of the mass. If not, one that is likelier wins.
    template <class T> int64_t operator()(const T* row, uint32_t key) {
        const int64_t likeliest = largest(row, at.columns);
        const float top = widen(row[likeliest]);
        if (!(std::abs(top) <= std::numeric_limits<float>::max())) return likeliest;
        for (int64_t i = 0; i < at.columns; i += LANES) {
            const int here = int(std::min<int64_t>(LANES, at.columns - i));
            put((wide(row + i, here) - splat(top)) / splat(at.temperature), &scores[i], here);
        }
        float floor = std::numeric_limits<float>::lowest();
        if (at.top_k > 0 && at.top_k < at.columns) floor = std::max(floor, kth_largest(at.top_k));
        const float all = at.top_p < 1 ? mass(floor, false) : 0;
        if (at.min_p > 0) floor = std::max(floor, std::log(at.min_p));
        while (true) {
            const int64_t best = winner(key, floor, likeliest);
            if (at.top_p >= 1 || scores[best] == 0 || mass(scores[best], true) < at.top_p * all) return best;
            floor = std::nextafter(scores[best], 0.f);
        }
    }
};
