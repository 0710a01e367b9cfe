#include "isa.hpp"

#include <atomic>

#if defined(KVARN_X86)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvarn {

extern const Cells cells_portable;
#if defined(KVARN_X86)
extern const Cells cells_avx2;
extern const Cells cells_avx512;

namespace {

uint64_t os_saved_state() {  // XCR0: the register states that the operating system saves and restores
    uint32_t a = 0, b = 0, c = 0, d = 0;
    __cpuid_count(1, 0, a, b, c, d);
    if (!(c & (1u << 27))) return 0;  // no OSXSAVE
    uint32_t lo = 0, hi = 0;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t(hi) << 32) | lo;
}

bool has_amx(unsigned bit) {  // CPUID 7.0 EDX; reported here, trusted only after a self-test
    uint32_t a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (d & (1u << bit)) && (os_saved_state() & (3ull << 17)) == (3ull << 17);
}

}  // namespace
#endif

std::vector<std::string> cpu_features() {
    std::vector<std::string> found;
#if defined(KVARN_X86)
    __builtin_cpu_init();
#define KVARN_FEATURE(name) \
    if (__builtin_cpu_supports(name)) found.emplace_back(name)
    KVARN_FEATURE("avx2");
    KVARN_FEATURE("fma");
    KVARN_FEATURE("avx512f");
    KVARN_FEATURE("avx512bw");
    KVARN_FEATURE("avx512vl");
    KVARN_FEATURE("avx512dq");
    KVARN_FEATURE("avx512vnni");
    KVARN_FEATURE("avx512bf16");
#undef KVARN_FEATURE
    if (has_amx(24)) found.emplace_back("amx-tile");
    if (has_amx(25)) found.emplace_back("amx-int8");
    if (has_amx(22)) found.emplace_back("amx-bf16");
#endif
    return found;
}

namespace {

std::vector<const Cells*> runnable() {  // best first
    std::vector<const Cells*> found;
#if defined(KVARN_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512) found.push_back(&cells_avx512);
    if (avx2) found.push_back(&cells_avx2);
#endif
    found.push_back(&cells_portable);
    return found;
}

std::atomic<const Cells*>& active() {
    static std::atomic<const Cells*> chosen{runnable().front()};
    return chosen;
}

}  // namespace

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Cells* c : runnable()) names.emplace_back(c->name);
    return names;
}

const Cells& cells() { return *active().load(std::memory_order_relaxed); }

bool select(const std::string& name) {
    for (const Cells* c : runnable()) {
        if (name == c->name) {
            active().store(c, std::memory_order_relaxed);
            return true;
        }
    }
    return false;
}

}  // namespace kvarn
