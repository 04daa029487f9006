// A decoder's whole pass over tree rows, for families whose layers are the usual block: norm, attention with rotary
// positions, residual, norm, gated MLP, residual; norms may stand behind attention and the MLP too, or only there. In
// place of attention, some layers may be recurrent (mixer.h); in place of the MLP or beside it, there may be experts.
// Layers may differ in their heads, share keys and values, and read embeddings of their own (layer_inputs.h). Numbers are
// rounded to T where transformers rounds them.
//
// One team of threads runs through all layers; a stage ends where the next reads what another thread wrote.
#pragma once
#include <map>
#include <memory>
#include <stdexcept>

#include "attention.h"
#include "experts.h"
#include "layer_inputs.h"
#include "whole.h"
#include "mixer.h"
#include "tiles.h"

struct Block {
    Linear query, key, value, more, output, gate, up, down;  // the first four read the same; see Mixer for recurrent layers
    Linear input_gate, input_projection;                     // of per-layer embeddings, or no outputs
    const void *norm, *after, *mlp_norm, *mlp_after;  // weights of norms before and after attention and the MLP, or null
    const void *query_norm, *key_norm, *value_norm;   // or null
    const void* input_norm;                           // of what per-layer embeddings give, or null
    const void* token_norm;                           // of embeddings that are read in front of the state, or null
    const float* sinks;                               // [heads] scores of a key without a value that every row sees, or null
    const Mixer* mixer;                               // or null: attention
    const Mixture* mixture;                           // or null; then the MLP is one that all rows visit, or has no outputs
    int64_t gates;                                    // 1 = a head's gate of its output follows each head of queries
    int64_t whole_norms;                              // 1 = queries and keys are normed over all heads, 0 = head by head
    int64_t rotary;                                   // which positions turn queries and keys; -1 = none
    int64_t window, chunk;                            // 0 = none
    int64_t tap;                                      // where its output goes in a row of hidden states; 0 = nowhere
    int64_t kv_heads, dim;                            // of attention
    float scale;                                      // a factor on its output
};

struct Pass {
    int64_t number_type, threads, batch, hidden;
    int64_t heads, layers, width;  // heads: 0 = keys and values alone, of the states that come in
    int64_t context;              // positions behind it become its last one
    int64_t rounds_once, gelu;    // 1 = norms round the product alone; 1 = gates are GELU (by tanh), 0 = SiLU
    int64_t wide_angles;          // 1 = cosines and sines are floats
    int64_t pairs;                // 1 = rotary positions turn neighbours, 0 = a number of each half of a head
    float epsilon, offset, scaling, softcap, residual, multiplier;  // offset: added to weights of norms; softcap: 0 = none
    const int64_t *lengths, *tokens, *parents;  // [batch], [rows], [nodes]
    const int64_t* skipped;                     // [batch] positions before a row that are not in its table, or null
    const int64_t* firsts;                      // [batch + 1] where the nodes of each sequence begin
    int64_t computed, together;                 // see Layer
    Table table;
    const void *const *cosines, *const *sines;  // of each kind of positions, [positions, rotated]
    const int64_t* rotated;                     // numbers of a head that each kind turns
    const float* query_scales;      // [context] factors on turned queries, or null
    const void* norm;               // or null: the last layer's output is handed over as it is
    Linear embeddings;              // an output for each token
    const LayerInputs* inputs;      // or null: no per-layer embeddings
    const void* states;             // [rows, hidden] what the first layer reads, or null: embeddings
    void* out;                      // [rows, width]: the last hidden state, then what is tapped
    const Block* blocks;
    void *const *keys, *const *values;  // of each layer, [blocks, size, kv heads, D]
    const Memory* memories;             // of each layer, or null: none is recurrent

    int bytes() const {  // of rows, see Linear
        int most = inputs ? inputs->projection.bytes() : 0;
        for (const Block* block = blocks; block != blocks + layers; block++) {
            for (const Linear* linear = &block->query; linear <= &block->input_projection; linear++) most = std::max(most, linear->bytes());
            if (block->mixture) most = std::max(most, block->mixture->bytes());
        }
        return most;
    }
};

constexpr int64_t SLAB = 512;      // rows whose inner numbers are kept at a time
constexpr int64_t COLUMNS = 384;   // of gates that are computed at a time, at least: whole tiles of every kind
constexpr int64_t MIDDLE = 65536;  // numbers that stay in a core's cache
constexpr int64_t FEW = 16;        // rows that every thread arranges for itself: sooner done than waited for

template <class T, class W> class Run {  // W: how its weights are met
    const Pass& at;
    static constexpr int64_t GROUP = W::rows(1);  // rows that are arranged together where they are many
    const int64_t rows = at.firsts[at.batch] - at.computed * at.batch;
    const int64_t wide_hidden = W::room(at.hidden);
    std::map<std::pair<int64_t, int64_t>, Work> works;  // by key heads and their size: how a team shares attention
    Buffer<T> stream, projected;
    Buffer<typename W::number> x, gated;
    std::vector<T> query, attended;
    std::vector<int64_t> positions, places;  // of each row in its text, and in the cache
    std::vector<int64_t> above;              // the row before each, in its tree; -1 = none
    Buffer<float> asked, recurred, skipped;  // queries, outputs and what is added to them, of recurrent layers
    std::unique_ptr<Experts<T, W>> experts;
    Buffer<T> given;                // per-layer embeddings
    Buffer<T> read, scores, mixed;  // what experts read and make, and the router's scores with the gate's
    Buffer<number<T>> routed;       // what the router reads
    std::vector<int64_t> chosen, found;  // found: of each layer, see Experts
    Buffer<float> shares;
    typedef Team::Member Member;

    // A row divided by its root mean square, times a weight.
    template <class To> void normed(const T* from, const void* weights, int64_t count, To to) const {
        const T* weight = (const T*)weights;
        vf squares[ABREAST] = {}, all = {};
        for_abreast(count, [&](int64_t i, auto vectors, int here) {
            UNROLLED for (int j = 0; j < vectors; j++) {
                const vf numbers = wide(from + i + j * LANES, here);
                squares[j] = fma(numbers, numbers, squares[j]);
            }
        });
        UNROLLED for (const vf& part : squares) all += part;
        const float factor = 1 / std::sqrt(sum(all) / count + at.epsilon);
        for_vectors(count, [&](int64_t i, int here) {
            const vf unit = wide(from + i, here) * splat(factor), scale = wide(weight + i, here) + splat(at.offset);
            put(rounded(scale * (at.rounds_once ? unit : rounded(unit, T())), T()), to + i, here);
        });
    }
    const T* embedding(int64_t r, Buffer<T>& room) const { return row_of(at.embeddings, at.tokens[r], room, at.multiplier); }

    // What gives a thread the rows that a linear layer reads, arranged; row(r, to) gives their numbers. Many are arranged
    // by all threads, few by each thread for itself when it takes its first piece. Several go together: by itself, a row
    // is stored pair by pair.
    template <class Numbers> auto rows_for(Member& member, int64_t in, Numbers row) {
        const auto arrange = [in, row](int64_t first, int64_t count, typename W::number* to) {
            thread_local Buffer<float> numbers;
            grow(numbers, std::min(GROUP, count) * in + LANES);
            if constexpr (GROUP > 1)
                if (count > GROUP / 4) {
                    for (int64_t r = 0; r < count; r++) row(first + r, &numbers[r * in]);
                    return W::arrange_group(numbers.data(), count, in, to, W::room(in), first);
                }
            for (int64_t r = first; r < first + count; r++)
                row(r, numbers.data()), W::arrange(numbers.data(), in, to, W::room(in), r, 0);
        };
        const bool many = rows > FEW;
        if (many)
            member.share((rows + GROUP - 1) / GROUP, [&](int64_t group) {
                arrange(group * GROUP, std::min(GROUP, rows - group * GROUP), x.data());
            });
        return [this, in, arrange, many, ready = false]() mutable -> const typename W::number* {
            thread_local Buffer<typename W::number> own;
            if (many) return x.data();
            if (!ready) grow(own, W::rows(rows) * W::room(in)), arrange(0, rows, own.data());
            ready = true;
            return own.data();
        };
    }
    auto normed_rows(Member& member, const void* weight) {
        return rows_for(member, at.hidden, [this, weight](int64_t r, float* to) {
            if (weight) normed(&stream[r * at.hidden], weight, at.hidden, to);
            else copied(&stream[r * at.hidden], at.hidden, to);
        });
    }

    // An embedding and a state, each normed, side by side.
    auto joined_rows(Member& member, const Block& block) {
        return rows_for(member, 2 * at.hidden, [this, &block](int64_t r, float* to) {
            thread_local Buffer<T> room;
            normed(embedding(r, room), block.token_norm, at.hidden, to);
            normed(&stream[r * at.hidden], block.norm, at.hidden, to + at.hidden);
        });
    }

    int64_t queries(const Block& block) const { return at.heads * block.dim; }
    static int64_t keys(const Block& block) { return block.kv_heads * block.dim; }
    static int64_t width(const Block& block) {  // of a row of queries, keys and values
        return block.query.outputs + block.key.outputs + block.value.outputs + block.more.outputs;
    }

    // Queries, keys and values of all rows, side by side.
    void project(const Block& block, Member& member) {
        if (block.token_norm) project(block, joined_rows(member, block), member);
        else project(block, normed_rows(member, block.norm), member);
    }
    template <class From> void project(const Block& block, From from, Member& member) {
        const int64_t total = width(block);
        member.share(total, together<W>(block.query), [&](int64_t begin, int64_t end) {
            int64_t before = 0;
            for (const Linear* layer : {&block.query, &block.key, &block.value, &block.more}) {
                const int64_t first = std::max(begin, before), last = std::min(end, before + layer->outputs);
                if (first < last) W::linear(*layer, from(), rows, projected.data() + before, total, first - before, last - before);
                before += layer->outputs;
            }
        });
    }

    // Heads of queries or of keys, so far apart, normed in place where the family does so.
    void norm_heads(const Block& block, const void* weight, int64_t count, int64_t apart, T* heads) const {
        if (!weight) return;
        if (block.whole_norms) return normed(heads, weight, count * block.dim, heads);
        for (int64_t i = 0; i < count; i++) normed(heads + i * apart, weight, block.dim, heads + i * apart);
    }

    // One head's numbers, turned by the row's position; products are rounded as angles are. Where neighbours are turned,
    // they go to different halves: queries and keys alike, so that their products stay.
    template <class Angle> void turned(const Block& block, const T* head, int64_t position, T* to) const {
        const int64_t rotated = block.rotary < 0 ? 0 : at.rotated[block.rotary], half = rotated / 2;
        std::memcpy(to + rotated, head + rotated, (block.dim - rotated) * sizeof(T));
        if (rotated) {
            T apart[block.dim];
            if (at.pairs) {
                for (int64_t d = 0; d < half; d++) apart[d] = head[2 * d], apart[half + d] = head[2 * d + 1];
                head = apart;
            }
            const Angle* cosines = (const Angle*)at.cosines[block.rotary] + position * rotated;
            const Angle* sines = (const Angle*)at.sines[block.rotary] + position * rotated;
            const auto turn = [&](int64_t d, int64_t other, float sign, int here) {
                const vf straight = rounded(wide(head + d, here) * wide(cosines + d, here), Angle());
                const vf across = rounded(splat(sign) * wide(head + other, here) * wide(sines + d, here), Angle());
                put(rounded(straight + across, T()), to + d, here);
            };
            for_vectors(half, [&](int64_t d, int here) { turn(d, d + half, -1, here), turn(d + half, d, 1, here); });
        }
    }

    void place_heads(const Block& block, void* cached_keys, void* cached_values, Member& member) {
        const int64_t total = width(block), apart = (1 + block.gates) * block.dim, first_key = at.heads * apart;
        const int64_t queries = this->queries(block), keys = this->keys(block);
        member.share(rows, [&](int64_t r) {
            T* from = &projected[r * total];
            const auto turn = [&](int64_t d, T* to) {
                at.wide_angles ? turned<float>(block, from + d, positions[r], to) : turned<T>(block, from + d, positions[r], to);
            };
            norm_heads(block, block.query_norm, at.heads, apart, from);
            for (int64_t h = 0; h < at.heads; h++) turn(h * apart, &query[r * queries + h * block.dim]);
            if (at.query_scales)
                for_vectors(queries, [&](int64_t i, int here) {
                    T* to = &query[r * queries + i];
                    put(rounded(wide(to, here) * splat(at.query_scales[positions[r]]), T()), to, here);
                });
            if (!block.key.outputs) return;  // an earlier layer's are read
            T *key = from + first_key, *value = key + (block.value.outputs ? keys : 0);
            T *cached_key = (T*)cached_keys + places[r] * keys, *cached_value = (T*)cached_values + places[r] * keys;
            if (!block.value_norm) std::memcpy(cached_value, value, keys * sizeof(T));  // before keys change: values may be keys
            else for (int64_t d = 0; d < keys; d += block.dim) normed(value + d, block.value_norm, block.dim, cached_value + d);
            norm_heads(block, block.key_norm, block.kv_heads, block.dim, key);
            for (int64_t d = 0; d < keys; d += block.dim) turn(first_key + d, cached_key + d);
        });
    }

    Layer attention_of(const Block& block) const {
        return {at.batch, at.heads, block.kv_heads, block.dim, block.dim, at.lengths, at.parents, at.firsts, at.computed, at.together, at.table, block.window, block.chunk, queries(block), block.dim, block.sinks, at.scaling, at.softcap};
    }

    void attend(const Block& block, const void* cached_keys, const void* cached_values, Member& member) {
        const Layer layer = attention_of(block);
        Attention<T, W::MATRIX_UNIT>{layer, query.data(), (const T*)cached_keys, (const T*)cached_values, attended.data()}.run(works.at({block.kv_heads, block.dim}), member);
    }

    // Columns of gates and of what they let through at a time.
    static int64_t columns(int64_t count) { return std::max<int64_t>(1, MIDDLE / (count * COLUMNS)) * COLUMNS; }

    // Gates become what they let through, rounded.
    auto joining() const {
        return [gelu = at.gelu](auto& gates, const auto& ups) {
            gelu ? tanh_gelu<T>(gates) : silu<T>(gates);
            UNROLLED for (size_t j = 0; j < std::size(ups); j++) gates[j] *= ups[j];
        };
    }

    // Outputs begin .. end of gates, times what they let through, of `count` rows, in `gated`.
    void gate(const Block& block, const typename W::number* from, int64_t count, int64_t begin, int64_t end) {
        if constexpr (GROUP > 1)  // as the unit leaves them, empty rows too; fewer rows are put in order first
            if (count > GROUP / 2) return W::gated(block.gate, block.up, from, count, gated.data(), begin, end, joining());
        gate(block.gate, from, count, begin, end, [&](int64_t first, int64_t last, T* to, int64_t stride) {
            W::linear(block.up, from, count, to - first, stride, first, last);
        });
    }
    // The same where find(first, last, to, stride) gives what they let through.
    template <class Find> void gate(const Linear& layer, const typename W::number* from, int64_t count, int64_t begin, int64_t end, Find find) {
        const int64_t most = std::min(columns(count), end - begin), room = W::room(layer.outputs);
        const auto join = joining();
        thread_local Buffer<T> middle;
        grow(middle, 2 * count * most);
        T *gates = middle.data(), *ups = gates + count * most;
        float row[most];
        for (; begin < end; begin += most) {
            const int64_t stop = std::min(begin + most, end);
            W::linear(layer, from, count, gates - begin, most, begin, stop);
            find(begin, stop, ups, most);
            for (int64_t r = 0; r < count; r++) {
                for_abreast(stop - begin, [&](int64_t i, auto vectors, int here) {
                    vf gate[vectors], up[vectors];
                    UNROLLED for (int j = 0; j < vectors; j++) {
                        gate[j] = wide(gates + r * most + i + j * LANES, here);
                        up[j] = wide(ups + r * most + i + j * LANES, here);
                    }
                    join(gate, up);
                    UNROLLED for (int j = 0; j < vectors; j++) put(rounded(gate[j], T()), row + i + j * LANES, here);
                });
                W::arrange(row, stop - begin, gated.data(), room, r, begin);
            }
        }
    }

    // A layer's output for `count` rows.
    template <class From, class To> void compute(const Linear& layer, From from, int64_t count, To to, Member& member) {
        member.share(at.hidden, together<W>(layer), [&](int64_t begin, int64_t end) { W::linear(layer, from(), count, to, at.hidden, begin, end); });
    }

    // Adds it, normed where the family does so, to rows of the residual stream from `row` on.
    template <class From> void add(const Linear& layer, const void* norm, From from, int64_t row, int64_t count, Member& member) {
        const Sum<T> sums{&stream[row * at.hidden], at.residual};
        if (!norm) return compute(layer, from, count, sums, member);
        compute(layer, from, count, projected.data(), member);
        member.share(count, [&](int64_t r) { normed(&projected[r * at.hidden], norm, at.hidden, sums + r * at.hidden); });
    }

    // What attention gives a row, times the sigmoid of its gates where it has some.
    void let_through(const Block& block, int64_t r, float* to) const {
        const T* heads = &attended[r * queries(block)];
        if (!block.gates) return copied(heads, queries(block), to);
        const T* gates = &projected[r * width(block) + block.dim];
        for (int64_t h = 0; h < at.heads; h++)
            for_vectors(block.dim, [&](int64_t d, int here) {
                const vf open = sigmoid<T>(wide(gates + 2 * h * block.dim + d, here));
                put(rounded(wide(heads + h * block.dim + d, here) * open, T()), to + h * block.dim + d, here);
            });
    }

    // A recurrent layer in place of attention: a convolution, the recurrence, and gates.
    void recur(const Block& block, const Memory& memory, Member& member) {
        const Mixing<T> mixing{*block.mixer, memory, projected.data(), width(block), at.batch * (block.mixer->filter.width - 1)};
        member.share(rows, [&](int64_t r) { mixing.take(r); });
        if (block.mixer->kind != SHORT_CONVOLUTION) {
            member.share(rows, [&](int64_t r) { mixing.prepare(r, asked.data(), skipped.data()); });
            const Recurring recurring = mixing.recurring(at.batch, at.firsts, above.data(), asked.data(), recurred.data());
            Recurrence recurrence(recurring);
            member.share(Recurrence::pieces(recurring), [&](int64_t piece) { recurrence(piece); });
        }
        const auto mixed_rows = rows_for(member, block.output.in, [&](int64_t r, float* to) { mixing.give(r, recurred.data(), skipped.data(), to); });
        add(block.output, block.after, mixed_rows, 0, rows, member);
    }

    // What a router reads of a state where it does not read what experts read.
    void read_by_router(const Mixture& here, const T* state, float* to) const {
        normed(state, here.router_norm, at.hidden, to);
        for_vectors(at.hidden, [&](int64_t i, int count) {
            const vf scaled = rounded(wide(to + i, count) * wide((const T*)here.router_scale + i, count), T());
            put(rounded(scaled * splat(here.router_factor), T()), to + i, count);
        });
    }

    // What experts make of all rows, in `mixed`.
    void mix(const Block& block, Member& member) {
        const Mixture& here = *block.mixture;
        const int64_t room = Plain<T>::room(at.hidden), scored = here.experts + 1;
        member.share(rows, [&](int64_t r) {
            thread_local Buffer<float> row;
            grow(row, at.hidden + LANES);
            T *state = &stream[r * at.hidden], *to = &read[r * at.hidden];
            normed(state, here.norm ? here.norm : block.mlp_norm, at.hidden, to);
            here.router_norm ? read_by_router(here, state, row.data()) : copied(to, at.hidden, row.data());
            Plain<T>::arrange(row.data(), at.hidden, routed.data(), room, r, 0);
        });
        member.share(here.experts, Plain<T>::OUTPUTS, [&](int64_t begin, int64_t end) {
            Plain<T>::linear(here.router, routed.data(), rows, scores.data(), scored, begin, end);
            if (here.gate.outputs && end == here.experts) Plain<T>::linear(here.gate, routed.data(), rows, scores.data() + here.experts, scored, 0, 1);
        });
        member.share(rows, [&](int64_t r) { choose(here, &scores[r * scored], &chosen[r * here.top], &shares[r * here.top]); });
        (*experts)(here, read.data(), chosen.data(), shares.data(), mixed.data(), found[&block - at.blocks], member);
    }

    // What a row gets from its experts, and from an MLP that all rows visit, times the sigmoid of its gate if it has one;
    // normed where the family does so: each, and their sum.
    void add_mixed(const Block& block, int64_t r) {
        const Mixture& here = *block.mixture;
        T *made = &mixed[r * at.hidden], *beside = &projected[r * at.hidden];
        if (here.after) normed(made, here.after, at.hidden, made), normed(beside, here.beside, at.hidden, beside);
        vf open = splat(1.f);
        if (here.gate.outputs) open = sigmoid<T>(splat(widen(scores[r * (here.experts + 1) + here.experts])));
        const Sum<T> sums{&stream[r * at.hidden], at.residual};
        for_vectors(at.hidden, [&](int64_t i, int count) {
            vf all = wide(made + i, count);
            if (block.down.outputs) all = rounded(all + rounded(wide(beside + i, count) * open, T()), T());
            if (block.mlp_after) put(all, made + i, count);
            else put(all, sums + i, count);
        });
        if (block.mlp_after) normed(made, block.mlp_after, at.hidden, sums);
    }

    // Per-layer embeddings of all rows.
    void find_inputs(const LayerInputs& here, Member& member) {
        const int64_t all = here.projection.outputs;
        auto from = normed_rows(member, nullptr);
        member.share(all, together<W>(here.projection), [&](int64_t begin, int64_t end) {
            W::linear(here.projection, from(), rows, given.data(), all, begin, end);
        });
        const auto norm = [&](T* row) { normed(row, here.norm, here.size, row); };
        member.share(rows, [&](int64_t r) { here.complete(at.tokens[r], &given[r * all], norm); });
    }

    // Adds what a layer's gate lets through of them.
    void let_in(const Block& block, int64_t index, Member& member) {
        const int64_t size = at.inputs->size, all = at.inputs->projection.outputs;
        auto from = normed_rows(member, nullptr);
        for (int64_t first = 0; first < rows; first += SLAB) {
            const int64_t count = std::min(SLAB, rows - first);
            member.share(size, W::UNIT, [&](int64_t begin, int64_t end) {
                gate(block.input_gate, from() + first * wide_hidden, count, begin, end, [&](int64_t begin, int64_t end, T* to, int64_t stride) {
                    for (int64_t r = 0; r < count; r++)
                        std::memcpy(to + r * stride, &given[(first + r) * all + index * size + begin], (end - begin) * sizeof(T));
                });
            });
            add(block.input_projection, block.input_norm, [this] { return gated.data(); }, first, count, member);
        }
    }

    void layer(int64_t index, Member& member) {
        const Block& block = at.blocks[index];
        project(block, member);
        if (block.mixer) {
            recur(block, at.memories[index], member);
        } else {
            place_heads(block, at.keys[index], at.values[index], member);
            if (!at.heads) return;
            attend(block, at.keys[index], at.values[index], member);
            const auto attended_rows = rows_for(member, queries(block), [&](int64_t r, float* to) { let_through(block, r, to); });
            add(block.output, block.after, attended_rows, 0, rows, member);
        }
        if (block.mixture) mix(block, member);
        if (block.down.outputs) {
            auto from = normed_rows(member, block.mlp_norm);
            for (int64_t first = 0; first < rows; first += SLAB) {
                const int64_t count = std::min(SLAB, rows - first);
                member.share(block.gate.outputs, W::UNIT, [&](int64_t begin, int64_t end) { gate(block, from() + first * wide_hidden, count, begin, end); });
                const auto gates = [this] { return gated.data(); };
                if (block.mixture) compute(block.down, gates, count, &projected[first * at.hidden], member);
                else add(block.down, block.mlp_after, gates, first, count, member);
            }
        }
        if (block.mixture) member.share(rows, [&](int64_t r) { add_mixed(block, r); });
        if (at.inputs) let_in(block, index, member);
        if (block.tap || block.scale != 1)
            member.share(rows, [&](int64_t r) {
                T* row = &stream[r * at.hidden];
                if (block.scale != 1) for_vectors(at.hidden, [&](int64_t i, int here) { put(rounded(wide(row + i, here) * splat(block.scale), T()), row + i, here); });
                if (block.tap) hand_over(row, r, block.tap);
            });
    }

    void hand_over(const T* numbers, int64_t r, int64_t column) {
        std::memcpy((T*)at.out + r * at.width + column, numbers, at.hidden * sizeof(T));
    }

    int64_t stages() const {
        const int64_t slabs = (rows + SLAB - 1) / SLAB, inputs = at.inputs ? 1 + 3 * slabs : 0;
        return 5 + at.layers * (12 + Work::STAGES + Experts<T, W>::STAGES + 3 * slabs + inputs);
    }

    void room_for_experts(const Mixture& here) {
        experts = std::make_unique<Experts<T, W>>(here, rows, at.threads);
        read.resize(rows * at.hidden + LANES), mixed.resize(rows * at.hidden + LANES), scores.resize(rows * (here.experts + 1) + LANES);
        routed.resize(rows * Plain<T>::room(at.hidden)), chosen.resize(rows * here.top), found.resize(at.layers), shares.resize(rows * here.top);
    }

  public:
    explicit Run(const Pass& pass) : at(pass) {
        int64_t widest = at.hidden, most = at.blocks[0].token_norm ? 2 * at.hidden : at.hidden;  // most: numbers that are read
        int64_t most_queries = 0, inner = 0;
        for (const Block* block = at.blocks; block != at.blocks + at.layers; block++) {
            widest = std::max(widest, width(*block)), most = std::max(most, block->output.in);
            inner = std::max({inner, W::room(block->gate.outputs), W::room(block->input_gate.outputs)});
            if (block->mixture && !experts) room_for_experts(*block->mixture);
            if (!block->mixer) {
                most_queries = std::max(most_queries, queries(*block));
                works.try_emplace({block->kv_heads, block->dim}, attention_of(*block), int(at.threads));
                continue;
            }
            const int64_t values = rows * block->mixer->heads * block->mixer->values;
            grow(asked, rows * block->mixer->key_heads * block->mixer->keys + LANES), grow(recurred, values + LANES);
            if (block->mixer->kind == MAMBA) grow(skipped, values + LANES);
        }
        stream.resize(rows * at.hidden + LANES), projected.resize(rows * widest + LANES);
        if (rows > FEW) x.resize(W::rows(rows) * W::room(most));
        if (at.inputs) given.resize(rows * at.inputs->projection.outputs + LANES);
        gated.resize(W::rows(std::min(rows, SLAB)) * inner);
        query.resize(rows * most_queries), attended.resize(rows * most_queries);
        const int64_t known = at.inputs ? std::min(at.embeddings.outputs, at.inputs->embeddings.outputs) : at.embeddings.outputs;
        std::vector<int64_t> depth;
        for (int64_t b = 0; b < at.batch; b++) {
            const int64_t first = at.firsts[b], count = at.firsts[b + 1] - first;
            depth.resize(count);
            depths(at.parents + first, count, depth.data());
            for (int64_t n = at.computed; n < count; n++) {
                const int64_t token = at.tokens[positions.size()];
                if (token < 0 || token >= known) throw std::out_of_range("token");
                const int64_t skipped = at.skipped ? at.skipped[b] : 0;
                positions.push_back(std::min(at.lengths[b] + skipped + depth[n], at.context - 1));
                places.push_back(at.table.place(b, at.lengths[b] + n));
                above.push_back(n ? at.parents[first + n] : -1);
            }
        }
    }

    void operator()() {
        Team(int(at.threads), stages()).run([&](Member& member) {
            const typename W::Thread equipped;
            Buffer<T> room;
            member.share(rows, [&](int64_t r) {
                const T* row = at.states ? (const T*)at.states + r * at.hidden : embedding(r, room);
                std::memcpy(&stream[r * at.hidden], row, at.hidden * sizeof(T));
            });
            if (at.inputs) find_inputs(*at.inputs, member);
            for (int64_t i = 0; i < at.layers; i++) layer(i, member);
            member.share(rows, [&](int64_t r) {
                const T* row = &stream[r * at.hidden];
                if (at.norm) normed(row, at.norm, at.hidden, (T*)at.out + r * at.width);
                else hand_over(row, r, 0);
            });
        });
    }
};
