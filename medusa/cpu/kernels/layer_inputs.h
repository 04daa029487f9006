// Per-layer embeddings: numbers that a token has for each layer, besides its embedding (Gemma 4), in a pass (pass.h).
// Numbers are rounded to T where transformers rounds them.
#pragma once
#include "linear.h"

struct LayerInputs {
    Linear embeddings, projection;   // a token's numbers, layer by layer, maybe of more layers; as many of its embedding
    const void* norm;                // weight [size]
    int64_t size;                    // numbers of a layer
    float multiplier, scale, share;  // factors on embeddings, on what is projected, and on the sum of both

    // Brings what is projected to the numbers of a token: norm(row) norms those of a layer.
    template <class T, class Norm> void complete(int64_t token, T* projected, Norm norm) const {
        thread_local Buffer<T> room;
        const T* own = row_of(embeddings, token, room, multiplier);
        for (T* row = projected; row < projected + projection.outputs; row += size, own += size) {
            for_vectors(size, [&](int64_t i, int here) { put(rounded(wide(row + i, here) * splat(scale), T()), row + i, here); });
            norm(row);
            for_vectors(size, [&](int64_t i, int here) {
                put(rounded(rounded(wide(row + i, here) + wide(own + i, here), T()) * splat(share), T()), row + i, here);
            });
        }
    }
};
