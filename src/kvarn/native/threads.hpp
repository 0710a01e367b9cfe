// A pool of threads that runs one job at a time; the caller is thread 0. Workers spin for a moment
// and then sleep. So an idle pool costs nothing. Other load on the machine slows a pool down but
// never blocks it. Pools are independent of each other.
//
// A job can have phases (class Phases). A phase is over when its items are computed, not when its
// threads have arrived: a thread that the system has stopped delays the others only if it holds an
// item. Each thread that can have an item takes part.
//
// Threads are not bound to processors. But the scheduler of the system can leave two threads of a
// pool on one processor, where they wait for each other, long after another processor became free.
// So each thread stores on which processor it runs. A waiting thread moves to another processor if
// another thread of its pool works on this one (Linux only; its affinity mask stays the same).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kvarn {

struct alignas(64) Signal {  // a number that threads wait on
    std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};

    void set(uint32_t now) { value.store(now), wake(); }
    void raise() { value.fetch_add(1), wake(); }  // from several threads: a value never comes back
    bool soon(uint32_t old) const;                // spins about a microsecond; true if it changed
    void wait(uint32_t old, int64_t spin_ns);
    void wake();
};

class Pool {
  public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return size_; }

    // Calls fn(context, thread) once on the first `threads` threads; returns when all calls have returned.
    void run(void (*fn)(void* context, int thread), void* context, int threads);
    template <typename Fn>
    void run(const Fn& fn, int threads) {
        const auto call = [](void* context, int thread) { (*static_cast<const Fn*>(context))(thread); };
        run(call, const_cast<Fn*>(&fn), threads);
    }
    template <typename Fn>
    void run(const Fn& fn) {
        run(fn, size_);
    }

    void wait(Signal& signal, uint32_t old, int64_t spin_ns, int thread);  // inside run

  private:
    struct alignas(64) Place {
        Signal job;                      // raised for each job that the thread has a part in
        std::atomic<int> processor{-1};  // where it last ran; workers set -1 after a job
        int64_t moved = 0;               // time of its last move, ns
    };
    void work(int thread);
    void note_place(int thread);
    void leave_shared_place(int thread);

    const int size_;
    const int process_;                // its threads do not exist in a forked one
    std::mutex mutex_;                 // one job at a time
    std::unique_ptr<Place[]> places_;  // per thread
    Signal finished_;                  // raised by the last worker of a job
    alignas(64) std::atomic<int> working_{0};
    void (*fn_)(void*, int) = nullptr;
    void* context_ = nullptr;
    bool stop_ = false;
    std::vector<std::thread> workers_;
};

// Shares items 0..n-1 among threads. Each takes from its own range first, then from the others'.
class Shares {
  public:
    explicit Shares(int threads) : next_(new Next[size_t(threads)]), threads_(threads) {}
    void reset(int64_t n) { reset(n, threads_); }
    void reset(int64_t n, int threads) { n_ = n, threads_ = threads, ++round_; }
    int64_t n() const { return n_; }
    int threads() const { return threads_; }
    bool take(int thread, int64_t grain, int64_t& begin, int64_t& end);

  private:
    struct alignas(64) Next {  // round << 32 | items that were taken; of an older round: none were
        std::atomic<uint64_t> value{0};
    };
    std::unique_ptr<Next[]> next_;
    int threads_;
    uint32_t round_ = 0;  // resets write no line that other threads read
    int64_t n_ = 0;
};

// The phases of a job, computed in order by threads that share the items of each.
//
//     phases.reset(i, items) for every phase; pool.run(..., phases.begin())
//     each thread:  for (size_t i = phases.first(thread); i < phases.size(); i = phases.finish(i, thread, done))
//                       while (phases.take(i, thread, ...)) done += items
//
// A thread goes on with the phase that is being computed, which is not always the next one: it skips
// phases that were finished without it, and those that have fewer threads. It returns to the caller
// after the last phase that has a part for it.
class Phases {
  public:
    Phases(Pool& pool, size_t n);

    size_t size() const { return n_; }
    void limit(int threads) { limit_ = threads; }  // of the phases that are reset after it
    void reset(size_t phase, int64_t items);       // at most one thread per item takes part
    int begin();                                   // the number of threads of the job
    int threads(size_t phase) const { return phases_[phase].shares.threads(); }
    int64_t items(size_t phase) const { return phases_[phase].shares.n(); }

    size_t first(int thread) { return arrive(thread); }
    bool take(size_t phase, int thread, int64_t grain, int64_t& begin, int64_t& end) {
        return phases_[phase].shares.take(thread, grain, begin, end);
    }
    size_t finish(size_t phase, int thread, int64_t computed);

  private:
    struct Phase {
        Shares shares;
        size_t next = 0;     // the next phase that has items
        int64_t target = 0;  // `done` when it is over: counters are never set back
    };
    struct alignas(64) Done {
        std::atomic<int64_t> items{0};
    };
    size_t arrive(int thread);
    size_t next_part(size_t phase, int thread) const;

    Pool& pool_;
    const size_t n_;
    int limit_;
    std::vector<Phase> phases_;
    std::unique_ptr<Done[]> done_;
    Signal reached_;  // the phase that is being computed
    Signal recall_;   // raised before a phase that has more threads than the one before
};

// Denormals are zero while kernels run, because AMX and VDPBF16PS treat them so. The destructor
// restores the caller's mode.
class FlushDenormals {
#if defined(__x86_64__)
    static constexpr unsigned kFlushToZero = 0x8000u, kDenormalsAreZero = 0x0040u;  // bits of MXCSR
    unsigned mode_ = _mm_getcsr();

  public:
    FlushDenormals() { _mm_setcsr(mode_ | kFlushToZero | kDenormalsAreZero); }
    ~FlushDenormals() { _mm_setcsr(mode_); }
#elif defined(__aarch64__)
    static constexpr uint64_t kFlushToZero = 1ull << 24;  // a bit of FPCR
    static uint64_t mode() {
        uint64_t fpcr;
        __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
        return fpcr;
    }
    static void set(uint64_t fpcr) { __asm__ volatile("msr fpcr, %0" : : "r"(fpcr)); }
    uint64_t mode_ = mode();

  public:
    FlushDenormals() { set(mode_ | kFlushToZero); }
    ~FlushDenormals() { set(mode_); }
#else
  public:
    FlushDenormals() {}
#endif
};

}  // namespace kvarn
