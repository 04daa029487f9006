// Trees of what followed the last tokens of a text where they stood before, in it or in earlier texts;
// medusa/drafters/continuations.py and ngram.py hold the same in Python.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

// Earlier texts, the last of them in a ring; -1 stands between two texts.
struct Earlier {
    int64_t size, buckets, count;  // places of the ring and lists of pairs, powers of two; tokens so far
    int64_t *ring, *previous;      // [size] tokens; 1 + the place before of a pair of the same list, 0 = none
    int64_t* latest;               // [buckets] 1 + the latest place of each list

    int64_t token(int64_t place) const { return ring[place & (size - 1)]; }
    int64_t list(int64_t first, int64_t second) const {
        return int64_t((uint64_t(first) * 0x9E3779B97F4A7C15u + uint64_t(second) * 0xC2B2AE3D27D4EB4Fu) >> 32) & (buckets - 1);
    }
    void add(int64_t next) {
        const int64_t place = count & (size - 1), before = count ? token(count - 1) : -1;
        ring[place] = next, previous[place] = 0, count++;
        if (before < 0 || next < 0) return;
        int64_t& last = latest[list(before, next)];
        previous[place] = last, last = count;
    }
};

struct Looking {
    int64_t batch, stride;
    int64_t nodes, chain, places, longest, shares;  // Search of medusa/cpu/lookup.py, here and below
    double floor, edge_cost, keep;
    const int64_t* history;       // [batch, .], its rows so far apart
    const int64_t *positions, *before;  // [batch] where roots stand, and stood in the draft that is judged; null = none is
    const bool* active;           // [batch]
    double *right, *tried;        // [longest + 1, shares + 1] guesses of each kind
    int64_t *tokens, *parents;    // [batch, nodes]
    float* scores;                // [batch, nodes]
    int64_t *sizes, *depth;       // [batch] nodes of each tree, and the largest depth of all
    const Earlier* earlier;       // where to search; null = in the text itself
};

class Lookup {
    static constexpr int64_t MOST_LOOKS = 256;

    struct Place {
        int64_t at, match;
    };
    // Places whose texts go on alike.
    struct Group {
        int64_t token, match;  // match: the longest
        double weight;
        std::vector<Place> places;
    };
    struct Candidate {
        double score;
        int64_t parent;
        Group group;
    };

    const Looking& at;
    const int64_t* text = nullptr;
    int64_t root = 0;

    // Where the root's token stood before, the longest matches first, then the latest. Looking back ends where enough are
    // found that nothing can beat.
    std::vector<Place> places() const {
        std::vector<Place> found = at.earlier ? places_in(*at.earlier) : places_in_text();
        const auto better = [](const Place& a, const Place& b) { return a.match != b.match ? a.match > b.match : a.at > b.at; };
        const int64_t count = std::min<int64_t>(at.places, found.size());
        std::partial_sort(found.begin(), found.begin() + count, found.end(), better);
        found.resize(count);
        return found;
    }

    std::vector<Place> places_in_text() const {
        std::vector<Place> found;
        int64_t whole = 0;
        for (int64_t i = root - 1; i >= 0 && whole < at.places; i--) {
            if (text[i] != text[root]) continue;
            int64_t match = 1;
            while (match < at.longest && match <= i && text[i - match] == text[root - match]) match++;
            whole += match == at.longest, found.push_back({i, match});
        }
        return found;
    }

    // The latest places of the last two tokens in earlier texts.
    std::vector<Place> places_in(const Earlier& texts) const {
        std::vector<Place> found;
        const int64_t oldest = std::max<int64_t>(0, texts.count - texts.size);
        int64_t i = root < 1 ? -1 : texts.latest[texts.list(text[root - 1], text[root])] - 1, whole = 0;
        for (int64_t looks = MOST_LOOKS; i > oldest && whole < at.places && looks > 0; looks--) {
            int64_t match = 0;
            while (match < at.longest && match <= std::min(root, i - oldest) && texts.token(i - match) == text[root - match])
                match++;
            if (match >= 2) whole += match == at.longest, found.push_back({i, match});
            const int64_t before = texts.previous[i & (texts.size - 1)] - 1;
            if (before >= i) break;  // it is being written over
            i = before;
        }
        return found;
    }

    // The token so far behind a place: a text that repeats itself goes on doing so, an earlier one has an end (-1).
    int64_t after(const Place& place, int64_t depth) const {
        if (!at.earlier) return text[place.at + 1 + depth % (root - place.at)];
        const int64_t next = place.at + 1 + depth;
        return next < at.earlier->count ? at.earlier->token(next) : -1;
    }

    // What followed these places so far behind them.
    std::vector<Group> groups(const std::vector<Place>& places, int64_t depth) const {
        std::vector<Group> found;
        for (const Place& place : places) {
            const int64_t token = after(place, depth);
            if (token < 0) continue;
            auto group = std::find_if(found.begin(), found.end(), [&](const Group& one) { return one.token == token; });
            if (group == found.end()) group = found.insert(group, {token, place.match, 0, {}});  // the longest comes first
            group->weight += std::ldexp(1.0, int(place.match)), group->places.push_back(place);
        }
        return found;
    }

    int64_t kind(const Group& group, double all, int64_t depth) const {
        return std::min(group.match + depth, at.longest) * (at.shares + 1) + int64_t(group.weight / all * at.shares);
    }

    static double weight(const std::vector<Group>& groups) {
        double all = 0;
        for (const Group& group : groups) all += group.weight;
        return all;
    }

    // All continuations of the root before, whether they were drafted or not, by what has come.
    void judge(int64_t before, int64_t now) {
        root = before;
        std::vector<Place> here = places();
        for (int64_t depth = 0; before + 1 + depth <= now && !here.empty(); depth++) {
            std::vector<Group> all = groups(here, depth);
            const double whole = weight(all);
            here.clear();
            for (Group& group : all) {
                const int64_t k = kind(group, whole, depth);
                const bool right = group.token == text[before + 1 + depth];
                // A hundredth of a guess either way keeps shares from 0 and 1.
                at.right[k] = at.keep * at.right[k] + right + 0.01, at.tried[k] = at.keep * at.tried[k] + 1.02;
                if (right) here = std::move(group.places);
            }
        }
    }

    int64_t grow(int64_t b) {
        int64_t *tokens = at.tokens + b * at.nodes, *parents = at.parents + b * at.nodes, count = 1;
        float* scores = at.scores + b * at.nodes;
        std::vector<int64_t> depths(at.nodes, 0);
        std::vector<double> exact(at.nodes, 0);
        std::vector<Candidate> waiting;
        const auto offer = [&](int64_t node, const std::vector<Place>& here) {
            std::vector<Group> all = groups(here, depths[node]);
            const double whole = weight(all);
            const size_t first = waiting.size();
            for (Group& group : all) {
                const int64_t k = kind(group, whole, depths[node]);
                const double score = exact[node] + (std::log(at.right[k] / at.tried[k]) - at.edge_cost);
                if (score < at.floor) continue;
                if (!at.chain || waiting.size() == first) waiting.push_back({score, node, std::move(group)});
                else if (score > waiting[first].score) waiting[first] = {score, node, std::move(group)};
            }
        };
        tokens[0] = text[root], parents[0] = 0, scores[0] = 0;
        if (at.active[b]) offer(0, places());
        while (!waiting.empty() && count < at.nodes) {
            const auto best = std::max_element(waiting.begin(), waiting.end(),
                                               [](const Candidate& a, const Candidate& b) { return a.score < b.score; });
            const Candidate next = std::move(*best);
            waiting.erase(best);
            tokens[count] = next.group.token, parents[count] = next.parent, scores[count] = float(exact[count] = next.score);
            depths[count] = depths[next.parent] + 1, *at.depth = std::max(*at.depth, depths[count]);
            offer(count++, next.group.places);
        }
        for (int64_t n = count; n < at.nodes; n++) tokens[n] = parents[n] = 0, scores[n] = -INFINITY;  // fills up
        return count;
    }

  public:
    explicit Lookup(const Looking& looking) : at(looking) {}

    void operator()() {
        *at.depth = 0;
        for (int64_t b = 0; b < at.batch; b++) {
            text = at.history + b * at.stride;
            if (at.before && at.active[b]) judge(at.before[b], at.positions[b]);
        }
        for (int64_t b = 0; b < at.batch; b++) {
            text = at.history + b * at.stride, root = at.positions[b];
            at.sizes[b] = grow(b);
        }
    }
};
