// SentencePiece-style BPE: merges neighbours by the score of the token that they form, and falls
// back to bytes.
// Contract: the result is that of llama.cpp for the 'llama' vocabulary type. Time is n log n in the
// length of the text. Non-goals: decoding, normalization, unigram models, Python types.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "markers.hpp"

namespace kvarn {

class Spm {
  public:
    // `tokens` spell a space as U+2581. `unknown` stands for bytes that no token spells; -1 drops
    // them.
    Spm(std::vector<std::string> tokens, const std::vector<float>& scores, std::vector<Marker> markers,
        bool space_prefix, int32_t unknown);
    Spm(const Spm&) = delete;  // ids_ points into tokens_

    std::vector<int32_t> encode(std::string_view text, bool special) const;

  private:
    int32_t find(std::string_view text) const;
    void merge(const std::string& text, std::vector<int32_t>& out) const;

    std::vector<std::string> tokens_;
    std::vector<float> scores_;
    std::unordered_map<std::string_view, int32_t> ids_;
    std::array<int32_t, 256> byte_ids_;
    Markers markers_;
    size_t longest_ = 0;
    bool space_prefix_;
};

}  // namespace kvarn
