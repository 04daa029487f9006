// Losses of rows of logits and their gradients, as medusa/train/row_losses.py defines them. A row is read twice: for its
// largest number, and for its exponentials, which stay in the processor's cache until the gradient takes them.
#pragma once
#include "vectors.h"

enum LossKind : int64_t { CROSS_ENTROPY, DIVERGENCE, TOTAL_VARIATION, LOG_ACCEPTANCE, HYBRID };  // as ROW_LOSSES

struct Losing {
    int64_t number_type, threads, kind, rows, columns;
    float eta, least;         // of HYBRID, and the least acceptance
    void* logits;             // [rows, columns]; the gradient takes their place
    const void* teacher;      // [.., columns] logits, or none
    const int64_t* taught_by; // [rows] rows of the teacher
    const int64_t* labels;    // [rows]
    float* loss;              // [rows]
    int64_t* correct;         // [rows] 1 where the label has the largest logit
};

template <class T> class Losses {
    static constexpr int64_t RUN = 4096;  // so many floats are added up before doubles take over
    const Losing& at;
    const int64_t columns, room;
    Buffer<float> ours, theirs;  // exponentials of a row, below its largest number

    // add(vector's first column) -> a vector of summands; their sum.
    template <class Add> double sum(Add add) const {
        double all = 0;
        for (int64_t first = 0; first < room; first += RUN) {
            vf part = {};
            for (int64_t i = first; i < std::min(room, first + RUN); i += LANES) part += add(i);
            all += ::sum(part);
        }
        return all;
    }

    // The largest number of a row; e^(x - largest) into `out`, zeros behind the row; their sum.
    double exponentials(const T* row, float& largest, float* out) const {
        const int64_t whole = columns / LANES * LANES;
        vf most = splat(-std::numeric_limits<float>::infinity());
        for (int64_t i = 0; i < whole; i += LANES) {
            const vf x = wide(row + i);
            most = x > most ? x : most;
        }
        largest = ::largest(most);
        for (int64_t i = whole; i < columns; i++) largest = std::max(largest, widen(row[i]));
        const vf below = splat(largest);
        const double all = sum([&](int64_t i) {
            vf e = exponential(wide(row + i, int(std::min<int64_t>(LANES, columns - i))) - below);
            for (int64_t j = columns - i; j < LANES; j++) e[j] = 0;
            return store(out + i, e), e;
        });
        return all;
    }

  public:
    explicit Losses(const Losing& at)
        : at(at), columns(at.columns), room((columns + LANES - 1) / LANES * LANES), ours(room), theirs(at.teacher ? room : 0) {}

    void operator()(int64_t r) {
        T* row = (T*)at.logits + r * columns;
        const int64_t label = at.labels[r];
        float largest;
        const double all = exponentials(row, largest, ours.data());
        const float score = widen(row[label]) - largest, share = float(1 / all);
        at.correct[r] = score == 0;
        if (at.kind == CROSS_ENTROPY) {
            at.loss[r] = float(std::log(all)) - score;
            write(row, [&](vf q, int64_t) { return q; }, share);
            narrow(ours[label] * share - 1, &row[label]);
            return;
        }
        const T* teacher = (const T*)at.teacher + at.taught_by[r] * columns;
        float highest;
        const double taught = exponentials(teacher, highest, theirs.data());
        const float part = float(1 / taught);
        const auto q_at = [&](int64_t i) { return load<vf>(&ours[i]) * splat(share); };
        const auto p_at = [&](int64_t i) { return load<vf>(&theirs[i]) * splat(part); };
        // Both are weighted: KL(p || q) with gradient q - p, and acceptance A = sum min(p, q) with q (s - sum q s), s = q < p.
        float divergence = 0, accepted = 0, slope = 0;
        if (at.kind == DIVERGENCE || at.kind == HYBRID) {
            const vf shift = splat(highest - largest);
            divergence = float(std::log(all) - std::log(taught) + sum([&](int64_t i) {
                const int here = int(std::min<int64_t>(LANES, columns - i));
                return p_at(i) * (wide(teacher + i, here) - wide((const T*)row + i, here) - shift);
            }));
        }
        if (at.kind != DIVERGENCE) {
            accepted = float(sum([&](int64_t i) { const vf p = p_at(i), q = q_at(i); return q < p ? q : p; }));
            slope = float(sum([&](int64_t i) { const vf q = q_at(i); return q < p_at(i) ? q : vf{}; }));
        }
        float by_divergence = at.kind == DIVERGENCE, by_acceptance = at.kind != DIVERGENCE;
        if (at.kind == HYBRID) by_divergence = std::exp(-at.eta * accepted), by_acceptance = 1 - by_divergence;
        at.loss[r] = by_divergence * divergence + by_acceptance * (1 - accepted);
        if (at.kind == LOG_ACCEPTANCE) {
            accepted = std::max(accepted, at.least);
            at.loss[r] = -std::log(accepted), by_acceptance = 1 / accepted;
        }
        const vf a = splat(by_divergence), b = splat(by_acceptance), s = splat(slope);
        write(row, [&](vf q, int64_t i) {
            const vf p = p_at(i);
            return a * (q - p) + b * q * (s - (q < p ? splat(1.f) : vf{}));
        }, share);
    }

  private:
    template <class Gradient> void write(T* row, Gradient gradient, float share) const {
        for (int64_t i = 0; i < columns; i += LANES)
            put(rounded(gradient(load<vf>(&ours[i]) * splat(share), i), T()), row + i, int(std::min<int64_t>(LANES, columns - i)));
    }
};
