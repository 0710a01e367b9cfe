#include "threads.hpp"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvarn {

namespace {

constexpr int64_t kBarrierSpin = 40'000;  // ns: longer than the imbalance of an operation
constexpr int64_t kIdleSpin = 500'000;    // ns: longer than what Python does between two steps

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

}  // namespace

void Pool::Signal::raise() {
    value.fetch_add(1);
    if (sleepers.load() > 0) value.notify_all();
}

void Pool::Signal::wait(uint32_t old, int64_t spin_ns) {
    for (int i = 0; i < 64; ++i) {
        if (value.load(std::memory_order_acquire) != old) return;
        pause();
    }
    for (const int64_t until = now() + spin_ns; now() < until;)
        for (int i = 0; i < 32; ++i) {
            if (value.load(std::memory_order_acquire) != old) return;
            pause();
        }
    sleepers.fetch_add(1);
    while (value.load() == old) value.wait(old);
    sleepers.fetch_sub(1);
}

Pool::Pool(int threads) : size_(threads < 1 ? 1 : threads) {
    for (int i = 1; i < size_; ++i) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
    stop_ = true;
    job_.raise();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::work(int thread) {
    for (uint32_t seen = 0;;) {
        job_.wait(seen, kIdleSpin);
        ++seen;
        if (stop_) return;
        fn_(context_, thread);
        barrier();
    }
}

void Pool::run(void (*fn)(void*, int), void* context) {
    const std::lock_guard<std::mutex> lock(mutex_);
    fn_ = fn, context_ = context;
    if (size_ > 1) job_.raise();
    fn(context, 0);
    barrier();
}

void Pool::barrier() {
    if (size_ == 1) return;
    const uint32_t phase = phase_.value.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1) + 1 == size_) {
        arrived_.store(0);
        phase_.raise();
    } else {
        phase_.wait(phase, kBarrierSpin);
    }
}

bool Shares::take(int thread, int64_t grain, int64_t& begin, int64_t& end) {
    const auto threads = int64_t(threads_);
    for (int64_t i = 0; i < threads; ++i) {
        const int64_t owner = (thread + i) % threads, low = n_ * owner / threads, high = n_ * (owner + 1) / threads;
        std::atomic<int64_t>& next = next_[size_t(owner)].value;
        if (low + next.load(std::memory_order_relaxed) >= high) continue;
        begin = low + next.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= high) continue;
        end = begin + grain < high ? begin + grain : high;
        return true;
    }
    return false;
}

}  // namespace kvarn
