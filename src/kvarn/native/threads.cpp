#include "threads.hpp"

#include <unistd.h>

#include <algorithm>
#include <iterator>
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

constexpr int64_t kPhaseSpin = 40'000;      // ns; longer than threads usually wait at the end of a phase
constexpr int64_t kRecallSpin = 2'000'000;  // ns; to wake a thread takes some 50 us
constexpr int64_t kIdleSpin = 500'000;      // ns; longer than Python takes between two steps
constexpr int64_t kStay = 1'000'000;        // ns between two moves of a thread; a move costs about 30 us

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

}  // namespace

void Signal::wake() {
    if (sleepers.load() > 0) value.notify_all();
}

bool Signal::soon(uint32_t old) const {
    for (int i = 0; i < 64; ++i) {
        if (value.load(std::memory_order_acquire) != old) return true;
        pause();
    }
    return false;
}

void Signal::wait(uint32_t old, int64_t spin_ns) {
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
    for (int i = 1; i < size_; ++i) places_[size_t(i)].job.raise();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::work(int thread) {
    Signal& job = places_[size_t(thread)].job;
    for (uint32_t seen = 0;; ++seen) {
        if (!job.soon(seen)) job.wait(seen, kIdleSpin);
        if (stop_) return;
        note_place(thread);
        fn_(context_, thread);
        places_[size_t(thread)].processor.store(-1, std::memory_order_relaxed);
        if (working_.fetch_sub(1) == 1) finished_.raise();
    }
}

void Pool::run(void (*fn)(void*, int), void* context, int threads) {
    if (getpid() != process_)  // a forked process has only the thread that forked: the job would never end
        throw std::runtime_error("the threads of this pool belong to another process: fork before the model is loaded");
    const std::lock_guard<std::mutex> lock(mutex_);
    fn_ = fn, context_ = context;
    const uint32_t before = finished_.value.load();
    working_.store(threads - 1);
    for (int i = 1; i < threads; ++i) places_[size_t(i)].job.raise();
    note_place(0);
    fn(context, 0);
    if (threads > 1) wait(finished_, before, kPhaseSpin, 0);
}

void Pool::wait(Signal& signal, uint32_t old, int64_t spin_ns, int thread) {
    if (signal.soon(old)) return;
    note_place(thread);
    leave_shared_place(thread);
    signal.wait(old, spin_ns);
}

Phases::Phases(Pool& pool, size_t n) : pool_(pool), n_(n), limit_(pool.size()), done_(new Done[n]) {
    for (size_t i = 0; i < n; ++i) phases_.push_back({Shares(pool.size())});
}

void Phases::reset(size_t phase, int64_t items) {
    Phase& p = phases_[phase];
    p.shares.reset(items, int(std::clamp<int64_t>(items, 1, limit_)));
    p.target += items;
}

int Phases::begin() {
    int most = 1;
    size_t next = n_;
    for (size_t i = n_; i-- > 0;) {
        phases_[i].next = next;
        if (phases_[i].shares.n() == 0) continue;
        next = i;
        most = std::max(most, phases_[i].shares.threads());
    }
    reached_.value.store(uint32_t(next));
    return most;
}

size_t Phases::finish(size_t phase, int thread, int64_t computed) {
    const Phase& p = phases_[phase];
    if (computed > 0 && done_[phase].items.fetch_add(computed) + computed == p.target) {
        reached_.set(uint32_t(p.next));
        if (p.next < n_ && threads(p.next) > threads(phase)) recall_.raise();
    }
    while (reached_.value.load(std::memory_order_acquire) == phase)
        pool_.wait(reached_, uint32_t(phase), kPhaseSpin, thread);
    return arrive(thread);
}

// The phase that is being computed, as soon as it is one with a part for this thread.
size_t Phases::arrive(int thread) {
    for (;;) {
        const uint32_t recalled = recall_.value.load();
        const size_t at = reached_.value.load(), part = next_part(at, thread);
        if (part == at || part == n_) return part;
        pool_.wait(recall_, recalled, kRecallSpin, thread);
    }
}

size_t Phases::next_part(size_t phase, int thread) const {
    while (phase < n_ && threads(phase) <= thread) phase = phases_[phase].next;
    return phase;
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
    const uint64_t round = uint64_t(round_) << 32;
    if (thread >= threads_) return false;
    for (int64_t i = 0; i < threads; ++i) {
        const int64_t owner = (thread + i) % threads, low = n_ * owner / threads, high = n_ * (owner + 1) / threads;
        std::atomic<uint64_t>& next = next_[size_t(owner)].value;
        uint64_t seen = next.load(std::memory_order_relaxed);
        for (;;) {
            const int64_t taken = (seen & ~0xffffffffull) == round ? int64_t(seen & 0xffffffffull) : 0;
            begin = low + taken;
            if (begin >= high) break;
            if (!next.compare_exchange_weak(seen, round | uint64_t(taken + grain), std::memory_order_relaxed)) continue;
            end = std::min(begin + grain, high);
            return true;
        }
    }
    return false;
}

}  // namespace kvarn
