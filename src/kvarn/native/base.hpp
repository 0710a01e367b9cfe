// Used by all other files: rounding up, the clock, a macro that turns a name into a string.
#pragma once

#include <chrono>
#include <cstdint>

#define KVARN_TEXT_(a) #a
#define KVARN_TEXT(a) KVARN_TEXT_(a)  // the value of a macro as text

namespace kvarn {

// Static, because kernels include this file too. The linker keeps one copy of an inline function,
// and could keep the one that was compiled for another instruction set.
static constexpr int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
static constexpr int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }  // the next multiple of `to`

static inline int64_t now() {  // ns, monotonic
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

}  // namespace kvarn
