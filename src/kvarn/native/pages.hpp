// Zeroed memory in large pages, if the system has them. With small pages, reading a 1 MB matrix
// loses a third of the bandwidth.
#pragma once

#include <cstdint>
#include <memory>

namespace kvarn {

constexpr int64_t kLargePage = 2 << 20;  // bytes
constexpr int64_t kShared = 64 << 20;    // bytes of a mapping that small allocations share
constexpr int64_t kAlone = kShared / 4;  // from so many bytes on, an allocation has its own mapping

// Aligned to 64 bytes. The system provides a page when it is first written. Small allocations share
// a mapping, which is freed with the last of them.
std::shared_ptr<uint8_t> pages(int64_t bytes);

}  // namespace kvarn
