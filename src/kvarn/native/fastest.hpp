// Which of some variants of a step is the fastest: found by trials, while steps are computed.
//
// How many threads are best, and whether cells should be prefetched, depends on the processor and on who
// else uses the machine in this hour. It cannot be known from a step. So variants are tried: some steps
// with the usual one, some with another, and again some with the usual one. The other is the usual one
// from then on if it was clearly faster than both. As long as nothing changes, trials become rare. Steps
// of different sizes are tried apart. No variant changes a bit.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace kvarn {

class Fastest {
  public:
    // Variants are in an order: each is compared with the one before and the one after it, and the first
    // is the usual one to begin with. `pause`: steps before the first trial. Steps that take longer than
    // `longest` have no trials: what the variants differ in does not matter to them.
    Fastest(size_t variants, int64_t pause, int64_t longest) : variants_(variants), pause_(pause), longest_(longest) {}

    size_t next(int64_t tokens, int64_t keys);  // the variant of a step that computes tokens and reads keys
    void took(int64_t ns);                      // how long that step was; without this call it does not count
    bool trying() const { return size_ && size_->left == 0; }  // the step is a part of a trial
    size_t usual() const { return usual_; }                    // the variant that was chosen last

  private:
    static constexpr size_t kTried = 5;             // steps of each part of a trial
    static constexpr int64_t kLongestPause = 4096;  // steps between two trials
    static constexpr double kClearly = 0.97;
    enum Part { kBefore, kDuring, kAfter, kParts };

    struct Size {
        size_t usual, other = 0;
        int64_t pause, left;
        bool up = true;  // the direction of the next trial
        std::array<std::vector<int64_t>, kParts> times{};
        int part = kBefore;
        bool fresh = false;  // the variant changes with this step: it is not counted
    };
    void begin(Size& size) const;
    void end(Size& size);

    size_t variants_;
    int64_t pause_, longest_;
    std::map<std::pair<int, int>, Size> sizes_;
    Size* size_ = nullptr;  // of the current step
    size_t usual_ = 0;
};

// Numbers of threads to choose from, all of them first. A small pool has no choice.
std::vector<int> thread_counts(int most);

}  // namespace kvarn
