// Who prefetches the cells that decode reads: attention itself, the products before it, both or nobody. Which is the
// fastest depends on the processor (docs/kernels.md, "Trials"). So it is tried while steps are computed.
// Attention over codes always prefetches them; only products are tried there.
#pragma once

#include <cstdint>
#include <limits>

#include "fastest.hpp"

namespace kvarn {

constexpr int64_t kManyRows = 9;  // from this many rows on, products are bound by arithmetic, not by memory

struct Prefetch {
    bool attention, products;
};

class PrefetchTrials {
  public:
    // For a step; `decodes`: that is all it does, so that its time can be compared.
    Prefetch next(bool codes, bool decodes, int64_t tokens, int64_t keys) {
        static constexpr Prefetch few[] = {{true, false}, {false, false}};
        static constexpr Prefetch many[] = {{true, false}, {false, true}, {true, true}};
        const bool products = tokens >= kManyRows;
        Fastest* fastest = codes ? products ? &codes_ : nullptr : products ? &many_ : &few_;
        tried_ = decodes ? fastest : nullptr;
        const size_t variant = tried_ ? tried_->next(tokens, keys) : fastest ? fastest->usual() : 0;
        return products ? many[variant] : few[variant];
    }
    bool trying() const { return tried_ && tried_->trying(); }
    void took(int64_t ns) {
        if (tried_) tried_->took(ns);
    }

  private:
    static constexpr int64_t kPause = 8, kAnyTime = std::numeric_limits<int64_t>::max();
    Fastest few_{2, kPause, kAnyTime}, many_{3, kPause, kAnyTime}, codes_{2, kPause, kAnyTime};
    Fastest* tried_ = nullptr;  // with this step
};

}  // namespace kvarn
