// Measures how fast this machine reads memory. This limits the speed of a decode step.
#pragma once

#include <cstdint>

namespace kvarn {

double read_bandwidth(int64_t bytes, int threads);  // GB/s, the best of a few passes

}  // namespace kvarn
