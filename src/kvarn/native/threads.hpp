// A pool of threads that works on one job at a time; the caller is thread 0. Workers spin a little, then sleep, so an
// idle pool costs nothing and a busy machine makes it slower, never stuck. Pools are independent of each other.
//
// No thread is bound to a processor. But a system that shares two processors among three threads may leave two of ours
// on one of them, where each waits for the other, long after the other processor is free again. So threads note where
// they run, and one that waits where another works moves away (Linux only; its allowed processors stay what they were).
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

    // fn(context, thread) on every thread, once; returns when all have returned.
    void run(void (*fn)(void* context, int thread), void* context);
    template <typename Fn>
    void run(Fn&& fn) {
        run([](void* context, int thread) { (*static_cast<Fn*>(context))(thread); }, &fn);
    }

    void barrier(int thread);  // inside run: every thread waits for all the others

  private:
    struct alignas(64) Signal {  // a number that threads wait on
        std::atomic<uint32_t> value{0};
        std::atomic<uint32_t> sleepers{0};
        void raise();
        bool soon(uint32_t old) const;  // whether it changes within a microsecond or so
        void wait(uint32_t old, int64_t spin_ns);
    };
    struct alignas(64) Place {
        std::atomic<int> processor{-1};  // where the thread was last seen, during a job
        int64_t moved = 0;               // when it last moved, ns
    };
    void work(int thread);
    void note_place(int thread);
    void leave_shared_place(int thread);

    const int size_;
    std::mutex mutex_;  // one job at a time
    Signal job_, phase_;
    alignas(64) std::atomic<int> arrived_{0};
    std::unique_ptr<Place[]> places_;  // of each thread
    void (*fn_)(void*, int) = nullptr;
    void* context_ = nullptr;
    bool stop_ = false;
    std::vector<std::thread> workers_;
};

// Items 0..n-1 shared out among threads: each takes from its own range first, then from the others'.
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

// Denormals are zero while kernels run, as the matrix and dot-product units have it; the caller's mode comes back.
class FlushDenormals {
#if defined(__x86_64__)
    unsigned mode_ = _mm_getcsr();

  public:
    FlushDenormals() { _mm_setcsr(mode_ | 0x8040u); }
    ~FlushDenormals() { _mm_setcsr(mode_); }
#elif defined(__aarch64__)
    static uint64_t mode() {
        uint64_t fpcr;
        __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr));
        return fpcr;
    }
    static void set(uint64_t fpcr) { __asm__ volatile("msr fpcr, %0" : : "r"(fpcr)); }
    uint64_t mode_ = mode();

  public:
    FlushDenormals() { set(mode_ | (1ull << 24)); }
    ~FlushDenormals() { set(mode_); }
#else
  public:
    FlushDenormals() {}
#endif
};

}  // namespace kvarn
