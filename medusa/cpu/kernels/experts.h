// A mixture of experts: each row visits some of them, and gets the sum of what they make of it, each times its share.
#pragma once
#include <stdexcept>

#include "team.h"
#include "tiles.h"
#include "whole.h"

struct Mixture {
    Linear gate_up, down;  // of all experts, one after the other: [experts * 2 inner, hidden], [experts * hidden, inner]
    Linear router, gate;   // plain: scores of experts; the gate of an expert that all rows visit, or no outputs
    int64_t experts, top;  // top: that a row visits
    int64_t gelu;          // as in Pass
    int64_t sigmoid;       // 1 = probabilities are sigmoids of scores, 0 = their softmax
    int64_t normalized;    // 1 = shares are divided by their sum
    int64_t whole_shares;  // 1 = shares, and products with them, are not rounded
    const float* bias;     // [experts] added to probabilities where experts are chosen, or null
    const float* scales;   // [experts] factors on shares, or null
    const void *norm, *after, *beside;       // where an MLP stands beside experts: norms of what they read, of what they
                                             // give, and of what it gives; or null: they read what it reads
    const void *router_norm, *router_scale;  // of the state that the router reads, and factors [hidden] on it; or null: it
                                             // reads what experts read
    float scale;           // of shares
    float limit, slope;    // 0, or the size that gates and what they let through are held to, and a factor on gates in their
                           // sigmoid; what they let through is one more (GPT-OSS)
    float router_factor;   // on what the router reads, behind its factors

    int64_t hidden() const { return gate_up.in; }
    int64_t inner() const { return down.in; }
    int bytes() const { return std::max(gate_up.bytes(), down.bytes()); }
};

// The experts whose probabilities are largest for a row with these scores, of equal ones those that come first, and its shares.
template <class T> static void choose(const Mixture& at, const T* scores, int64_t* chosen, float* shares) {
    constexpr float LEAST = 1e-6f;  // of the sum of sigmoids
    const auto round = [&at](float x) { return at.whole_shares ? x : rounded(splat(x), T())[0]; };
    thread_local Buffer<float> probability;
    grow(probability, at.experts + LANES);
    float largest = -INFINITY, all = 0, sum = 0;
    for (int64_t e = 0; e < at.experts; e++) largest = std::max(largest, widen(scores[e]));
    for_vectors(at.experts, [&](int64_t i, int here) {
        const vf score = wide(scores + i, here);
        put(at.sigmoid ? sigmoid<T>(score) : exponential(score - splat(largest)), &probability[i], here);
    });
    for (int64_t e = 0; e < at.experts; e++) all += probability[e];
    int64_t count = 0;
    for (int64_t e = 0; e < at.experts; e++) {
        if (!at.sigmoid) probability[e] /= all;
        const float rank = at.bias ? probability[e] + at.bias[e] : probability[e];
        int64_t place = count;
        for (; place > 0 && rank > shares[place - 1]; place--)
            if (place < at.top) chosen[place] = chosen[place - 1], shares[place] = shares[place - 1];
        if (place < at.top) chosen[place] = e, shares[place] = rank, count = std::min(count + 1, at.top);
    }
    for (int64_t k = 0; k < at.top; k++) sum += shares[k] = probability[chosen[k]];
    if (at.sigmoid) sum = round(round(sum) + LEAST);
    for (int64_t k = 0; k < at.top; k++) {
        const float factor = at.scales ? at.scale * at.scales[chosen[k]] : at.scale;
        shares[k] = round(round(at.normalized ? shares[k] / sum : shares[k]) * factor);
    }
}

// The experts of a layer, and of others of these sizes.
template <class T, class W> class Experts {
    typedef Team::Member Member;
    struct Group { int64_t expert, first, count, place; };  // its first visit, and its first row as it is arranged
    const int64_t rows, threads, top, visits = rows * top;
    std::vector<Group> groups;   // of rows that visit the same expert
    std::vector<int64_t> visit;  // those of each group, in the order of rows
    std::vector<int64_t> group, arranged, place;  // of each visit in this order: its group, and its row as it is arranged;
    std::vector<int64_t> counts, index;           // place: of a row's visits in it; of each expert: its visits, and its group
    Buffer<typename W::number> x, gated;
    Buffer<T> middle, made;

    // What every group's expert makes of its rows, `outputs` numbers of each visit.
    void meet(Member& member, int64_t found, const Linear& all, int64_t outputs, const typename W::number* rows, T* to) const {
        const int64_t unit = together<W>(all), units = (outputs + unit - 1) / unit;
        const int64_t parts = std::clamp<int64_t>(threads * PIECES / found, 1, units);
        member.share(found * parts, [&](int64_t piece) {
            const Group& own = groups[piece / parts];
            const int64_t part = piece % parts, before = own.expert * outputs, begin = units * part / parts * unit;
            const int64_t end = std::min(outputs, units * (part + 1) / parts * unit);
            W::linear(all, rows + own.place * W::room(all.in), own.count, to + own.first * outputs - before, outputs, before + begin, before + end);
        });
    }

    void join(const Mixture& at, int64_t v) {
        const int64_t inner = at.inner();
        const T *gates = &middle[v * 2 * inner], *ups = gates + inner;
        thread_local Buffer<float> row;
        grow(row, inner + LANES);
        for_vectors(inner, [&](int64_t i, int here) {
            vf gate[1] = {wide(gates + i, here)}, up = wide(ups + i, here);
            if (at.limit) {
                const vf most = splat(at.limit);
                gate[0] = gate[0] > most ? most : gate[0], up = up > most ? most : up < -most ? -most : up;
                const vf sloped[1] = {rounded(gate[0] * splat(at.slope), T())};
                times_sigmoid<T>(gate, sloped), up = rounded(up + splat(1.f), T());
            } else {
                at.gelu ? tanh_gelu<T>(gate) : silu<T>(gate);
            }
            put(rounded(gate[0] * up, T()), &row[i], here);
        });
        W::arrange(row.data(), inner, &gated[groups[group[v]].place * W::room(inner)], W::room(inner), arranged[v], 0);
    }

    void add(const Mixture& at, int64_t r, const float* shares, T* out) const {
        const int64_t hidden = at.hidden();
        for_vectors(hidden, [&](int64_t i, int here) {
            vf sum{};
            for (int64_t k = r * top; k < (r + 1) * top; k++) {
                const vf product = wide(&made[place[k] * hidden + i], here) * splat(shares[k]);
                sum += at.whole_shares ? product : rounded(product, T());
            }
            put(rounded(sum, T()), out + r * hidden + i, here);
        });
    }

    // Puts visits of the same expert together.
    void find(const int64_t* chosen) {
        std::fill(counts.begin(), counts.end(), 0), groups.clear();
        for (int64_t i = 0; i < visits; i++) counts[chosen[i]]++;
        int64_t first = 0, place = 0;
        for (int64_t e = 0; e < int64_t(counts.size()); e++)
            if (counts[e]) {
                index[e] = groups.size();
                groups.push_back({e, first, 0, place});
                first += counts[e], place += W::rows(counts[e]);
            }
        for (int64_t i = 0; i < visits; i++) {
            Group& own = groups[index[chosen[i]]];
            const int64_t v = own.first + own.count;
            visit[v] = i, this->place[i] = v, group[v] = index[chosen[i]], arranged[v] = own.count++;
        }
    }

  public:
    static constexpr int64_t STAGES = 6;

    Experts(const Mixture& at, int64_t rows, int64_t threads)
        : rows(rows), threads(threads), top(at.top), visit(visits), group(visits), arranged(visits), place(visits), counts(at.experts), index(at.experts) {
        const int64_t most = std::min(visits, at.experts), room = visits + most * (W::rows(1) - 1);  // of arranged rows
        groups.reserve(most);
        x.resize(room * W::room(at.hidden())), gated.resize(room * W::room(at.inner()));
        middle.resize(visits * 2 * at.inner() + LANES), made.resize(visits * at.hidden() + LANES);
    }

    // out [rows, hidden] of rows [rows, hidden] that visit experts [rows, top] with these shares. `found` gets the number of
    // groups and must be another one for each layer: a thread that comes late may still read it when others are in the next.
    void operator()(const Mixture& at, const T* from, const int64_t* chosen, const float* shares, T* out, int64_t& found, Member& member) {
        const int64_t hidden = at.hidden();
        member.share(1, [&](int64_t) { find(chosen), found = groups.size(); });
        member.share(visits, [&](int64_t v) {
            thread_local Buffer<float> row;
            grow(row, hidden + LANES);
            copied(from + visit[v] / top * hidden, hidden, row.data());
            W::arrange(row.data(), hidden, &x[groups[group[v]].place * W::room(hidden)], W::room(hidden), arranged[v], 0);
        });
        meet(member, found, at.gate_up, 2 * at.inner(), x.data(), middle.data());
        member.share(visits, [&](int64_t v) { join(at, v); });
        meet(member, found, at.down, hidden, gated.data(), made.data());
        member.share(rows, [&](int64_t r) { add(at, r, shares, out); });
    }
};

// Rows whose experts and shares are given.
struct Visits {
    int64_t number_type, threads, rows;
    Mixture mixture;
    const void* x;          // [rows, hidden]
    const int64_t* chosen;  // [rows, top] experts
    const float* shares;    // [rows, top]
    void* out;              // [rows, hidden]
};
template <class T, class W> static void mix(const Visits& at) {
    for (int64_t i = 0; i < at.rows * at.mixture.top; i++)
        if (at.chosen[i] < 0 || at.chosen[i] >= at.mixture.experts) throw std::out_of_range("expert");
    Experts<T, W> experts(at.mixture, at.rows, at.threads);
    int64_t found = 0;
    Team(int(at.threads), experts.STAGES).run([&](Team::Member& member) {
        const typename W::Thread equipped;
        experts(at.mixture, (const T*)at.x, at.chosen, at.shares, (T*)at.out, found, member);
    });
}
