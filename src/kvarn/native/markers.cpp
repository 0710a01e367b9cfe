#include "markers.hpp"

#include <algorithm>

namespace kvarn {

namespace {

bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

void cut(std::string_view text, const Marker& marker, TextSpan span, std::vector<TextSpan>& out) {
    size_t begin = span.begin;
    while (begin < span.end) {
        const size_t found = text.substr(begin, span.end - begin).find(marker.text);
        if (found == std::string_view::npos) break;
        const size_t at = begin + found;
        if (found > 0) out.push_back({-1, begin, at});
        begin = at + marker.text.size();
        out.push_back({marker.id, at, begin});
        if (marker.strips_right)
            while (begin < span.end && is_space(text[begin])) ++begin;
    }
    if (begin < span.end) out.push_back({-1, begin, span.end});
}

}  // namespace

Markers::Markers(std::vector<Marker> markers) : markers_(std::move(markers)), trie_(1) {
    std::erase_if(markers_, [](const Marker& m) { return m.text.empty(); });
    std::stable_sort(markers_.begin(), markers_.end(),
                     [](const Marker& a, const Marker& b) { return a.text.size() > b.text.size(); });
    for (size_t i = 0; i < markers_.size(); ++i) {
        int32_t node = 0;
        for (const char c : markers_[i].text) {
            int32_t next = child(node, uint8_t(c));
            if (next < 0) {
                next = int32_t(trie_.size());
                trie_.emplace_back();
                trie_[size_t(node)].next.emplace_back(uint8_t(c), next);
            }
            node = next;
        }
        trie_[size_t(node)].marker = int32_t(i);
    }
}

int32_t Markers::child(int32_t node, uint8_t byte) const {
    for (const auto& [b, next] : trie_[size_t(node)].next)
        if (b == byte) return next;
    return -1;
}

// One pass over the text: the thousands of markers that do not occur in it cost nothing.
std::vector<int32_t> Markers::seen(std::string_view text) const {
    std::vector<bool> known(markers_.size());
    std::vector<int32_t> found;
    for (size_t begin = 0; begin < text.size(); ++begin) {
        int32_t node = 0;
        for (size_t i = begin; i < text.size() && (node = child(node, uint8_t(text[i]))) >= 0; ++i)
            if (const int32_t marker = trie_[size_t(node)].marker; marker >= 0 && !known[size_t(marker)]) {
                known[size_t(marker)] = true;
                found.push_back(marker);
            }
    }
    std::sort(found.begin(), found.end());
    return found;
}

std::vector<TextSpan> Markers::split(std::string_view text, bool special) const {
    std::vector<TextSpan> spans;
    if (text.empty()) return spans;
    spans.push_back({-1, 0, text.size()});
    std::vector<TextSpan> finer;
    for (const int32_t i : seen(text)) {
        const Marker& marker = markers_[size_t(i)];
        if (!special && !marker.always) continue;
        finer.clear();
        for (const TextSpan& span : spans) {
            if (span.id >= 0)
                finer.push_back(span);
            else
                cut(text, marker, span, finer);
        }
        spans.swap(finer);
    }
    return spans;
}

}  // namespace kvarn
