// What Python calls, see medusa/cpu/native.py. Functions answer how it went.
#include "draw.h"
#include "experts.h"
#include "grow.h"
#include "heads.h"
#include "lookup.h"
#include "loss.h"
#include "pass.h"
#include "recurrence.h"
#include "tree.h"

enum Outcome { DONE, NO_MEMORY, NO_SUCH_TOKEN };

template <class Use> static int outcome(Use use) {
    try {
        use();
        return DONE;
    } catch (const std::bad_alloc&) {
        return NO_MEMORY;
    } catch (const std::out_of_range&) {
        return NO_SUCH_TOKEN;
    }
}

// Calls run(a number, how it meets weights) as is fastest on this processor.
template <class Use> static void as_usual(int64_t number_type, Use run) {
#ifdef MEDUSA_TILES
    if (number_type == BFLOAT16 && has_tiles()) return run(bf16(), Tiles());
#endif
    with_number(number_type, [&](auto number) { run(number, Plain<decltype(number)>()); });
}
// The same for rows that meet weights as whole numbers of so many bytes, if not 0.
template <class Use> static void as_usual(int64_t number_type, int bytes, Use run) {
    if (bytes == 1) return with_number(number_type, [&](auto number) { run(number, InBytes<decltype(number), 1>()); });
    if constexpr (FAST)
        if (bytes == 2) return run(bf16(), InBytes<bf16, 2>());  // no other type has packed weights and rows of numbers
    as_usual(number_type, run);
}

// Attention of one layer: out [rows, heads, Dv].
extern "C" int medusa_attention(int number_type, int threads, const Layer* at, const void* query, const void* key, const void* value, void* out) {
    return outcome([&] {
        const Layer& layer = *at;
        Work work(layer, threads);
        Team(threads, Work::STAGES).run([&](Team::Member& member) {
            as_usual(number_type, [&](auto number, auto how) {
                using T = decltype(number);
                using W = decltype(how);
                const typename W::Thread equipped;
                Attention<T, W::MATRIX_UNIT>{layer, (const T*)query, (const T*)key, (const T*)value, (T*)out}.run(work, member);
            });
        });
    });
}

// What the kernels were built for.
extern "C" const char* medusa_flavour() {
#ifdef _OPENMP
#define THREADS ", OpenMP"
#else
#define THREADS ", own threads"
#endif
#ifdef MEDUSA_TILES
    if (has_tiles()) return "AMX" THREADS;
#endif
#if defined(__AVX512BF16__)
    return "AVX512-BF16" VNNI THREADS;
#elif defined(__AVX512F__)
    return "AVX-512" VNNI THREADS;
#elif defined(__AVX2__) && defined(__FMA__)
    return "AVX2" VNNI THREADS;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return "NEON with bfloat16" THREADS;
#elif defined(__ARM_NEON)
    return "NEON" THREADS;
#else
    return "no vector instructions that it knows" THREADS;
#endif
}

template <class T, class W>
static void whole_linear(int threads, const Linear& layer, int64_t rows, const T* x, T* out) {
    const int64_t in = layer.in, wide_in = W::room(in);
    Buffer<typename W::number> from(W::rows(rows) * wide_in);
    Team(threads, 2).run([&](Team::Member& member) {
        const typename W::Thread equipped;
        std::vector<float> row(in);
        member.share(rows, [&](int64_t r) {
            copied(x + r * in, in, row.data());
            W::arrange(row.data(), in, from.data(), wide_in, r, 0);
        });
        member.share(layer.outputs, W::OUTPUTS, [&](int64_t first, int64_t last) {
            W::linear(layer, from.data(), rows, out, layer.outputs, first, last);
        });
    });
}

// out [rows, outputs] of x [rows, in], all of one type but the weights, which may be rounded.
extern "C" int medusa_linear(int number_type, int threads, const Linear* layer, int64_t rows, const void* x, void* out) {
    return outcome([&] {
        as_usual(number_type, layer->bytes(), [&](auto number, auto how) {
            using T = decltype(number);
            whole_linear<T, decltype(how)>(threads, *layer, rows, (const T*)x, (T*)out);
        });
    });
}

// A packed weight with its numbers in the other order; `to` begins as a copy of it.
extern "C" int medusa_reorder(int threads, const Linear* weight, char* to) {
    return outcome([&] {
        Team(threads, 1).run([&](Team::Member& member) {
            member.share((weight->outputs + PANEL - 1) / PANEL, [&](int64_t p) {
                with_any(*weight, p, [&](const auto& panel) {
                    for (int64_t run = 0; run < (weight->in + RUN - 1) / RUN; run++) {
                        const auto& from = panel.numbers(run);
                        decltype(other_order(from)) numbers = {};
                        for (int64_t r = 0; r < PANEL; r++) reorder(from, r, numbers);
                        std::memcpy(to + ((const char*)&from - (const char*)weight->weight), &numbers, sizeof numbers);
                    }
                });
            });
        });
    });
}

// All numbers of a packed weight whose runs are whole: to [outputs, in].
extern "C" int medusa_expand(int threads, const Linear* weight, bf16* to) {
    return outcome([&] {
        Team(threads, 1).run([&](Team::Member& member) {
            member.share(weight->outputs, PANEL, [&](int64_t first, int64_t last) { expand(*weight, first, last, to + first * weight->in); });
        });
    });
}

extern "C" int medusa_pass(const Pass* pass) {
    return outcome([&] {
        as_usual(pass->number_type, pass->bytes(), [&](auto number, auto how) { Run<decltype(number), decltype(how)>{*pass}(); });
    });
}

extern "C" int medusa_experts(const Visits* at) {
    return outcome([&] {
        as_usual(at->number_type, at->mixture.bytes(), [&](auto number, auto how) { mix<decltype(number), decltype(how)>(*at); });
    });
}

extern "C" int medusa_keys(int64_t batch, int64_t each, const int64_t* seeds, const int64_t* positions, int64_t stream, int64_t* out) {
    return outcome([&] {
        for (int64_t i = 0; i < batch * each; i++) out[i] = key_of(seeds[i / each], positions[i], uint32_t(stream));
    });
}

extern "C" int medusa_gumbel(int64_t rows, const int64_t* keys, int64_t count, const int64_t* tokens, float* out) {
    return outcome([&] {
        for (int64_t r = 0; r < rows; r++) gumbel(uint32_t(keys[r]), tokens, count, out + r * count);
    });
}

extern "C" int medusa_accept(const Accepting* at) {
    return outcome([&] {
        for (int64_t b = 0; b < at->batch; b++) accept(*at, b);
    });
}

extern "C" int medusa_depths(int64_t batch, int64_t nodes, const int64_t* parents, int64_t* out) {
    return outcome([&] {
        for (int64_t b = 0; b < batch; b++) depths(parents + b * nodes, nodes, out + b * nodes);
    });
}

// Moves what so many buffers hold of accepted paths [batch, width] to where their sequences end, the first counts[b] nodes
// of each; a node stands where it belongs in the path or behind that.
extern "C" int medusa_keep(int64_t buffers, char* const* memory, const int64_t* bytes, int64_t batch, int64_t width, const int64_t* path,
                           const int64_t* counts, const int64_t* lengths, const int64_t* blocks, int64_t stride, int64_t size) {
    return outcome([&] {
        const Table table{blocks, stride, size};
        for (int64_t b = 0; b < batch; b++)
            for (int64_t i = 0; i < counts[b]; i++) {
                const int64_t node = path[b * width + i];
                if (node == i) continue;
                const int64_t from = table.place(b, lengths[b] + node), to = table.place(b, lengths[b] + i);
                for (int64_t n = 0; n < buffers; n++) std::memcpy(memory[n] + to * bytes[n], memory[n] + from * bytes[n], bytes[n]);
            }
    });
}

// The first column with the largest number of each row of x [rows, columns].
extern "C" int medusa_argmax(int number_type, int threads, int64_t rows, int64_t columns, const void* x, int64_t* out) {
    return outcome([&] {
        Team(int(std::clamp<int64_t>(rows, 1, threads)), 1).run([&](Team::Member& member) {
            member.share(rows, [&](int64_t r) {
                with_number(number_type, [&](auto number) { out[r] = largest((const decltype(number)*)x + r * columns, columns); });
            });
        });
    });
}

extern "C" int medusa_draw(const Drawing* at) {
    return outcome([&] {
        Team(int(std::clamp<int64_t>(at->rows, 1, at->threads)), 1).run([&](Team::Member& member) {
            Draw draw(*at);
            member.share(at->rows, [&](int64_t r) {
                const int64_t from = r * at->columns;
                const uint32_t key = uint32_t(at->keys[r]);
                with_number(at->number_type, [&](auto number) { at->out[r] = draw((const decltype(number)*)at->logits + from, key); });
            });
        });
    });
}

extern "C" int medusa_losses(const Losing* at) {
    return outcome([&] {
        Team(int(std::clamp<int64_t>(at->rows, 1, at->threads)), 1).run([&](Team::Member& member) {
            with_number(at->number_type, [&](auto number) {
                Losses<decltype(number)> losses(*at);
                member.share(at->rows, [&](int64_t r) { losses(r); });
            });
        });
    });
}

extern "C" int medusa_lookup(const Looking* at) {
    return outcome([&] { Lookup{*at}(); });
}

extern "C" int medusa_remember(Earlier* earlier, const int64_t* tokens, int64_t count) {
    return outcome([&] {
        for (int64_t i = 0; i < count; i++) earlier->add(tokens[i]);
    });
}

extern "C" int medusa_recur(const Recurring* at) {
    return outcome([&] {
        const int64_t pieces = Recurrence::pieces(*at);
        Team(int(std::clamp<int64_t>(pieces, 1, at->threads)), 1).run([&](Team::Member& member) {
            Recurrence recurrence(*at);
            member.share(pieces, [&](int64_t piece) { recurrence(piece); });
        });
    });
}

extern "C" int medusa_convolve(const Convolving* at) {
    return outcome([&] {
        Team(int(std::clamp<int64_t>(at->rows, 1, at->threads)), 1).run([&](Team::Member& member) {
            with_number(at->number_type, [&](auto number) {
                member.share(at->rows, [&](int64_t r) { convolve<decltype(number)>(*at, r); });
            });
        });
    });
}

constexpr int64_t FEW_DRAFTED = 4;  // rows of a level

extern "C" int medusa_draft(const Drafting* at) {
    return outcome([&] {
        if constexpr (FAST)
            if (at->bytes() == 2) return Draft<bf16, InBytes<bf16, 2>>{*at}();
        // Vectors get the weights of few rows from memory sooner than the matrix unit does. No text depends on a draft's bits.
        const bool few = at->batch * Trees(at->growth, at->batch).widest() <= FEW_DRAFTED;
        if (few && at->number_type == BFLOAT16 && at->output.packing == NUMBERS) return Draft<bf16, Plain<bf16>>{*at}();
        as_usual(at->number_type, [&](auto number, auto how) { Draft<decltype(number), decltype(how)>{*at}(); });
    });
}

// Hands over the nodes below which a level's logits are asked for.
static void show(const Growing& at, const Trees& trees, int64_t level) {
    for (int64_t b = 0; b < at.batch; b++)
        for (int64_t m = 0, each = trees.each[level]; m < each; m++)
            at.tokens[b * each + m] = trees.token_of(b, m), at.above[b * each + m] = trees.above(b, m);
}

// Trees of roots alone.
extern "C" int medusa_plant(const Growing* at, const int64_t* roots, const bool* active) {
    return outcome([&] {
        Trees trees(at->growth, at->batch);
        trees.stand(at->numbers, at->scores), trees.plant(roots, active);
    });
}

// One level more, from logits [batch, rows, columns]; rows: nodes of the level, or 1 where all have the same children. The
// best score of the level; at.tokens and at.above hold the next one.
extern "C" int medusa_grow(const Growing* at, int number_type, int64_t level, int64_t rows, const void* logits, float* highest) {
    return outcome([&] {
        Trees trees(at->growth, at->batch);
        trees.stand(at->numbers, at->scores);
        const int64_t width = at->growth.width, all = at->batch * rows, columns = at->columns;
        std::vector<int64_t> best(all * width);
        std::vector<float> logprobs(all * width);
        Team(int(std::clamp<int64_t>(all, 1, at->threads)), 1).run([&](Team::Member& member) {
            member.share(all, [&](int64_t r) {
                with_number(number_type, [&](auto number) {
                    const auto* from = (const decltype(number)*)logits + r * columns;
                    std::vector<float> row(columns + LANES);
                    for (int64_t i = 0; i < columns; i += LANES) put(wide(from + i, int(columns - i)), &row[i], int(columns - i));
                    trees.likeliest(row.data(), columns, &best[r * width], &logprobs[r * width]);
                });
            });
        });
        *highest = 2 * at->growth.lowest;
        for (int64_t b = 0; b < at->batch; b++) {
            const int64_t first = b * rows * width, step = rows == 1 ? 0 : width;
            *highest = std::max(*highest, trees.grow(b, level, &best[first], &logprobs[first], step, at->ids));
        }
        if (level + 1 < at->growth.levels) show(*at, trees, level + 1);
    });
}

// The drafts, after so many levels.
extern "C" int medusa_choose(const Growing* at, int64_t levels) {
    return outcome([&] {
        Trees trees(at->growth, at->batch);
        trees.stand(at->numbers, at->scores), trees.choose(levels, at->grown);
    });
}
