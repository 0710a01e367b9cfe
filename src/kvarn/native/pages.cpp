#include "pages.hpp"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

#include "base.hpp"

namespace kvarn {

namespace {

std::shared_ptr<uint8_t> map(int64_t bytes) {
    const size_t n = size_t(up(bytes, kLargePage) + kLargePage);  // extra bytes to align
    void* p = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    uint8_t* aligned = static_cast<uint8_t*>(p) + (-reinterpret_cast<uintptr_t>(p) & uintptr_t(kLargePage - 1));
#if defined(MADV_HUGEPAGE)
    madvise(aligned, n - size_t(kLargePage), MADV_HUGEPAGE);
#endif
    return {aligned, [p, n](uint8_t*) { munmap(p, n); }};
}

}  // namespace

#if defined(__SANITIZE_ADDRESS__)

// Every allocation is separate, so AddressSanitizer sees an access outside it. Large ones are not
// cleared by hand: that would touch all of their memory.
std::shared_ptr<uint8_t> pages(int64_t bytes) {
    if (bytes > (int64_t(1) << 30)) return map(bytes);
    void* p = nullptr;
    if (posix_memalign(&p, 64, size_t(bytes ? bytes : 1)) != 0) throw std::bad_alloc();
    memset(p, 0, size_t(bytes));
    return {static_cast<uint8_t*>(p), [](uint8_t* x) { free(x); }};
}

#else

std::shared_ptr<uint8_t> pages(int64_t bytes) {
    if (bytes >= kAlone) return map(bytes);
    static std::mutex mutex;
    static std::weak_ptr<uint8_t> current;  // lives as long as one of its allocations
    static int64_t used = 0;
    const std::lock_guard<std::mutex> lock(mutex);
    std::shared_ptr<uint8_t> whole = current.lock();
    if (!whole || used + bytes > kShared) {
        current = whole = map(kShared);
        used = 0;
    }
    std::shared_ptr<uint8_t> part(whole, whole.get() + used);
    used += up(bytes, 64);
    return part;
}

#endif

}  // namespace kvarn
