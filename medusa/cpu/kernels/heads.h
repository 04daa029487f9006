// A draft of recurrent heads (medusa/heads/recurrent.py): trees that grow level by level, as HeadsDrafter.propose grows
// them (medusa/drafters/heads.py). Numbers are rounded to T where the module rounds them.
#pragma once
#include <memory>
#include <numeric>

#include "draw.h"
#include "linear.h"
#include "team.h"

struct Drafting {
    int64_t number_type, threads, batch, hidden, taps, inner, blocks;
    Linear fusion;                // [hidden, taps hidden], where heads read other layers of the base too
    const Linear *into, *out_of;  // [blocks]: [inner, 2 hidden] and [hidden, inner]
    Linear output;                // [columns, hidden]
    Linear embeddings;            // an output for each token
    const int64_t* ids;           // [columns] tokens
    int64_t levels, width, nodes, beam;  // width: children of a node; beam: nodes of a level that get any
    float level_floor, node_floor, lowest, edge_cost;  // log-probabilities
    const int64_t* const* picks;  // [levels - 1] candidates of each level that get children; null = the best
    const int64_t *picked, *chosen;  // [levels - 1] their numbers, and [nodes] columns of the draft, if not null
    const void* states;           // [batch, (1 + taps) hidden], that predicted the roots
    const int64_t* roots;         // [batch]
    const bool* active;           // [batch]
    const int64_t* keys;          // [batch, levels] of the noise that drafts heed; null = none
    float temperature;
    int64_t *tokens, *parents;    // [batch, nodes]
    float* scores;                // [batch, nodes]
    int64_t *sizes, *depth;       // [batch] nodes of each tree, and the largest depth of all
};

template <class T, class W> class Draft {  // W: how weights are met
    // A tree's candidates, level by level; column 0 is the root.
    struct Tree {
        std::vector<int64_t> tokens, parents;
        std::vector<float> scores;
        std::vector<int64_t> frontier, above;  // columns of the nodes that get children, and the rows of their parents
        std::vector<int64_t> order;            // columns, the best first
    };

    const Drafting& at;
    const int64_t wide_inner = W::room(at.inner), wide_both = W::room(2 * at.hidden), wide = W::room(at.hidden);
    const int64_t columns = at.output.outputs;
    std::vector<int64_t> each;  // [levels] nodes of each tree that get children
    std::vector<Tree> trees;
    std::vector<int64_t> best;  // [rows, width]
    std::vector<float> highest, before, both, middle, added, logprobs;  // highest: score of each level of each tree
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
        for (int64_t i = 0; i < at.hidden; i++) out[i] = rounded<T>(widen(row[i]) * factor);
    }

    void add(float* states, int64_t stride, int64_t rows, int64_t first, int64_t last) const {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = first; i < last; i++)
                states[r * stride + i] = rounded<T>(states[r * stride + i] + added[r * at.hidden + i]);
    }

    // What the parent hands down, and the token's embedding.
    void read(int64_t r, int64_t above, int64_t token) {
        float* row = &both[r * 2 * at.hidden];
        std::memcpy(row, &before[above * at.hidden], at.hidden * sizeof(float));
        Buffer<T> embedding;
        scaled(row_of(at.embeddings, token, embedding), row + at.hidden);
        W::arrange(row, 2 * at.hidden, x.data(), wide_both, r, 0);
    }

    void block(int64_t b, int64_t rows, Team::Member& member) {
        member.share(at.inner, W::UNIT, [&](int64_t first, int64_t last) {
            W::linear(at.into[b], x.data(), rows, middle.data(), at.inner, first, last);
            for (int64_t r = 0; r < rows; r++) {
                float* row = &middle[r * at.inner];
                for (int64_t i = first; i < last; i++) row[i] = rounded<T>(row[i] * sigmoid(splat(row[i]))[0]);
                W::arrange(row + first, last - first, gated.data(), wide_inner, r, first);
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

    // The likeliest children of a row, and their log-probabilities.
    void likeliest(int64_t r, const float* noise) {
        const int64_t width = at.width;
        float *row = &logits[r * columns], top[width];
        for (int64_t i = 0; noise && i < columns; i++) row[i] += at.temperature * noise[i];
        int64_t *found = &best[r * width], count = 0;
        // `width` sorted numbers; few of the row get among them.
        const auto take = [&](int64_t i) {
            if (count == width && !(row[i] > top[width - 1])) return;
            int64_t place = count < width ? count++ : width - 1;
            for (; place > 0 && row[i] > top[place - 1]; place--) top[place] = top[place - 1], found[place] = found[place - 1];
            top[place] = row[i], found[place] = i;
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
        for (int64_t k = 0; k < width; k++) logprobs[r * width + k] = top[k] - top[0] - std::log(sum);
    }

    // Columns first .. last of a tree, so many of the best of them in front.
    static void sort(Tree& tree, int64_t first, int64_t last, int64_t wanted) {
        tree.order.resize(last - first);
        std::iota(tree.order.begin(), tree.order.end(), first);
        std::partial_sort(tree.order.begin(), tree.order.begin() + wanted, tree.order.end(), [&](int64_t a, int64_t b) {
            return tree.scores[a] > tree.scores[b] || (tree.scores[a] == tree.scores[b] && a < b);
        });
    }

    // Adds the children of a tree's frontier, and picks those that get children in turn.
    void grow(int64_t b, int64_t level) {
        Tree& tree = trees[b];
        const int64_t first = tree.scores.size(), count = each[level] * at.width;
        float& most = highest[level * at.batch + b];
        for (int64_t i = 0; i < count; i++) {
            const int64_t parent = tree.frontier[i / at.width], place = b * count + i;
            const float logprob = logprobs[place] > at.lowest ? std::min(logprobs[place], 0.f) : at.lowest;  // NaN too
            tree.tokens.push_back(at.ids[best[place]]), tree.parents.push_back(parent);
            tree.scores.push_back(tree.scores[parent] + (logprob - at.edge_cost));
            most = std::max(most, tree.scores.back());
        }
        if (level + 1 == at.levels) return;
        if (!at.picks) sort(tree, first, first + count, each[level + 1]);
        for (int64_t m = 0; m < each[level + 1]; m++) {
            const int64_t candidate = at.picks ? at.picks[level][m] : tree.order[m] - first;
            tree.frontier[m] = first + candidate, tree.above[m] = b * each[level] + candidate / at.width;
        }
    }

    void choose(Tree& tree, int64_t b) {
        const int64_t all = tree.scores.size();
        int64_t count = std::min(at.nodes, all);
        if (at.chosen) tree.order.assign(at.chosen, at.chosen + count);
        else {
            sort(tree, 0, all, count);
            while (count > 1 && !(tree.scores[tree.order[count - 1]] > at.node_floor)) count--;
            std::sort(tree.order.begin(), tree.order.begin() + count);
        }
        std::vector<int64_t> place(all, 0), depth(count, 0);
        for (int64_t n = 0; n < at.nodes; n++) {
            const int64_t column = n < count ? tree.order[n] : 0, to = b * at.nodes + n;  // roots fill up
            if (n < count) place[column] = n;
            at.tokens[to] = tree.tokens[column], at.scores[to] = n < count ? tree.scores[column] : at.lowest;
            const int64_t parent = at.parents[to] = place[tree.parents[column]];
            if (n && n < count) *at.depth = std::max(*at.depth, depth[n] = depth[parent] + 1);
        }
        at.sizes[b] = count;
    }

  public:
    explicit Draft(const Drafting& drafting) : at(drafting), each(at.levels, 1), trees(at.batch) {
        for (int64_t level = 1; level < at.levels; level++)
            each[level] = at.picks ? at.picked[level - 1] : std::min(at.beam, each[level - 1] * at.width);
        const int64_t wide_layers = W::room(at.taps * at.hidden), nodes = *std::max_element(each.begin(), each.end());
        const int64_t rows = at.batch * nodes, all = 1 + std::accumulate(each.begin(), each.end(), int64_t(0)) * at.width;
        for (int64_t b = 0; b < at.batch; b++) {  // a finished sequence has no say in how far the others are drafted
            trees[b] = {{at.roots[b]}, {0}, {at.active[b] ? 0 : at.lowest}, {}, {}, {}};
            trees[b].frontier.resize(nodes), trees[b].above.resize(nodes, b);
            trees[b].tokens.reserve(all), trees[b].parents.reserve(all), trees[b].scores.reserve(all), trees[b].order.reserve(all);
        }
        highest.resize(at.levels * at.batch, 2 * at.lowest), best.resize(rows * at.width), logprobs.resize(rows * at.width);
        before.resize(rows * at.hidden), both.resize(rows * 2 * at.hidden), added.resize(rows * at.hidden);
        middle.resize(rows * at.inner), noise.resize(at.keys ? at.batch * columns : 0), logits.reset(new float[rows * columns]);
        x.resize(W::rows(rows) * wide_both), gated.resize(W::rows(rows) * wide_inner), layers.resize(W::rows(at.batch) * wide_layers);
    }

    void operator()() {
        *at.depth = 0;
        Team(int(at.threads), 2 + at.levels * (5 + 3 * at.blocks)).run([&](Team::Member& member) {
            const typename W::Thread equipped;
            fuse(member);
            bool likely = true;
            for (int64_t level = 0; level < at.levels && likely; level++) {
                const int64_t rows = at.batch * each[level];
                member.share(rows, [&](int64_t r) {
                    const Tree& tree = trees[r / each[level]];
                    const int64_t m = r % each[level];
                    read(r, tree.above[m], tree.tokens[tree.frontier[m]]);
                });
                for (int64_t b = 0; b < at.blocks; b++) block(b, rows, member);
                member.share(columns, W::OUTPUTS, [&](int64_t first, int64_t last) {
                    W::linear(at.output, x.data(), rows, logits.get(), columns, first, last);
                });
                if (at.keys)
                    member.share(at.batch, [&](int64_t b) { gumbel(uint32_t(at.keys[b * at.levels + level]), at.ids, columns, &noise[b * columns]); });
                member.share(rows, [&](int64_t r) { likeliest(r, at.keys ? &noise[r / each[level] * columns] : nullptr); });
                member.share(at.batch, [&](int64_t b) { grow(b, level); });
                // Of this level alone: others may be further already.
                const float* scores = &highest[level * at.batch];
                likely = *std::max_element(scores, scores + at.batch) >= at.level_floor;
            }
        });
        for (int64_t b = 0; b < at.batch; b++) choose(trees[b], b);
    }
};
