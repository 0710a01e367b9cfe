// Zeroed memory in large pages, if the system has them. With small pages, reading a 1 MB matrix
// loses a third of the bandwidth.
#pragma once

#include <cstdint>
#include <memory>

namespace kvarn {

// Aligned to 64 bytes. The system provides a page when it is first written. Small allocations share
// a mapping, which is freed with the last of them.
std::shared_ptr<uint8_t> pages(int64_t bytes);

}  // namespace kvarn
