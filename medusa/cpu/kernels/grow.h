// Trees that grow level by level from the heads' logits, as HeadsDrafter grows them in Python (medusa/drafters/heads.py).
#pragma once
#include <numeric>

#include "vectors.h"

struct Growth {
    int64_t levels, width, nodes, beam;  // width: children of a node; beam: nodes of a level that get any
    float level_floor, node_floor, lowest, edge_cost;  // log-probabilities
    const int64_t* const* picks;         // [levels - 1] candidates of each level that get children; null = the best
    const int64_t *picked, *chosen;      // [levels - 1] their numbers, and [nodes] columns of the draft, if not null
};

// Drafts, [batch, nodes] each: what is filled up has the root's token.
struct Grown {
    int64_t *tokens, *parents;
    float* scores;
    int64_t *sizes, *depth;  // [batch] nodes of each tree, and the largest depth of all
};

// The candidates of so many trees, level by level; column 0 is the root.
class Trees {
    const Growth& at;
    const int64_t batch;
    int64_t most = 1, all = 1;  // nodes of a level that get children, and candidates of a tree, at most
    int64_t *token, *parent, *frontier, *over;
    float* score;

    // Columns first .. last of a tree, so many of the best of them in front.
    static void sort(const float* scores, int64_t first, int64_t last, int64_t wanted, std::vector<int64_t>& order) {
        order.resize(last - first);
        std::iota(order.begin(), order.end(), first);
        std::partial_sort(order.begin(), order.begin() + wanted, order.end(),
                          [&](int64_t a, int64_t b) { return scores[a] > scores[b] || (scores[a] == scores[b] && a < b); });
    }

  public:
    std::vector<int64_t> each;  // [levels] nodes of each tree that get children

    Trees(const Growth& growth, int64_t batch) : at(growth), batch(batch), each(growth.levels, 1) {
        for (int64_t level = 0; level < at.levels; level++) {
            if (level) each[level] = at.picks ? at.picked[level - 1] : std::min(at.beam, each[level - 1] * at.width);
            most = std::max(most, each[level]), all += each[level] * at.width;
        }
    }
    int64_t widest() const { return most; }
    int64_t numbers() const { return 2 * batch * (all + most); }
    int64_t scores() const { return batch * all; }

    // Where so many numbers and scores stand.
    void stand(int64_t* numbers, float* scores) {
        token = numbers, parent = token + batch * all, frontier = parent + batch * all, over = frontier + batch * most;
        score = scores;
    }

    // A finished sequence has no say in how far the others are drafted.
    void plant(const int64_t* roots, const bool* active) {
        for (int64_t b = 0; b < batch; b++) {
            token[b * all] = roots[b], parent[b * all] = 0, score[b * all] = active[b] ? 0 : at.lowest;
            frontier[b * most] = over[b * most] = 0;
        }
    }

    // Of the m-th node of a tree that gets children: its token, and where its parent stood among those of the level before.
    int64_t token_of(int64_t b, int64_t m) const { return token[b * all + frontier[b * most + m]]; }
    int64_t above(int64_t b, int64_t m) const { return over[b * most + m]; }

    // The likeliest columns of a row of logits, and their log-probabilities.
    void likeliest(const float* row, int64_t columns, int64_t* found, float* logprobs) const {
        const int64_t width = at.width;
        float top[width];
        int64_t count = 0;
        // `width` sorted numbers; few of the row get among them.
        const auto take = [&](int64_t i) {
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
        for (int64_t k = 0; k < width; k++) logprobs[k] = top[k] - top[0] - std::log(sum);
    }

    // Adds the children of a tree's frontier, and picks those that get children in turn; the best score among them. What is
    // likeliest below the m-th node stands at m * step.
    float grow(int64_t b, int64_t level, const int64_t* found, const float* logprobs, int64_t step, const int64_t* ids) {
        const int64_t first = 1 + std::accumulate(each.begin(), each.begin() + level, int64_t(0)) * at.width, count = each[level] * at.width;
        int64_t *tokens = token + b * all, *parents = parent + b * all, *nodes = frontier + b * most;
        float *scores = score + b * all, best = 2 * at.lowest;
        for (int64_t i = 0; i < count; i++) {
            const int64_t from = i / at.width * step + i % at.width, above = nodes[i / at.width];
            const float logprob = logprobs[from] > at.lowest ? std::min(logprobs[from], 0.f) : at.lowest;  // NaN too
            tokens[first + i] = ids ? ids[found[from]] : found[from], parents[first + i] = above;
            scores[first + i] = scores[above] + (logprob - at.edge_cost);
            best = std::max(best, scores[first + i]);
        }
        if (level + 1 == at.levels) return best;
        std::vector<int64_t> order;
        if (!at.picks) sort(scores, first, first + count, each[level + 1], order);
        for (int64_t m = 0; m < each[level + 1]; m++) {
            const int64_t candidate = at.picks ? at.picks[level][m] : order[m] - first;
            nodes[m] = first + candidate, over[b * most + m] = candidate / at.width;
        }
        return best;
    }

    // The drafts, after so many levels.
    void choose(int64_t levels, const Grown& grown) const {
        *grown.depth = 0;
        const int64_t here = 1 + std::accumulate(each.begin(), each.begin() + levels, int64_t(0)) * at.width;
        for (int64_t b = 0; b < batch; b++) {
            const float* scores = score + b * all;
            int64_t count = std::min(at.nodes, here);
            std::vector<int64_t> order, place(here, 0), depth(count, 0);
            if (at.chosen) order.assign(at.chosen, at.chosen + count);
            else {
                sort(scores, 0, here, count, order);
                while (count > 1 && !(scores[order[count - 1]] > at.node_floor)) count--;
                std::sort(order.begin(), order.begin() + count);
            }
            for (int64_t n = 0; n < at.nodes; n++) {
                const int64_t column = n < count ? order[n] : 0, to = b * at.nodes + n;
                if (n < count) place[column] = n;
                grown.tokens[to] = token[b * all + column], grown.scores[to] = n < count ? scores[column] : at.lowest;
                const int64_t above = grown.parents[to] = place[parent[b * all + column]];
                if (n && n < count) *grown.depth = std::max(*grown.depth, depth[n] = depth[above] + 1);
            }
            grown.sizes[b] = count;
        }
    }
};

// Trees whose logits come from elsewhere, level by level.
struct Growing {
    Growth growth;
    int64_t threads, batch, columns;
    const int64_t* ids;  // [columns] tokens; null = the columns themselves
    int64_t* numbers;    // what stands between the levels, see Trees
    float* scores;
    int64_t *tokens, *above;  // [batch, nodes of the level]: those that get children next, and where their parents stood
    Grown grown;
};
