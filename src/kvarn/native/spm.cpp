#include "spm.hpp"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <queue>
#include <stdexcept>

namespace kvarn {

namespace {

constexpr std::string_view kSpace = "\xe2\x96\x81";  // U+2581

// A span of text that is one token, or one character that no token spells. Size 0: merged into its
// left neighbour.
struct Symbol {
    int32_t prev, next;
    uint32_t begin, size;
};

struct Bigram {
    float score;
    int32_t left, right;
    uint32_t size;
    // The queue pops the greatest: the best score, and the leftmost of equal scores.
    bool operator<(const Bigram& other) const { return score != other.score ? score < other.score : left > other.left; }
};

size_t character_size(char lead) {
    const auto c = uint8_t(lead);
    return c < 0xC0 ? 1 : c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
}

std::vector<Symbol> characters(std::string_view text) {
    std::vector<Symbol> symbols;
    symbols.reserve(text.size());
    for (size_t begin = 0; begin < text.size();) {
        const size_t size = std::min(character_size(text[begin]), text.size() - begin);
        const auto i = int32_t(symbols.size());
        symbols.push_back({i - 1, i + 1, uint32_t(begin), uint32_t(size)});
        begin += size;
    }
    if (!symbols.empty()) symbols.back().next = -1;
    return symbols;
}

void append_escaped(std::string_view text, std::string& out) {
    for (const char c : text) {
        if (c == ' ')
            out += kSpace;
        else
            out += c;
    }
}

}  // namespace

Spm::Spm(std::vector<std::string> tokens, const std::vector<float>& scores, std::vector<Marker> markers,
         bool space_prefix, int32_t unknown)
    : tokens_(std::move(tokens)), scores_(scores), markers_(std::move(markers)), space_prefix_(space_prefix) {
    ids_.reserve(tokens_.size());
    for (size_t i = 0; i < tokens_.size(); ++i) {
        longest_ = std::max(longest_, tokens_[i].size());
        ids_[tokens_[i]] = int32_t(i);  // of equal tokens the last one, like llama.cpp
    }
    for (int byte = 0; byte < 256; ++byte) {
        std::array<char, 8> name{};
        std::snprintf(name.data(), name.size(), "<0x%02X>", byte);
        const char raw = char(byte);
        int32_t id = find(name.data());
        if (id < 0) id = find({&raw, 1});
        byte_ids_[size_t(byte)] = id >= 0 ? id : unknown;
    }
}

int32_t Spm::find(std::string_view text) const {
    if (text.size() > longest_) return -1;
    const auto found = ids_.find(text);
    return found == ids_.end() ? -1 : found->second;
}

void Spm::merge(const std::string& text, std::vector<int32_t>& out) const {
    std::vector<Symbol> symbols = characters(text);
    std::priority_queue<Bigram> queue;
    const auto consider = [&](int32_t left, int32_t right) {
        if (left < 0 || right < 0) return;
        const Symbol &l = symbols[size_t(left)], &r = symbols[size_t(right)];
        const int32_t id = find({text.data() + l.begin, size_t(l.size) + r.size});
        if (id >= 0) queue.push({scores_[size_t(id)], left, right, l.size + r.size});
    };
    for (size_t i = 1; i < symbols.size(); ++i) consider(int32_t(i) - 1, int32_t(i));
    while (!queue.empty()) {
        const Bigram best = queue.top();
        queue.pop();
        Symbol &left = symbols[size_t(best.left)], &right = symbols[size_t(best.right)];
        // Skip the pair if one half was merged with something else after it was queued.
        if (left.size == 0 || right.size == 0 || left.size + right.size != best.size) continue;
        left.size = best.size;
        right.size = 0;
        left.next = right.next;
        if (left.next >= 0) symbols[size_t(left.next)].prev = best.left;
        consider(left.prev, best.left);
        consider(best.left, left.next);
    }
    for (int32_t i = symbols.empty() ? -1 : 0; i >= 0; i = symbols[size_t(i)].next) {
        const std::string_view span{text.data() + symbols[size_t(i)].begin, symbols[size_t(i)].size};
        if (const int32_t id = find(span); id >= 0) {
            out.push_back(id);
            continue;
        }
        for (const char c : span)
            if (const int32_t id = byte_ids_[uint8_t(c)]; id >= 0) out.push_back(id);
    }
}

std::vector<int32_t> Spm::encode(std::string_view text, bool special) const {
    // Symbols have 32-bit offsets, and escaping triples the size of a text of spaces.
    if (text.size() > size_t(std::numeric_limits<int32_t>::max()) / 3 - 1)
        throw std::length_error("text too long to encode at once: the limit is 700 MB");
    std::vector<int32_t> out;
    bool prefix = space_prefix_;
    std::string escaped;
    for (const TextSpan& span : markers_.split(text, special)) {
        if (span.id >= 0) {
            out.push_back(span.id);
            prefix = space_prefix_;
            continue;
        }
        escaped.clear();
        if (prefix) escaped += kSpace;
        prefix = false;
        append_escaped(text.substr(span.begin, span.end - span.begin), escaped);
        merge(escaped, out);
    }
    return out;
}

}  // namespace kvarn
