#include "threads.hpp"

#include <unistd.h>

#include <stdexcept>

#include "base.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

namespace kvarn {

namespace {

constexpr int64_t kBarrierSpin = 40'000;  // ns; longer than threads usually wait behind an operation
constexpr int64_t kIdleSpin = 500'000;    // ns; longer than Python takes between two steps
constexpr int64_t kStay = 1'000'000;      // ns between two moves of a thread; a move costs about 30 us

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

}  // namespace

void Pool::Signal::raise() {
    value.fetch_add(1);
    if (sleepers.load() > 0) value.notify_all();
}

bool Pool::Signal::soon(uint32_t old) const {
    for (int i = 0; i < 64; ++i) {
        if (value.load(std::memory_order_acquire) != old) return true;
        pause();
    }
    return false;
}

void Pool::Signal::wait(uint32_t old, int64_t spin_ns) {
    for (const int64_t until = now() + spin_ns; now() < until;)
        for (int i = 0; i < 32; ++i) {
            if (value.load(std::memory_order_acquire) != old) return;
            pause();
        }
    sleepers.fetch_add(1);
    while (value.load() == old) value.wait(old);
    sleepers.fetch_sub(1);
}

Pool::Pool(int threads) : size_(threads < 1 ? 1 : threads), process_(getpid()), places_(new Place[size_t(size_)]) {
    for (int i = 1; i < size_; ++i) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
    stop_ = true;
    job_.raise();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::work(int thread) {
    for (uint32_t seen = 0;;) {
        if (!job_.soon(seen)) job_.wait(seen, kIdleSpin);
        ++seen;
        if (stop_) return;
        note_place(thread);
        fn_(context_, thread);
        barrier(thread);
        places_[size_t(thread)].processor.store(-1, std::memory_order_relaxed);
    }
}

void Pool::run(void (*fn)(void*, int), void* context) {
    if (getpid() != process_)  // a forked process has only the thread that forked: the job would never end
        throw std::runtime_error("the threads of this pool belong to another process: fork before the model is loaded");
    const std::lock_guard<std::mutex> lock(mutex_);
    fn_ = fn, context_ = context;
    if (size_ > 1) job_.raise();
    note_place(0);
    fn(context, 0);
    barrier(0);
}

void Pool::barrier(int thread) {
    if (size_ == 1) return;
    note_place(thread);
    const uint32_t phase = phase_.value.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1) + 1 == size_) {
        arrived_.store(0);
        phase_.raise();
    } else if (!phase_.soon(phase)) {
        leave_shared_place(thread);
        phase_.wait(phase, kBarrierSpin);
    }
}

#if defined(__linux__)

void Pool::note_place(int thread) {
    places_[size_t(thread)].processor.store(sched_getcpu(), std::memory_order_relaxed);
}

void Pool::leave_shared_place(int thread) {
    Place& own = places_[size_t(thread)];
    const int here = own.processor.load(std::memory_order_relaxed);
    bool shared = false;
    for (int i = 0; i < size_; ++i)
        shared = shared || (i != thread && places_[size_t(i)].processor.load(std::memory_order_relaxed) == here);
    if (!shared || here < 0 || now() - own.moved < kStay) return;
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;  // the machine has more processors than the mask
    cpu_set_t others = allowed;
    for (int i = 0; i < size_; ++i) {
        const int taken = places_[size_t(i)].processor.load(std::memory_order_relaxed);
        if (taken >= 0) CPU_CLR(taken, &others);
    }
    if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof others, &others) != 0) return;
    sched_setaffinity(0, sizeof allowed, &allowed);
    own.moved = now();
    note_place(thread);
}

#else

void Pool::note_place(int) {}
void Pool::leave_shared_place(int) {}

#endif

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
