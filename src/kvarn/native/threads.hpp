// A pool of threads that runs one job at a time; the caller is thread 0. Workers spin for a moment
// and then sleep. So an idle pool costs nothing. Other load on the machine slows a pool down but
// never blocks it. Pools are independent of each other.
//
// Threads are not bound to processors. But the scheduler of the system can leave two threads of a
// pool on one processor, where they wait for each other, long after another processor became free.
// So each thread stores on which processor it runs. A waiting thread moves to another processor if
// another thread of its pool works on this one (Linux only; its affinity mask stays the same).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace kvarn {

class Pool {
  public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int size() const { return size_; }

    // Calls fn(context, thread) once on every thread; returns when all calls have returned.
    void run(void (*fn)(void* context, int thread), void* context);
    template <typename Fn>
    void run(Fn&& fn) {
        run([](void* context, int thread) { (*static_cast<Fn*>(context))(thread); }, &fn);
    }

    void barrier(int thread);  // inside run: waits until every thread is here

  private:
    struct alignas(64) Signal {  // a counter that threads wait on
        std::atomic<uint32_t> value{0};
        std::atomic<uint32_t> sleepers{0};
        void raise();
        bool soon(uint32_t old) const;  // spins about a microsecond; true if it changed
        void wait(uint32_t old, int64_t spin_ns);
    };
    struct alignas(64) Place {
        std::atomic<int> processor{-1};  // where it last ran; workers set -1 after a job
        int64_t moved = 0;               // time of its last move, ns
    };
    void work(int thread);
    void note_place(int thread);
    void leave_shared_place(int thread);

    const int size_;
    const int process_;  // its threads do not exist in a forked one
    std::mutex mutex_;   // one job at a time
    Signal job_, phase_;
    alignas(64) std::atomic<int> arrived_{0};
    std::unique_ptr<Place[]> places_;  // per thread
    void (*fn_)(void*, int) = nullptr;
    void* context_ = nullptr;
    bool stop_ = false;
    std::vector<std::thread> workers_;
};

// Shares items 0..n-1 among threads. Each takes from its own range first, then from the others'.
class Shares {
  public:
    explicit Shares(int threads) : next_(new Next[size_t(threads)]), threads_(threads) {}
    void reset(int64_t n) {
        n_ = n;
        for (int i = 0; i < threads_; ++i) next_[size_t(i)].value.store(0, std::memory_order_relaxed);
    }
    bool take(int thread, int64_t grain, int64_t& begin, int64_t& end);

  private:
    struct alignas(64) Next {
        std::atomic<int64_t> value{0};
    };
    std::unique_ptr<Next[]> next_;
    int threads_;
    int64_t n_ = 0;
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
