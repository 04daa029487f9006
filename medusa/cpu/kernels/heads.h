// A draft of recurrent heads (medusa/heads/recurrent.py), all levels in one call. Numbers are rounded to T where the module
// rounds them.
#pragma once
#include <memory>

#include "draw.h"
#include "grow.h"
#include "team.h"
#include "whole.h"

struct Drafting {
    int64_t number_type, threads, batch, hidden, taps, inner, blocks;
    Linear fusion;                // [hidden, taps hidden], where heads read other layers of the base too
    const Linear *into, *out_of;  // [blocks]: [inner, 2 hidden] and [hidden, inner]
    Linear output;                // [columns, hidden]
    Linear embeddings;            // an output for each token
    float scale;                  // of embeddings
    const int64_t* ids;           // [columns] tokens
    Growth growth;
    const void* states;           // [batch, (1 + taps) hidden], that predicted the roots
    const int64_t* roots;         // [batch]
    const bool* active;           // [batch]
    const int64_t* keys;          // [batch, levels] of the noise that drafts heed; null = none
    float temperature;
    Grown grown;

    int bytes() const {  // of rows, see Linear
        int most = std::max(output.bytes(), fusion.bytes());
        for (int64_t b = 0; b < blocks; b++) most = std::max({most, into[b].bytes(), out_of[b].bytes()});
        return most;
    }
};

template <class T, class W> class Draft {  // W: how weights are met
    const Drafting& at;
    const int64_t wide_inner = W::room(at.inner), wide_both = W::room(2 * at.hidden), wide = W::room(at.hidden);
    const int64_t columns = at.output.outputs, levels = at.growth.levels, width = at.growth.width;
    Trees trees;
    std::vector<int64_t> numbers, best;  // best: [rows, width]
    std::vector<float> scores, highest, before, both, middle, added, logprobs;  // highest: of each level of each tree
    std::vector<float> noise;  // [batch, columns] of a level's draws, which all nodes of a tree share
    std::unique_ptr<float[]> logits;  // not filled with zeros first: a vocabulary is long
    Buffer<typename W::number> x, gated, layers;

    // The states that the level below the roots starts from.
    void fuse(Team::Member& member) {
        const int64_t width = (1 + at.taps) * at.hidden, room = W::room(at.taps * at.hidden);
        member.share(at.batch, [&](int64_t b) {
            const T* state = (const T*)at.states + b * width;
            std::vector<float> normed(at.taps * at.hidden);
            for (int64_t i = 0; i < at.hidden; i++) before[b * at.hidden + i] = widen(state[i]);
            for (int64_t t = 0; t < at.taps; t++) scaled(state + (1 + t) * at.hidden, &normed[t * at.hidden]);
            if (at.taps) W::arrange(normed.data(), at.taps * at.hidden, layers.data(), room, b, 0);
        });
        if (at.taps)
            member.share(at.hidden, W::OUTPUTS, [&](int64_t first, int64_t last) {
                W::linear(at.fusion, layers.data(), at.batch, added.data(), at.hidden, first, last);
                add(before.data(), at.hidden, at.batch, first, last);
            });
    }

    // A row at unit scale.
    void scaled(const T* row, float* out) const {
        float sum = 0;
        for (int64_t i = 0; i < at.hidden; i++) sum += widen(row[i]) * widen(row[i]);
        const float factor = 1 / std::sqrt(sum / at.hidden + std::numeric_limits<float>::epsilon());
        for_vectors(at.hidden, [&](int64_t i, int here) { put(rounded(::wide(row + i, here) * splat(factor), T()), out + i, here); });
    }

    void add(float* states, int64_t stride, int64_t rows, int64_t first, int64_t last) const {
        for (int64_t r = 0; r < rows; r++) {
            float* to = states + r * stride + first;
            const float* more = &added[r * at.hidden + first];
            for_vectors(last - first, [&](int64_t i, int here) { put(rounded(::wide(to + i, here) + ::wide(more + i, here), T()), to + i, here); });
        }
    }

    // What the parent hands down, and the token's embedding.
    void read(int64_t r, int64_t above, int64_t token) {
        float* row = &both[r * 2 * at.hidden];
        std::memcpy(row, &before[above * at.hidden], at.hidden * sizeof(float));
        Buffer<T> embedding;
        scaled(row_of(at.embeddings, token, embedding, at.scale), row + at.hidden);
        W::arrange(row, 2 * at.hidden, x.data(), wide_both, r, 0);
    }

    void block(int64_t b, int64_t rows, Team::Member& member) {
        member.share(at.inner, W::UNIT, [&](int64_t first, int64_t last) {
            W::linear(at.into[b], x.data(), rows, middle.data(), at.inner, first, last);
            for (int64_t r = 0; r < rows; r++) {
                float* row = &middle[r * at.inner + first];
                for_abreast(last - first, [&](int64_t i, auto count, int here) {
                    vf x[count];
                    UNROLLED for (int j = 0; j < count; j++) x[j] = ::wide(row + i + j * LANES, here);
                    silu<T>(x);
                    UNROLLED for (int j = 0; j < count; j++) put(x[j], row + i + j * LANES, here);
                });
                W::arrange(row, last - first, gated.data(), wide_inner, r, first);
            }
        });
        member.share(at.hidden, W::OUTPUTS, [&](int64_t first, int64_t last) {
            W::linear(at.out_of[b], gated.data(), rows, added.data(), at.hidden, first, last);
            add(both.data(), 2 * at.hidden, rows, first, last);
        });
        member.share(rows, [&](int64_t r) {
            float* row = &both[r * 2 * at.hidden];
            if (b + 1 < at.blocks) return W::arrange(row, 2 * at.hidden, x.data(), wide_both, r, 0);
            W::arrange(row, at.hidden, x.data(), wide, r, 0);
            std::memcpy(&before[r * at.hidden], row, at.hidden * sizeof(float));
        });
    }

  public:
    explicit Draft(const Drafting& drafting) : at(drafting), trees(at.growth, at.batch) {
        numbers.resize(trees.numbers()), scores.resize(trees.scores());
        trees.stand(numbers.data(), scores.data()), trees.plant(at.roots, at.active);
        const int64_t wide_layers = W::room(at.taps * at.hidden), rows = at.batch * trees.widest();
        highest.resize(levels * at.batch), best.resize(rows * width), logprobs.resize(rows * width);
        before.resize(rows * at.hidden), both.resize(rows * 2 * at.hidden), added.resize(rows * at.hidden);
        middle.resize(rows * at.inner), noise.resize(at.keys ? at.batch * columns : 0), logits.reset(new float[rows * columns]);
        x.resize(W::rows(rows) * wide_both), gated.resize(W::rows(rows) * wide_inner), layers.resize(W::rows(at.batch) * wide_layers);
    }

    void operator()() {
        int64_t grown = 0;
        Team(int(at.threads), 2 + levels * (4 + 3 * at.blocks)).run([&](Team::Member& member) {
            const typename W::Thread equipped;
            fuse(member);
            bool likely = true;
            int64_t level = 0;
            for (; level < levels && likely; level++) {
                const int64_t each = trees.each[level], rows = at.batch * each, before = level ? trees.each[level - 1] : 1;
                member.share(rows, [&](int64_t r) {
                    const int64_t b = r / each, m = r % each;
                    read(r, b * before + trees.above(b, m), trees.token_of(b, m));
                });
                for (int64_t b = 0; b < at.blocks; b++) block(b, rows, member);
                member.share(columns, W::OUTPUTS, [&](int64_t first, int64_t last) {
                    W::linear(at.output, x.data(), rows, logits.get(), columns, first, last);
                    for (int64_t b = 0; at.keys && b < at.batch; b++)
                        gumbel(uint32_t(at.keys[b * levels + level]), at.ids + first, last - first, &noise[b * columns + first]);
                });
                member.share(rows, [&](int64_t r) {
                    float* row = &logits[r * columns];
                    const float* added = at.keys ? &noise[r / each * columns] : nullptr;
                    if (added) for_vectors(columns, [&](int64_t i, int here) {
                        put(::wide(row + i, here) + splat(at.temperature) * ::wide(added + i, here), row + i, here);
                    });
                    trees.likeliest(row, columns, &best[r * width], &logprobs[r * width]);
                });
                member.share(at.batch, [&](int64_t b) {
                    const int64_t first = b * each * width;
                    highest[level * at.batch + b] = trees.grow(b, level, &best[first], &logprobs[first], width, at.ids);
                });
                // Of this level alone: others may be further already.
                const float* scores = &highest[level * at.batch];
                likely = *std::max_element(scores, scores + at.batch) >= at.growth.level_floor;
            }
            if (!member.thread) grown = level;
        });
        trees.choose(grown, at.grown);
    }
};
