// Threads of a parallel region that meet by themselves. OpenMP's barrier lets them sleep at once in a process with more
// OpenMP threads than processors (one that loads a model on one thread and runs it on another is such a process, as a
// server is), and a pass has hundreds of barriers.
#pragma once
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

constexpr int SPINS = 4000;  // looks at a flag before others may have the processor: a fraction of a millisecond

class Team {
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint32_t> round{0};
    alignas(64) std::atomic<int64_t> taken{0};

    static void rest() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

  public:
    // Waits until all of them are here; what each has written is seen by all.
    void meet(int threads) {
        const uint32_t now = round.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
            arrived.store(0, std::memory_order_relaxed), taken.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round.load(std::memory_order_acquire) == now; spins++) spins < SPINS ? rest() : (void)sched_yield();
    }

    // Calls use(0 .. count - 1) on whoever is free, so many in a row, and meets.
    template <class Use> void divide(int64_t count, int64_t in_a_row, int threads, Use use) {
        for (int64_t first; (first = taken.fetch_add(in_a_row, std::memory_order_relaxed)) < count;)
            for (int64_t item = first; item < std::min(count, first + in_a_row); item++) use(item);
        meet(threads);
    }
};
