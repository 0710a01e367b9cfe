// The operations of a program: what each one reads, writes and needs. Buffers are named by their numbers.
// Non-goals: how they are computed (program.cpp, attention_op.cpp).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "pack.hpp"
#include "rows.hpp"

namespace kvarn {

using Vector = std::shared_ptr<std::vector<float>>;  // weight of a norm, or bias; padded with zeros

struct EmbedOp {
    PackedMatrix matrix;
    int out;
    float scale;
};

// What makes the rows that a linear reads.
struct LinearInput {
    int out;
    bool int8, bf16;  // the forms that the linear reads
    // Each thread may compute its own copy at the start of the linear, which is the only reader.
    bool per_thread = false;
};

struct NormRoundOp {
    LinearInput made;
    int in;
    Vector weight;  // null: rows are only rounded
    float eps;
};

struct GatedOp {
    LinearInput made;
    int gate, up;
    Gate kind;
};

struct NormAddOp {  // out += norm(in); `in` is overwritten
    int in, out;
    Vector weight;
    float eps;
};

struct AddOp {  // out += in
    int in, out;
};

struct SelectOp {  // out: the wanted rows of in
    int in, out;
};

struct Segment {  // a matrix of a linear
    PackedMatrix weight;
    Vector bias;
    int out;  // -1: the logits
    bool add;
};

struct LinearOp {
    std::vector<Segment> segments;
    bool logits;     // the only segment's output is what the program returns
    int input = -1;  // the operation that made its rows

    int64_t groups() const {
        int64_t n = 0;
        for (const Segment& s : segments) n += s.weight.groups;
        return n;
    }
};

struct AttentionOp {
    int layer, q, k, v, out;
    float scale;
    int rope;  // -1: none
    int heads, kv_heads, head_dim;
    Vector q_norm, k_norm;  // null: none
    Vector centre;          // of keys; null: none
    float eps;              // of the norms
};

struct Op {
    std::string name;
    bool wanted_rows_only;  // it runs over the rows that the caller wants, not over all tokens
    std::variant<EmbedOp, NormRoundOp, GatedOp, NormAddOp, AddOp, SelectOp, LinearOp, AttentionOp> what;

    template <typename T>
    const T* as() const {
        return std::get_if<T>(&what);
    }
    const LinearInput* makes() const {  // null: it makes no rows for a linear
        if (const auto* norm = as<NormRoundOp>()) return &norm->made;
        if (const auto* gated = as<GatedOp>()) return &gated->made;
        return nullptr;
    }
    LinearInput* makes() { return const_cast<LinearInput*>(std::as_const(*this).makes()); }
};

}  // namespace kvarn
