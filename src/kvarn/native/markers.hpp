// Splits a text at tokens that are matched as a whole: control tokens, the unknown token,
// user-defined tokens.
// Contract: longer tokens are cut out of the whole text before shorter ones are searched. Each
// token is searched from left to right. This can differ from taking the longest match at every
// position. Models are trained with this rule. Non-goals: the text between the tokens; Python
// types.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvarn {

struct Marker {
    std::string text;
    int32_t id;
    bool always;        // matched even if the caller does not want control tokens
    bool strips_right;  // removes the white space that follows
};

struct TextSpan {
    int32_t id;  // -1: plain text
    size_t begin, end;
};

class Markers {
  public:
    explicit Markers(std::vector<Marker> markers);
    std::vector<TextSpan> split(std::string_view text, bool special) const;

  private:
    struct Node {
        std::vector<std::pair<uint8_t, int32_t>> next;
        int32_t marker = -1;
    };
    std::vector<int32_t> seen(std::string_view text) const;  // indices, longest marker first
    int32_t child(int32_t node, uint8_t byte) const;

    std::vector<Marker> markers_;  // longest first
    std::vector<Node> trie_;
};

}  // namespace kvarn
