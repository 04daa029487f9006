// Where keys and values of sequences stand.
#pragma once
#include <algorithm>
#include <cstdint>

// Positions of a sequence stand in blocks: position p at place p % size of its block p / size.
struct Table {
    const int64_t* blocks;  // [sequences, stride] the blocks of each sequence in order
    int64_t stride, size;   // size: positions of a block
    int64_t place(int64_t s, int64_t position) const { return blocks[s * stride + position / size] * size + position % size; }
    // Calls use(first position, count) for each run of positions from .. to - 1 whose places follow each other.
    template <class Use> void runs(int64_t from, int64_t to, Use use) const {
        for (int64_t end; from < to; from = end) {
            end = std::min(to, (from / size + 1) * size);
            use(from, int(end - from));
        }
    }
};
