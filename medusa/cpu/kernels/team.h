// Threads that go through the stages of a computation together.
//
// A stage consists of pieces, and ends when they are done: a thread that the system has put aside between two pieces
// holds nobody up. It finds later that nothing is left of the stages that it missed.
#pragma once
#include <algorithm>
#include <atomic>
#include <cassert>
#include <cstdint>
#include <new>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#endif

#ifndef _OPENMP
#include "threads.h"
#endif

constexpr int SPINS = 4000;  // looks at a counter before others may have the processor: a fraction of a millisecond
constexpr int PIECES = 4;    // of a thread's share of a layer

static inline void rest() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Calls use(thread) on up to so many threads at once, on 0 in any case.
template <class Use> static void on_threads(int threads, Use use) {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
    use(omp_get_thread_num());
#else
    Threads::here().run(threads, use);
#endif
}

class Team {
    struct alignas(64) Counter { std::atomic<int64_t> value{0}; };
    const int threads;
    std::atomic<bool> failed{false};
    std::vector<Counter> counters;  // of each stage: pieces that are done, then those that were taken of every thread's share

  public:
    Team(int threads, int64_t stages) : threads(threads), counters(stages * (threads + 1)) {}

    class Member {
        Team& team;
        size_t stage = 0;

      public:
        const int thread;
        Member(Team& team, int thread) : team(team), thread(thread) {}

        // Calls use(0 .. pieces - 1), each on one thread: its own share first, then what others have not begun. Returns
        // when all are done; what they have written is seen.
        template <class Use> void share(int64_t pieces, Use use) {
            const int64_t threads = team.threads;
            assert((stage + 1) * (threads + 1) <= team.counters.size() && "a team knows how many stages there are");
            Counter* at = &team.counters[stage++ * (threads + 1)];
            int64_t done = 0;
            for (int64_t i = 0; i < threads; i++) {
                const int64_t owner = (thread + i) % threads, first = pieces * owner / threads;
                const int64_t count = pieces * (owner + 1) / threads - first;
                std::atomic<int64_t>& taken = at[1 + owner].value;
                while (taken.load(std::memory_order_relaxed) < count) {
                    const int64_t piece = taken.fetch_add(1, std::memory_order_relaxed);
                    if (piece >= count) break;
                    try {
                        use(first + piece);
                    } catch (const std::bad_alloc&) {
                        team.failed = true;
                    }
                    done++;
                }
            }
            if (done) at->value.fetch_add(done, std::memory_order_release);
            for (int spins = 0; at->value.load(std::memory_order_acquire) < pieces; spins++) spins < SPINS ? rest() : (void)sched_yield();
        }

        // Calls use(first, last) for blocks of so many things; units are not divided.
        template <class Use> void share(int64_t things, int64_t unit, Use use) {
            const int64_t units = (things + unit - 1) / unit, pieces = std::min<int64_t>(units, int64_t(team.threads) * PIECES);
            share(pieces, [&](int64_t piece) {
                use(units * piece / pieces * unit, std::min(things, units * (piece + 1) / pieces * unit));
            });
        }
    };

    // Lets every thread go through the stages: work(its member). Throws std::bad_alloc where one had no memory for a piece.
    template <class Work> void run(Work work) {
        on_threads(threads, [&](int thread) {
            Member member(*this, thread);
            try {
                work(member);
            } catch (const std::bad_alloc&) {  // the others do its pieces
                failed = true;
            }
        });
        if (failed) throw std::bad_alloc();
    }
};
