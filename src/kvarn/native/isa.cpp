#include "isa.hpp"

#include <atomic>

#include "amx_probe.hpp"
#include "dots.hpp"
#include "linear.hpp"
#include "view.hpp"

#if defined(KVARN_X86)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvarn {

// What the kernels' sources define each time they are compiled. Index 0: Pairs, 1: Tiles.
#define KVARN_DECLARE(isa)                                                                 \
    namespace isa {                                                                        \
    extern const CellEncoders encoders;                                                    \
    extern const Linear linear[2];                                                         \
    extern const Rows rows;                                                                \
    extern const Attention attention[2];                                                   \
    extern const Dots products;                                                            \
    const Kernels kernels[2] = {{&encoders, &linear[0], &rows, &attention[0], &products},  \
                                {&encoders, &linear[1], &rows, &attention[1], &products}}; \
    }
KVARN_DECLARE(portable)
#if defined(KVARN_X86)
KVARN_DECLARE(avx2)
#if defined(KVARN_AVXVNNI)
KVARN_DECLARE(avxvnni)
#endif
KVARN_DECLARE(avx512)
KVARN_DECLARE(avx512bf16)
#if defined(KVARN_AMX)
KVARN_DECLARE(amx)
#endif

namespace {

uint64_t os_saved_state() {  // XCR0: the register states that the operating system saves and restores
    uint32_t a = 0, b = 0, c = 0, d = 0;
    __cpuid_count(1, 0, a, b, c, d);
    if (!(c & (1u << 27))) return 0;  // no OSXSAVE
    uint32_t lo = 0, hi = 0;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t(hi) << 32) | lo;
}

bool has_amx(unsigned bit) {  // a bit of CPUID 7.0 EDX; amx_works() tests whether it is true
    uint32_t a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (d & (1u << bit)) && (os_saved_state() & (3ull << 17)) == (3ull << 17);
}

bool has_avxvnni() {
    uint32_t a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4));
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
    if (has_avxvnni()) found.emplace_back("avxvnni");
    if (has_amx(24)) found.emplace_back("amx-tile");
    if (has_amx(25)) found.emplace_back("amx-int8");
    if (has_amx(22)) found.emplace_back("amx-bf16");
#endif
    return found;
}

namespace {

std::vector<const Kernels*> runnable() {  // best first
    std::vector<const Kernels*> found;
#if defined(KVARN_X86)
    __builtin_cpu_init();
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                            __builtin_cpu_supports("avx512vnni");
    const bool has_bf16 = has_avx512 && __builtin_cpu_supports("avx512bf16");
#if defined(KVARN_AMX)
    if (has_bf16 && has_amx(22) && has_amx(24) && has_amx(25) && amx_works()) found.push_back(amx::kernels);
#endif
    if (has_bf16) found.push_back(avx512bf16::kernels);
    if (has_avx512) found.push_back(avx512::kernels);
#if defined(KVARN_AVXVNNI)
    if (has_avx2 && has_avxvnni()) found.push_back(avxvnni::kernels);
#endif
    if (has_avx2) found.push_back(avx2::kernels);
#endif
    found.push_back(portable::kernels);
    return found;
}

struct Choice {
    std::vector<const Kernels*> found = runnable();  // computed once, because the AMX probe starts a process
    std::atomic<const Kernels*> isa{found.front()};
    std::atomic<int> sum_order{std::string(found.front()->encoders->name) == "amx" ? int(SumOrder::Tiles)
                                                                                   : int(SumOrder::Pairs)};
};

Choice& choice() {
    static Choice chosen;
    return chosen;
}

}  // namespace

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (const Kernels* k : choice().found) names.emplace_back(k->encoders->name);
    return names;
}

const Kernels& kernels() {
    const Choice& c = choice();
    return c.isa.load(std::memory_order_relaxed)[c.sum_order.load(std::memory_order_relaxed)];
}

bool select_isa(const std::string& name) {
    for (const Kernels* k : choice().found) {
        if (name == k->encoders->name) {
            choice().isa.store(k, std::memory_order_relaxed);
            return true;
        }
    }
    return false;
}

SumOrder sum_order() { return SumOrder(choice().sum_order.load(std::memory_order_relaxed)); }

void select_sum_order(SumOrder order) { choice().sum_order.store(int(order), std::memory_order_relaxed); }

}  // namespace kvarn
