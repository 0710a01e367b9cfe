// Zeroed memory in large pages, where the system has them: a 1 MB matrix in small ones costs a third of the bandwidth.
#pragma once

#include <cstdint>
#include <memory>

namespace kvarn {

// Aligned to 64 bytes, backed when it is first written. Small pieces share a mapping, which goes with the last of them.
std::shared_ptr<uint8_t> pages(int64_t bytes);

}  // namespace kvarn
