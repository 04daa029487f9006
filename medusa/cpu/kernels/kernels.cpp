// What Python calls, see medusa/cpu/native.py.
#include "pass.h"

// shape: batch, heads, key heads, nodes, D, Dv, window, chunk (0 = none), then strides in numbers: parents [batch],
// query [batch, head, node], key and value [batch, head, row]. The output is [batch, node, head, Dv], contiguous.
extern "C" void medusa_attention(int half, int threads, const int64_t* shape, const int64_t* lengths, const int64_t* parents,
                                 const void* query, const void* key, const void* value, void* out, const float* sinks,
                                 float scaling, float softcap) {
    const int64_t* s = shape + 8;
    const Layer layer{shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], lengths, parents, s[0], s[1], s[2], s[3],
                      s[4], s[5], s[6], s[7], s[8], s[9], sinks, scaling, softcap, shape[6], shape[7]};
    Work work(layer, threads);
#pragma omp parallel num_threads(threads)
    if (half) Attention<bf16>{layer, (const bf16*)query, (const bf16*)key, (const bf16*)value, (bf16*)out}.run(work);
    else Attention<float>{layer, (const float*)query, (const float*)key, (const float*)value, (float*)out}.run(work);
}

// out [rows, outputs] of x [rows, in], all of one type.
extern "C" void medusa_linear(int half, int threads, const Linear* layer, int64_t rows, const void* x, void* out) {
    const auto run = [&](auto zero) {
        using T = decltype(zero);
        const int64_t in = layer->in, wide_in = arranged<T>(in);
        std::vector<number<T>> from(rows * wide_in);
#pragma omp parallel num_threads(threads)
        {
            const int thread = omp_get_thread_num(), count = omp_get_num_threads();
            const Share mine(rows, 1, thread, count), share(layer->outputs, OUTPUTS, thread, count);
            std::vector<float> row(in);
            for (int64_t r = mine.first; r < mine.last; r++) {
                for (int64_t i = 0; i < in; i++) row[i] = widen(((const T*)x)[r * in + i]);
                Row<T>::arrange(row.data(), in, &from[r * wide_in]);
            }
#pragma omp barrier
            linear<T>(*layer, from.data(), rows, (T*)out, layer->outputs, share.first, share.last);
        }
    };
    if (half) run(bf16());
    else run(float());
}

extern "C" void medusa_pass(const Pass* pass) {
    if (pass->half) Run<bf16>{*pass}();
    else Run<float>{*pass}();
}
