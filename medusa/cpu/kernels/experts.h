// A mixture of experts: each row visits some of them, and gets the sum of what they make of it, each times its share.
#pragma once
#include <stdexcept>

#include "int8.h"
#include "team.h"
#include "tiles.h"

struct Mixture {
    int64_t number_type, threads, rows, top, experts, hidden, inner;
    int64_t gelu, whole_shares;      // gelu: as in Pass; 1 = products with shares are not rounded
    Linear gate_up, down;            // of all experts, one after the other: [experts * 2 inner, hidden], [experts * hidden, inner]
    const void* x;                   // [rows, hidden]
    const int64_t* chosen;           // [rows, top] experts
    const float* shares;             // [rows, top]
    void* out;                       // [rows, hidden]
};

template <class T, class W> class Experts {
    typedef Team::Member Member;
    struct Group { int64_t expert, first, count, place; };  // its first visit, and its first row as it is arranged
    const Mixture& at;
    const int64_t visits = at.rows * at.top, wide_hidden = W::room(at.hidden), wide_inner = W::room(at.inner);
    std::vector<Group> groups;   // of rows that visit the same expert
    std::vector<int64_t> visit;  // those of each group, in the order of rows
    std::vector<int64_t> group, arranged;  // of each visit in this order: its group, and its row as it is arranged
    Buffer<typename W::number> x, gated;
    Buffer<T> middle, made;

    // What every group's expert makes of its rows, `outputs` numbers of each visit.
    void meet(Member& member, const Linear& all, int64_t outputs, const typename W::number* rows, T* to) {
        const int64_t unit = together<W>(all), units = (outputs + unit - 1) / unit;
        const int64_t parts = std::clamp<int64_t>(at.threads * PIECES / int64_t(groups.size()), 1, units);
        member.share(groups.size() * parts, [&](int64_t piece) {
            const Group& own = groups[piece / parts];
            const int64_t part = piece % parts, before = own.expert * outputs, begin = units * part / parts * unit;
            const int64_t end = std::min(outputs, units * (part + 1) / parts * unit);
            W::linear(all, rows + own.place * W::room(all.in), own.count, to + own.first * outputs - before, outputs, before + begin, before + end);
        });
    }

    void join(int64_t v) {
        const T *gates = &middle[v * 2 * at.inner], *ups = gates + at.inner;
        thread_local Buffer<float> row;
        grow(row, at.inner + LANES);
        for_vectors(at.inner, [&](int64_t i, int here) {
            vf gate[1] = {wide(gates + i, here)};
            at.gelu ? tanh_gelu<T>(gate) : silu<T>(gate);
            put(rounded(gate[0] * wide(ups + i, here), T()), &row[i], here);
        });
        W::arrange(row.data(), at.inner, &gated[groups[group[v]].place * wide_inner], wide_inner, arranged[v], 0);
    }

    void add(int64_t r, const int64_t* place) {
        for_vectors(at.hidden, [&](int64_t i, int here) {
            vf sum{};
            for (int64_t k = r * at.top; k < (r + 1) * at.top; k++) {
                const vf product = wide(&made[place[k] * at.hidden + i], here) * splat(at.shares[k]);
                sum += at.whole_shares ? product : rounded(product, T());
            }
            put(rounded(sum, T()), (T*)at.out + r * at.hidden + i, here);
        });
    }

  public:
    explicit Experts(const Mixture& at) : at(at), visit(visits), group(visits), arranged(visits) {
        std::vector<int64_t> counts(at.experts);
        for (int64_t i = 0; i < visits; i++) {
            if (at.chosen[i] < 0 || at.chosen[i] >= at.experts) throw std::out_of_range("expert");
            counts[at.chosen[i]]++;
        }
        std::vector<int64_t> index(at.experts);
        int64_t first = 0, place = 0;
        for (int64_t e = 0; e < at.experts; e++)
            if (counts[e]) {
                index[e] = groups.size();
                groups.push_back({e, first, 0, place});
                first += counts[e], place += W::rows(counts[e]);
            }
        for (int64_t i = 0; i < visits; i++) {
            Group& own = groups[index[at.chosen[i]]];
            const int64_t v = own.first + own.count;
            visit[v] = i, group[v] = index[at.chosen[i]], arranged[v] = own.count++;
        }
        x.resize(place * wide_hidden), gated.resize(place * wide_inner);
        middle.resize(visits * 2 * at.inner + LANES), made.resize(visits * at.hidden + LANES);
    }

    void operator()() {
        std::vector<int64_t> place(visits);  // of a row's visits among all
        for (int64_t v = 0; v < visits; v++) place[visit[v]] = v;
        Team(int(at.threads), 5).run([&](Member& member) {
            const typename W::Thread equipped;
            member.share(visits, [&](int64_t v) {
                thread_local Buffer<float> row;
                grow(row, at.hidden + LANES);
                const T* from = (const T*)at.x + visit[v] / at.top * at.hidden;
                for_vectors(at.hidden, [&](int64_t i, int here) { put(wide(from + i, here), &row[i], here); });
                W::arrange(row.data(), at.hidden, &x[groups[group[v]].place * wide_hidden], wide_hidden, arranged[v], 0);
            });
            meet(member, at.gate_up, 2 * at.inner, x.data(), middle.data());
            member.share(visits, [&](int64_t v) { join(v); });
            meet(member, at.down, at.hidden, gated.data(), made.data());
            member.share(at.rows, [&](int64_t r) { add(r, place.data()); });
        });
    }
};
