// One level of recurrent heads (medusa/heads/recurrent.py): what the parents hand down and the nodes' tokens in, the
// nodes' own state and the likeliest tokens below them out. Numbers are rounded to T where the module rounds them.
#pragma once
#include "linear.h"
#include "team.h"

struct Level {
    int64_t half, threads, rows, hidden, inner, blocks, width;
    const Linear *into, *out_of;  // [blocks]: [inner, 2 hidden] and [hidden, inner]
    Linear output;                // [columns, hidden]
    const void* embeddings;       // [vocabulary, hidden]
    const void* states;           // of the level before, [any, hidden]
    const int64_t *parents, *tokens;  // [rows]: which of these states, and which token
    const float* noise;               // [rows / nodes, columns], added to the logits; or null
    int64_t nodes;                    // rows of a sequence
    void* out;                        // [rows, hidden]
    int64_t* best;                    // [rows, width] columns, the likeliest first
    float* logprobs;                  // [rows, width]
};

template <class T, class W> class LevelRun {  // W: how its weights are met
    const Level& at;
    const int64_t wide_inner = W::room(at.inner), wide_both = W::room(2 * at.hidden), wide = W::room(at.hidden);
    std::vector<float> both, middle, added, logits;
    Buffer<typename W::number> x, gated;

    // The state and the token's embedding at unit scale, side by side.
    void read(int64_t r) {
        const T* state = (const T*)at.states + at.parents[r] * at.hidden;
        const T* embedding = (const T*)at.embeddings + at.tokens[r] * at.hidden;
        float* row = &both[r * 2 * at.hidden];
        float sum = 0;
        for (int64_t i = 0; i < at.hidden; i++) row[i] = widen(state[i]), sum += widen(embedding[i]) * widen(embedding[i]);
        const float factor = 1 / std::sqrt(sum / at.hidden + std::numeric_limits<float>::epsilon());
        for (int64_t i = 0; i < at.hidden; i++) row[at.hidden + i] = rounded<T>(widen(embedding[i]) * factor);
    }

    void block(const Linear& into, const Linear& out_of, Team::Member& member) {
        member.share(at.rows, [&](int64_t r) { W::arrange(&both[r * 2 * at.hidden], 2 * at.hidden, x.data(), wide_both, r, 0); });
        member.share(at.inner, W::UNIT, [&](int64_t first, int64_t last) {
            W::linear(into, x.data(), at.rows, middle.data(), at.inner, first, last);
            for (int64_t r = 0; r < at.rows; r++) {
                float* row = &middle[r * at.inner];
                for (int64_t i = first; i < last; i++) row[i] = rounded<T>(row[i] * sigmoid(splat(row[i]))[0]);
                W::arrange(row + first, last - first, gated.data(), wide_inner, r, first);
            }
        });
        member.share(at.hidden, W::OUTPUTS, [&](int64_t first, int64_t last) {
            W::linear(out_of, gated.data(), at.rows, added.data(), at.hidden, first, last);
            for (int64_t r = 0; r < at.rows; r++)
                for (int64_t i = first; i < last; i++) {
                    float& state = both[r * 2 * at.hidden + i];
                    state = rounded<T>(state + added[r * at.hidden + i]);
                }
        });
    }

    void choose(int64_t r) {
        const int64_t columns = at.output.outputs, width = at.width;
        float* row = &logits[r * columns];
        if (at.noise)
            for (int64_t i = 0; i < columns; i++) row[i] += at.noise[r / at.nodes * columns + i];
        float top[width];
        int64_t *best = at.best + r * width, count = 0;
        // `width` sorted numbers; few of the row get among them.
        const auto take = [&](int64_t i) {
            if (count == width && !(row[i] > top[width - 1])) return;
            int64_t place = count < width ? count++ : width - 1;
            for (; place > 0 && row[i] > top[place - 1]; place--) top[place] = top[place - 1], best[place] = best[place - 1];
            top[place] = row[i], best[place] = i;
        };
        int64_t i = 0;
        for (; i < std::min(columns, width); i++) take(i);
        for (; i < columns; i++)
            if (row[i] > top[width - 1]) take(i);
        vf sums = {};
        for (i = 0; i + LANES <= columns; i += LANES) sums += exponential(load<vf>(row + i) - splat(top[0]));
        float sum = 0;
        for (int j = 0; j < LANES; j++) sum += sums[j];
        for (; i < columns; i++) sum += exponential(row[i] - top[0]);
        for (int64_t k = 0; k < width; k++) at.logprobs[r * width + k] = top[k] - top[0] - std::log(sum);
    }

  public:
    explicit LevelRun(const Level& level) : at(level) {
        both.resize(at.rows * 2 * at.hidden), middle.resize(at.rows * at.inner), added.resize(at.rows * at.hidden);
        logits.resize(at.rows * at.output.outputs);
        x.resize(W::rows(at.rows) * wide_both), gated.resize(W::rows(at.rows) * wide_inner);
    }

    void operator()() {
        Team(int(at.threads), 4 + 3 * at.blocks).run([&](Team::Member& member) {
            const typename W::Thread equipped;
            member.share(at.rows, [&](int64_t r) { read(r); });
            for (int64_t b = 0; b < at.blocks; b++) block(at.into[b], at.out_of[b], member);
            member.share(at.rows, [&](int64_t r) {
                float* state = &both[r * 2 * at.hidden];
                W::arrange(state, at.hidden, x.data(), wide, r, 0);
                for (int64_t i = 0; i < at.hidden; i++) narrow(state[i], (T*)at.out + r * at.hidden + i);
            });
            member.share(at.output.outputs, W::OUTPUTS, [&](int64_t first, int64_t last) {
                W::linear(at.output, x.data(), at.rows, logits.data(), at.output.outputs, first, last);
            });
            member.share(at.rows, [&](int64_t r) { choose(r); });
        });
    }
};
