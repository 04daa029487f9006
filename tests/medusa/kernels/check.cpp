// The kernels without Python, for processors that only an emulator has and for sanitizers: numbers against sums in double
// precision, and rows that must not depend on what stands beside them. Prints the flavour, then "ok".
#include <array>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>

#include "kernels.cpp"

#define REQUIRE(condition)                                                       \
    do {                                                                         \
        if (!(condition)) std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition), std::exit(1); \
    } while (0)

template <class T> constexpr NumberType TYPE = sizeof(T) == 4 ? FLOAT32 : std::is_same_v<T, f16> ? FLOAT16 : BFLOAT16;

template <class T> static float nearest(float x) { T y; narrow(x, &y); return widen(y); }
template <class T> constexpr double PRECISE = std::is_same_v<T, f16> ? 0.001 : 0.01;  // numbers of 16 bits are rounded

static std::mt19937 generator(7);
static float noise() { return std::normal_distribution<float>()(generator); }
template <class T> static std::vector<T> numbers(int64_t count) {
    std::vector<T> out(count);
    for (T& x : out) narrow(noise(), &x);
    return out;
}

// Outputs of some rows, and whether they are those that the rows have among all.
template <class T> static std::vector<T> outputs_of(const Linear& layer, const std::vector<T>& x, int threads, int64_t first, int64_t rows) {
    std::vector<T> out(rows * layer.outputs);
    REQUIRE(medusa_linear(TYPE<T>, threads, &layer, rows, x.data() + first * layer.in, out.data()) == DONE);
    return out;
}
template <class T> static void check_some(const Linear& layer, const std::vector<T>& x, const std::vector<T>& all, std::initializer_list<int64_t> counts) {
    for (int64_t rows : counts)
        for (int threads : {1, 3}) {
            const auto some = outputs_of(layer, x, threads, 4, rows);
            REQUIRE(rows == 0 || !std::memcmp(some.data(), &all[4 * layer.outputs], some.size() * sizeof(T)));
        }
}

template <class T> static void check_linear(int64_t outputs, int64_t in) {
    const auto weight = numbers<T>(outputs * in), bias = numbers<T>(outputs), x = numbers<T>(70 * in);
    const Linear layer{weight.data(), bias.data(), outputs, in};
    const auto all = outputs_of(layer, x, 2, 0, 70);
    for (int64_t r = 0; r < 70; r++)
        for (int64_t n = 0; n < outputs; n++) {
            double sum = widen(bias[n]), size = 1;
            for (int64_t k = 0; k < in; k++) {
                const double product = double(widen(x[r * in + k])) * widen(weight[n * in + k]);
                sum += product, size += std::abs(product);
            }
            REQUIRE(std::abs(widen(all[r * outputs + n]) - sum) < (sizeof(T) == 2 ? PRECISE<T> * (std::abs(sum) + 1) : 1e-6 * size));
        }
    check_some(layer, x, all, {1, 2, 3, 5, 8, 9, 13, 25, 64});
}

// Packed weights: each number against its formula, and sums against those of the same numbers.
// In the other order they are the same numbers. Without a matrix unit no weight is rounded; where rows are whole numbers, sums
// are those of these.
static float in_bytes(const bf16* row, int64_t k, int bytes) {
    float largest = 0;
    for (int64_t i = k / RUN * RUN; i < k / RUN * RUN + RUN; i++) largest = std::max(largest, std::abs(widen(row[i])));
    const float scale = bytes == 1 ? largest / 127 : std::ldexp(1.f, (largest ? std::ilogb(largest) : 0) - 14), number = widen(row[k]);
    return bytes && largest ? std::min<float>(std::nearbyint(bytes == 1 ? number * (127 / largest) : number / scale), 127 * 257) * scale : number;
}
template <class Outputs>
static void check_lanes(const Linear& at, const std::vector<double>& weight, const std::vector<bf16>& x, int bytes, double share, double error, Outputs outputs_of) {
    const auto all = outputs_of(2, 0, 40);
    std::vector<double> rows(x.size());
    for (size_t i = 0; i < x.size(); i++) rows[i] = in_bytes(&x[i / at.in * at.in], i % at.in, bytes);
    for (int64_t r = 0; r < 40; r++)
        for (int64_t n = 0; n < at.outputs; n++) {
            double sum = widen(((const bf16*)at.bias)[n]), length = 1;
            for (int64_t k = 0; k < at.in; k++) sum += rows[r * at.in + k] * weight[n * at.in + k], length += std::abs(rows[r * at.in + k] * weight[n * at.in + k]);
            REQUIRE(std::abs(widen(all[r * at.outputs + n]) - sum) < share * std::abs(sum) + error * length);
        }
    for (int64_t count : {0, 1, 2, 3, 5, 7, 8, 9, 13, 17, 33})
        for (int threads : {1, 3}) {
            const auto some = outputs_of(threads, 4, count);
            REQUIRE(count == 0 || !std::memcmp(some.data(), &all[4 * at.outputs], some.size() * sizeof(bf16)));
        }
}
static void check_lanes(const Linear& packed, const std::vector<bf16>& weight, const std::vector<double>& exact, const std::vector<bf16>& x, int64_t size) {
    const int64_t outputs = packed.outputs, in = packed.in;
    std::vector<char> parts((const char*)packed.weight, (const char*)packed.weight + size), back = parts;
    Linear lanes = packed;
    REQUIRE(medusa_reorder(3, &packed, parts.data()) == DONE);
    lanes.weight = parts.data(), lanes.packing += IN_LANES;
    REQUIRE(medusa_reorder(1, &lanes, back.data()) == DONE && !std::memcmp(back.data(), packed.weight, size));
    Buffer<bf16> room;
    for (int64_t n = 0; n < outputs; n++) REQUIRE(!std::memcmp(row_of(lanes, n, room), &weight[n * in], in * sizeof(bf16)));
    std::vector<bf16> expanded(outputs * in);
    REQUIRE(medusa_expand(2, &lanes, expanded.data()) == DONE && expanded == weight);
    const auto ours = [&](const Linear& at) { return [&](int threads, int64_t first, int64_t rows) { return outputs_of(at, x, threads, first, rows); }; };
    if (std::strncmp(medusa_flavour(), "AMX", 3)) check_lanes(lanes, exact, x, FAST ? 2 : 0, 0.004, 2e-6, ours(lanes));
    Linear dots = lanes;
    dots.packing = packed.packing + ROUNDED_ROWS;
    check_lanes(dots, exact, x, 1, 0.004, 2e-6, ours(dots));
}
static inline float widen(e8m0 x) { return std::ldexp(1.f, x.exponent - 127); }
static inline void narrow(float x, e8m0* to) { to->exponent = uint8_t(122 + std::ilogb(x == 0 ? 1.f : x)); }
template <class F, int FACTORS, class C, int CODES, class N>
static void check_packing(Packing packing, int64_t outputs, int64_t in) {
    const int64_t in_block = packing >= SUPER_FOUR && in % (2 * RUN) == 0 ? 2 : 1;
    const int64_t panels = (outputs + PANEL - 1) / PANEL, blocks = in / RUN / in_block, head = FACTORS * PANEL * sizeof(F);
    const int64_t coded = CODES * PANEL * sizeof(C), size = head + in_block * (coded + sizeof(N));  // of a block
    std::vector<uint8_t> parts(panels * blocks * size);
    for (uint8_t& x : parts) x = uint8_t(generator());
    const auto bias = numbers<bf16>(outputs);
    auto x = numbers<bf16>(40 * in);
    std::fill(&parts[head + in_block * coded], &parts[size], std::is_same_v<N, Eight> ? 0x80 : 0xff);
    std::fill(&x[0], &x[RUN], 0x3f7f);  // the largest weights meet the largest whole numbers
    const Linear packed{parts.data(), bias.data(), outputs, in, packing, in_block};
    std::vector<bf16> weight(outputs * in);
    std::vector<double> exact(outputs * in);
    for (int64_t p = 0; p < panels; p++) {
        uint8_t* panel = &parts[p * blocks * size];
        for (int64_t b = 0; b < blocks; b++) {
            uint8_t *block = panel + b * size, *numbers = block + head + in_block * coded;
            for (int64_t i = 0; i < FACTORS * PANEL; i++) narrow(nearest<bf16>(noise() / 20), (F*)block + i);  // products are exact
            for (int64_t i = 0; packing == SUPER_EIGHT && i < in_block * PANEL * RUN; i++) (int8_t&)numbers[i] >>= 2;  // of 6 bits
        }
        for (int64_t r = 0; r < PANEL && p * PANEL + r < outputs; r++)
            for (int64_t k = 0; k < in; k++) {
                const int64_t run = k / RUN % in_block;
                const uint8_t* block = panel + k / RUN / in_block * size;
                const F* factors = (const F*)block;
                const C* codes = (const C*)(block + head + run * coded);
                const N& whole = ((const N*)(block + head + in_block * coded))[run];
                float first = widen(factors[r]), second = widen(factors[(FACTORS - 1) * PANEL + r]);
                if (CODES == 1) second = -first * codes[r];
                if (CODES == 2) first *= codes[r], second *= codes[PANEL + r] * (SIGNED<N> ? 1.f : -1.f);
                const float q = float(number_of(whole, r, k % RUN));
                const double number = SIGNED<N> ? double(k % RUN < RUN / 2 ? first : second) * q : double(first) * q + second;
                exact[(p * PANEL + r) * in + k] = number;
                narrow(float(number), &weight[(p * PANEL + r) * in + k]);
            }
    }
    const Linear plain{weight.data(), bias.data(), outputs, in};
    Buffer<bf16> room;
    for (int64_t n = 0; n < outputs; n++) REQUIRE(!std::memcmp(row_of(packed, n, room), &weight[n * in], in * sizeof(bf16)));
    for (int64_t rows : {0, 1, 2, 3, 5, 7, 8, 16, 40})
        for (int threads : {1, 3}) {
            if (std::strncmp(medusa_flavour(), "AMX", 3)) break;
            const auto ours = outputs_of(packed, x, threads, 0, rows), theirs = outputs_of(plain, x, threads, 0, rows);
            REQUIRE(rows == 0 || !std::memcmp(ours.data(), theirs.data(), ours.size() * sizeof(bf16)));
        }
    if constexpr (FAST) {  // beside packed weights
        std::vector<double> numbers(weight.size());
        for (size_t i = 0; i < weight.size(); i++) numbers[i] = widen(weight[i]);
        check_lanes(plain, numbers, x, 2, 0.004, 2e-6, [&](int threads, int64_t first, int64_t rows) {
            std::vector<bf16> out(rows * outputs);
            whole_linear<bf16, InBytes<bf16, 2>>(threads, plain, rows, x.data() + first * in, out.data());
            return out;
        });
    }
    check_lanes(packed, weight, exact, x, parts.size());
}
static void check_packed(int64_t outputs, int64_t in) {
    check_packing<f16, 2, uint8_t, 0, Four>(SIMPLE_FOUR, outputs, in), check_packing<f16, 2, uint8_t, 0, Five>(SIMPLE_FIVE, outputs, in);
    check_packing<f16, 1, int8_t, 0, Eight>(SIMPLE_EIGHT, outputs, in), check_packing<f16, 2, uint8_t, 2, Four>(SUPER_FOUR, outputs, in);
    check_packing<f16, 2, uint8_t, 2, Five>(SUPER_FIVE, outputs, in), check_packing<f16, 1, int8_t, 2, Eight>(SUPER_EIGHT, outputs, in);
    check_packing<float, 1, uint8_t, 1, Four>(GROUP_FOUR, outputs, in), check_packing<float, 1, int8_t, 0, Eight>(GROUP_EIGHT, outputs, in);
    check_packing<e8m0, 1, uint8_t, 0, E2M1>(MX_FOUR, outputs, in);
}

// A tree's rows, and each node once more as the end of a chain of its ancestors.
template <class T> static void check_attention(int64_t groups, int64_t dim, int64_t length) {
    const int64_t kv = 2, heads = kv * groups, nodes = 9, room = length + nodes;
    std::vector<int64_t> parents = {0, 0, 0, 1, 3, 2, 4, 4, 0};
    const auto query = numbers<T>(nodes * heads * dim);
    auto key = numbers<T>(room * kv * dim), value = numbers<T>(room * kv * dim);
    const auto run = [&](const std::vector<int64_t>& parents, const T* query, const T* key, const T* value, int threads) {
        const int64_t count = parents.size(), firsts[] = {0, count}, size = 16;
        std::vector<int64_t> blocks(room / size + 1);
        std::iota(blocks.begin(), blocks.end(), 0);
        const Layer layer{1, heads, kv, dim, dim, &length, parents.data(), firsts, 0, 0, {blocks.data(), 0, size}, 0, 0, heads * dim, dim, nullptr, 0.1f, 0.f};
        std::vector<T> out(count * heads * dim);
        REQUIRE(medusa_attention(TYPE<T>, threads, &layer, query, key, value, out.data()) == DONE);
        return out;
    };
    const int64_t row = heads * dim, step = kv * dim;
    const auto all = run(parents, query.data(), key.data(), value.data(), 2);
    for (int64_t n = 0; n < nodes; n++) {
        std::vector<int64_t> path = {n}, chain;
        while (path[0]) path.insert(path.begin(), parents[path[0]]);
        auto keys = key, values = value;
        std::vector<T> queries;
        for (size_t i = 0; i < path.size(); i++) {
            chain.push_back(i ? i - 1 : 0);
            std::copy_n(&key[(length + path[i]) * step], step, &keys[(length + i) * step]);
            std::copy_n(&value[(length + path[i]) * step], step, &values[(length + i) * step]);
            queries.insert(queries.end(), &query[path[i] * row], &query[path[i] * row] + row);
        }
        const auto alone = run(chain, queries.data(), keys.data(), values.data(), 1 + n % 3);
        REQUIRE(!std::memcmp(&alone[(path.size() - 1) * row], &all[n * row], row * sizeof(T)));
    }
    const std::vector<int64_t> line = {0, 0, 1, 2, 3, 4, 5, 6, 7};
    const auto prompt = run(line, query.data(), key.data(), value.data(), 2);
    for (int64_t i = 0; i < step; i++) narrow(INFINITY, &value[(length + 8) * step + i]), narrow(INFINITY, &key[(length + 8) * step + i]);
    const auto beside = run(parents, query.data(), key.data(), value.data(), 2);
    REQUIRE(!std::memcmp(beside.data(), all.data(), 8 * row * sizeof(T)));  // the last node is nobody's ancestor
    const auto beginning = run(line, query.data(), key.data(), value.data(), 2);
    REQUIRE(!std::memcmp(beginning.data(), prompt.data(), 8 * row * sizeof(T)));
}

// Rows of a mixture, against sums in double precision, and each once more by itself.
template <class T> static void check_experts(int64_t experts, int64_t top, int64_t hidden, int64_t inner) {
    const int64_t rows = 21;
    const auto gate_up = numbers<T>(experts * 2 * inner * hidden), down = numbers<T>(experts * hidden * inner), x = numbers<T>(rows * hidden);
    const auto scores = numbers<T>(rows * experts);
    const std::vector<float> bias = numbers<float>(experts);
    Mixture mixture{};
    mixture.gate_up = {gate_up.data(), nullptr, experts * 2 * inner, hidden}, mixture.down = {down.data(), nullptr, experts * hidden, inner};
    mixture.experts = experts, mixture.top = top, mixture.scale = 1.5f, mixture.normalized = experts % 2;
    mixture.sigmoid = top % 2, mixture.bias = top % 2 ? bias.data() : nullptr;
    std::vector<int64_t> chosen(rows * top);
    std::vector<float> shares(rows * top);
    for (int64_t r = 0; r < rows; r++) choose(mixture, &scores[r * experts], &chosen[r * top], &shares[r * top]);
    const auto run = [&](int64_t first, int64_t count, int threads) {
        std::vector<T> out(count * hidden);
        const Visits at{TYPE<T>, threads, count, mixture, &x[first * hidden], &chosen[first * top], &shares[first * top], out.data()};
        REQUIRE(medusa_experts(&at) == DONE);
        return out;
    };
    const auto all = run(0, rows, 2);
    for (int64_t r = 0; r < rows; r++) {
        const auto alone = run(r, 1, 1 + r % 3);
        REQUIRE(!std::memcmp(alone.data(), &all[r * hidden], hidden * sizeof(T)));
        std::vector<double> sums(hidden), sizes(hidden, 1);
        double sum = 0;
        for (int64_t k = r * top; k < (r + 1) * top; k++) {
            for (int64_t other = r * top; other < k; other++) REQUIRE(chosen[other] != chosen[k]);
            sum += shares[k];
            for (int64_t i = 0; i < inner; i++) {
                double both[2] = {};
                for (int64_t up = 0; up < 2; up++)
                    for (int64_t j = 0; j < hidden; j++)
                        both[up] += double(widen(x[r * hidden + j])) * widen(gate_up[((chosen[k] * 2 + up) * inner + i) * hidden + j]);
                const double gated = both[0] / (1 + std::exp(-both[0])) * both[1];
                for (int64_t j = 0; j < hidden; j++) {
                    const double product = shares[k] * gated * widen(down[(chosen[k] * hidden + j) * inner + i]);
                    sums[j] += product, sizes[j] += std::abs(product);
                }
            }
        }
        REQUIRE(!mixture.normalized || std::abs(sum - mixture.scale) < 0.02);
        for (int64_t j = 0; j < hidden; j++) REQUIRE(std::abs(widen(all[r * hidden + j]) - sums[j]) < (sizeof(T) == 2 ? 3 * PRECISE<T> : 1e-5) * sizes[j]);
    }
    chosen[0] = experts;
    std::vector<T> out(hidden);
    const Visits outside{TYPE<T>, 1, 1, mixture, x.data(), chosen.data(), shares.data(), out.data()};
    REQUIRE(medusa_experts(&outside) == NO_SUCH_TOKEN);
}

static void check_functions() {
    for (double x = -87; x <= 0; x += 0.0137) REQUIRE(std::abs(exponential(float(x)) - std::exp(double(float(x)))) <= 3e-7 * std::exp(x));
    for (double x = 1e-30; x < 1e30; x *= 1.37) REQUIRE(std::abs(logarithm(splat(float(x)))[0] - std::log(double(float(x)))) <= 3e-7 * (1 + std::abs(std::log(x))));
}

// Every number of float16, and what lies halfway to the next one or just beside.
static void check_float16() {
    const auto bits_of = [](float x) { f16 y; narrow(x, &y); return y.bits; };
    for (uint32_t i = 0; i < 0x7c00; i++) {
        const double number = std::ldexp(i < 0x400 ? i : 0x400 + i % 0x400, std::max<int>(i / 0x400, 1) - 25);
        const double next = std::ldexp(i < 0x400 ? i + 1 : 0x401 + i % 0x400, std::max<int>(i / 0x400, 1) - 25);
        const float x = float(number), middle = float((number + next) / 2);
        const uint16_t even = uint16_t(i + i % 2);
        for (uint16_t sign : {0, 0x8000}) {
            const float side = sign ? -1 : 1;
            REQUIRE(bits(widen(f16{uint16_t(i | sign)})) == bits(side * x));
            REQUIRE(bits_of(side * x) == (i | sign) && bits_of(side * middle) == (even | sign));
            REQUIRE(bits_of(side * std::nextafter(middle, 0.f)) == (i | sign));
            REQUIRE(bits_of(side * std::nextafter(middle, 1e9f)) == ((i + 1) | sign));
        }
    }
    for (float x : {65520.f, 1e30f, INFINITY}) REQUIRE(bits_of(x) == 0x7c00 && bits_of(-x) == 0xfc00);
    REQUIRE(widen(f16{0x7c00}) == INFINITY && widen(f16{0xfc00}) == -INFINITY);
    REQUIRE(std::isnan(widen(f16{0x7e01})) && std::isnan(widen(f16{bits_of(NAN)})));
}

// Trees of texts of few words, of one and without a repetition: parents come first and are worth more.
static void check_lookup() {
    constexpr int64_t N = 8, PLACES = 4, LONGEST = 6, SHARES = 5;
    for (uint32_t words : {1, 2, 1000})
        for (int64_t length : {1, 2, 3, 40}) {
            std::vector<int64_t> text(length), tokens(N), parents(N);
            for (int64_t& token : text) token = generator() % words;
            std::vector<double> right((LONGEST + 1) * (SHARES + 1), 3), tried(right.size(), 4);
            std::vector<float> scores(N);
            const int64_t position = length - 1, before = length / 2;
            const bool active = true;
            int64_t size, depth;
            const Looking at{1, length, N, false, PLACES, LONGEST, SHARES, -9, 1e-4, 0.9, text.data(), &position, &before, &active,
                             right.data(), tried.data(), tokens.data(), parents.data(), scores.data(), &size, &depth};
            REQUIRE(medusa_lookup(&at) == DONE);
            REQUIRE(tokens[0] == text[position] && size <= N && depth < N && (words > 1 || size == (length > 1 ? N : 1)));
            for (int64_t n = 1; n < size; n++) REQUIRE(parents[n] < n && scores[n] < scores[parents[n]]);
        }
}

// Losses against sums in double precision, and the same whatever threads compute them.
template <class T> static void check_losses(int64_t columns) {
    const int64_t rows = 6, taught_by[rows] = {1, 0, 2, 1, 0, 2};
    const auto logits = numbers<T>(rows * columns), teacher = numbers<T>(3 * columns);
    const auto shares = [&](const T* row) {
        std::vector<double> all(columns);
        double sum = 0;
        for (int64_t i = 0; i < columns; i++) sum += all[i] = std::exp(double(widen(row[i])));
        for (double& x : all) x /= sum;
        return all;
    };
    std::vector<int64_t> labels(rows);
    for (int64_t& label : labels) label = generator() % columns;
    for (int64_t kind = CROSS_ENTROPY; kind <= HYBRID; kind++) {
        const auto run = [&](int threads, std::vector<float>& loss) {
            std::vector<T> gradient = logits;
            std::vector<int64_t> correct(rows);
            const Losing at{TYPE<T>, threads, kind, rows, columns, 3, 1e-30f, gradient.data(), teacher.data(), taught_by, labels.data(), loss.data(), correct.data()};
            REQUIRE(medusa_losses(&at) == DONE);
            for (int64_t r = 0; r < rows; r++) {
                const T* row = &logits[r * columns];
                float most = widen(row[0]);
                for (int64_t i = 0; i < columns; i++) most = std::max(most, widen(row[i]));
                REQUIRE(correct[r] == (widen(row[labels[r]]) == most));
            }
            return gradient;
        };
        std::vector<float> loss(rows), again(rows);
        const auto gradient = run(1, loss);
        const auto threaded = run(3, again);
        REQUIRE(loss == again && !std::memcmp(gradient.data(), threaded.data(), gradient.size() * sizeof(T)));
        for (int64_t r = 0; r < rows; r++) {
            const auto q = shares(&logits[r * columns]), p = shares(&teacher[taught_by[r] * columns]);
            double divergence = 0, accepted = 0, slope = 0;
            for (int64_t i = 0; i < columns; i++)
                divergence += p[i] * std::log(p[i] / q[i]), accepted += std::min(p[i], q[i]), slope += q[i] < p[i] ? q[i] : 0;
            const double a = kind == DIVERGENCE ? 1 : kind == HYBRID ? std::exp(-3 * accepted) : 0;
            const double b = kind == LOG_ACCEPTANCE ? 1 / accepted : 1 - a;
            double expected = kind == LOG_ACCEPTANCE ? -std::log(accepted) : a * divergence + b * (1 - accepted);
            if (kind == CROSS_ENTROPY) expected = -std::log(q[labels[r]]);
            REQUIRE(std::abs(loss[r] - expected) < 2e-5 * (1 + std::abs(expected)));
            for (int64_t i = 0; i < columns; i++) {
                double slow = a * (q[i] - p[i]) + b * q[i] * (slope - (q[i] < p[i]));
                if (kind == CROSS_ENTROPY) slow = q[i] - (i == labels[r]);
                REQUIRE(std::abs(widen(gradient[r * columns + i]) - slow) < PRECISE<T> * std::abs(slow) + 2e-6);
            }
        }
    }
}

int main() {
    std::puts(medusa_flavour());
    check_lookup();
    check_functions(), check_float16();
    for (auto [outputs, in] : {std::pair{37, 100}, {96, 576}, {5, 33}, {1, 7}, {50, 1100}})
        check_linear<float>(outputs, in), check_linear<bf16>(outputs, in), check_linear<f16>(outputs, in);
    for (auto [outputs, in] : {std::pair{1, 32}, {37, 96}, {100, 576}})
        check_packed(outputs, in);
    for (auto [experts, top, hidden, inner] : {std::array<int64_t, 4>{1, 1, 7, 5}, {5, 2, 40, 33}, {19, 3, 96, 64}})
        check_experts<float>(experts, top, hidden, inner), check_experts<bf16>(experts, top, hidden, inner), check_experts<f16>(experts, top, hidden, inner);
    for (int64_t columns : {1, 7, 64, 5003}) check_losses<float>(columns), check_losses<bf16>(columns), check_losses<f16>(columns);
    for (int64_t groups : {1, 3})
        for (int64_t dim : {64, 40, 33})
            for (int64_t length : {0, 5, 28, 127, 300})
                check_attention<float>(groups, dim, length), check_attention<bf16>(groups, dim, length), check_attention<f16>(groups, dim, length);
    std::puts("ok");
}
