#include "fastest.hpp"

#include <algorithm>
#include <bit>

namespace kvarn {

namespace {

constexpr int kFewThreads = 4;
constexpr int64_t kKeysOfSize = 256;

int64_t median(std::vector<int64_t>& times) {
    const auto middle = times.begin() + int64_t(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    return *middle;
}

}  // namespace

size_t Fastest::next(int64_t tokens, int64_t keys) {
    const std::pair key{std::bit_width(uint64_t(tokens)), std::bit_width(uint64_t(keys / kKeysOfSize))};
    size_ = &sizes_.try_emplace(key, Size{.usual = usual_, .pause = pause_, .left = pause_}).first->second;
    return trying() && size_->part == kDuring ? size_->other : size_->usual;
}

void Fastest::took(int64_t ns) {
    if (variants_ == 1 || ns > longest_) return;
    Size& size = *size_;
    if (size.left > 0) {
        if (--size.left == 0) begin(size);
        return;
    }
    if (std::exchange(size.fresh, false)) return;
    std::vector<int64_t>& times = size.times[size_t(size.part)];
    times.push_back(ns);
    if (times.size() < kTried) return;
    size.fresh = true;
    if (++size.part == kParts) end(size);
}

void Fastest::begin(Size& size) const {
    for (std::vector<int64_t>& times : size.times) times.clear();
    size.part = kBefore, size.fresh = false;
    if (size.usual == 0) size.up = true;
    if (size.usual + 1 == variants_) size.up = false;
    size.other = size.up ? size.usual + 1 : size.usual - 1;
}

void Fastest::end(Size& size) {
    const int64_t usual = std::min(median(size.times[kBefore]), median(size.times[kAfter]));
    if (double(median(size.times[kDuring])) < kClearly * double(usual)) {
        size.usual = usual_ = size.other, size.pause = pause_;
    } else {
        size.up = !size.up, size.pause = std::min(2 * size.pause, kLongestPause);
    }
    size.left = size.pause;
}

std::vector<int> thread_counts(int most) {
    std::vector<int> counts{most};
    for (const int eighths : {6, 4, 3, 2})
        if (const int fewer = most * eighths / 8; most >= kFewThreads && fewer > 1 && fewer < counts.back())
            counts.push_back(fewer);
    return counts;
}

}  // namespace kvarn
