// Threads where there is no OpenMP (clang, see build.py). They sleep between calls, after a while of waiting for the next.
#pragma once
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

class Threads {
    static constexpr std::chrono::microseconds AWAKE{500};
    std::mutex calls, state;
    std::condition_variable begun;
    std::atomic<uint64_t> round{0};  // of calls
    std::atomic<int> open{0};        // how many threads may still join the call
    std::atomic<int> inside{0};
    std::function<void(int)> work;
    int workers = 0;

    // Waits for a call after `seen`, then takes part in it where a place is left.
    void serve() {
        for (uint64_t seen = 0;;) {
            const auto until = std::chrono::steady_clock::now() + AWAKE;
            while (round.load() == seen && std::chrono::steady_clock::now() < until) std::this_thread::yield();
            if (round.load() == seen) {
                std::unique_lock lock(state);
                begun.wait(lock, [&] { return round.load() != seen; });
            }
            seen = round.load();
            inside.fetch_add(1);
            const int place = open.fetch_sub(1);
            if (place > 0) work(place);
            inside.fetch_sub(1);
        }
    }

  public:
    // Those of this process; a child of it has none yet. They are never ended.
    static Threads& here() {
        static std::atomic<Threads*> threads{new Threads};
        static const int registered = pthread_atfork(nullptr, nullptr, [] { threads = new Threads; });
        return (void)registered, *threads;
    }

    // Calls use(0) here, and use(1) to use(threads - 1) on whoever is free at once.
    template <class Use> void run(int threads, Use use) {
        std::unique_lock call(calls, std::try_to_lock);
        if (threads < 2 || !call) return use(0);  // somebody else has them
        for (; workers < threads - 1; workers++) std::thread(&Threads::serve, this).detach();
        work = use;
        {
            std::lock_guard lock(state);
            open = threads - 1;
            round++;
        }
        begun.notify_all();
        use(0);
        open = 0;
        while (inside.load()) std::this_thread::yield();
    }
};
