// Where keys and values of sequences stand.
#pragma once
#include <algorithm>
#include <cstdint>

// Where the cache rows of sequences stand: one after another, or in blocks.
struct Table {
    const int64_t* blocks;    // [batch, stride] the blocks of each sequence in order; null = its rows follow each other
    int64_t stride, rows;     // rows of a block
    int64_t row(int64_t b, int64_t position, int64_t capacity) const {
        return blocks ? blocks[b * stride + position / rows] * rows + position % rows : b * capacity + position;
    }
    // Calls use(first position, count) for each run of rows from .. to - 1 that follow each other.
    template <class Use> void runs(int64_t from, int64_t to, Use use) const {
        for (int64_t end; from < to; from = end) {
            end = blocks ? std::min(to, (from / rows + 1) * rows) : to;
            use(from, int(end - from));
        }
    }
};
