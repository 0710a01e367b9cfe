// The Python bindings for programs. Arguments are checked only here. Errors name shape and dtype.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "base.hpp"
#include "bind.hpp"

using namespace kvarn;

namespace {

using OptionalVector = std::optional<nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>>;

Vector padded(const OptionalVector& x) {
    if (!x) return nullptr;
    auto v = std::make_shared<std::vector<float>>(size_t(up(int64_t(x->shape(0)), kBlock)), 0.0f);
    std::copy(x->data(), x->data() + x->shape(0), v->begin());
    return v;
}

using Counts = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

Counts run(Program& p, Cache& c, In token_ids, In token_positions, In wanted_rows, Out result) {
    const Array<const int64_t, 1> tokens(token_ids, "run: tokens"), rows(wanted_rows, "run: rows");
    const Array<const int32_t, 1> positions(token_positions, "run: positions");
    const Array<float, 2> logits(result, "run: logits");
    ensure(p.loaded(), "run: the program has weights without numbers; it is only for sizes");
    const int64_t n = tokens.shape(0), wanted = rows.shape(0);
    ensure(positions.shape(0) == n, "run: one position per token is needed");
    for (int64_t i = 0; i < n; ++i)
        if (tokens.data()[i] < 0 || tokens.data()[i] >= p.vocabulary())
            ensure(false, "run: token " + std::to_string(tokens.data()[i]) + " lies outside the vocabulary of " +
                              std::to_string(p.vocabulary()));
    for (int64_t i = 0; i < wanted; ++i)
        if (rows.data()[i] < 0 || rows.data()[i] >= n)
            ensure(false, "run: row " + std::to_string(rows.data()[i]) + " lies outside the step of " +
                              std::to_string(n) + " tokens");
    ensure(logits.shape(0) == wanted && logits.shape(1) == up(p.vocabulary(), kGroup),
           "run: logits are [rows, vocabulary rounded up to 16], not " + describe(result));
    check_step(p, c.view, positions.data(), n);
    const Unlocked unlocked;
    const Counted k = p.run(c.view, tokens.data(), positions.data(), n, rows.data(), wanted, logits.data());
    return {k.written, k.read, k.prefill, k.decode, k.prefill_ns, k.decode_ns};
}

void hidden(const Program& p, Out result) {
    const Array<float, 2> out(result, "hidden: out");
    const Activations& x = p.hidden();
    ensure(out.shape(0) == x.rows && out.shape(1) == x.cols, "hidden: the last step's are [" + std::to_string(x.rows) +
                                                                 ", " + std::to_string(x.cols) + "], out is " +
                                                                 describe(result));
    for (int64_t r = 0; r < x.rows; ++r) std::copy_n(x.f32 + r * x.stride, x.cols, out.data() + r * x.cols);
}

// -- operations

void add(Program& p, Op op, std::initializer_list<int> buffers) {
    for (const int b : buffers) ensure(b >= 0 && b < p.n_buffers(), "an operation names a buffer that does not exist");
    const auto* last = p.ops().empty() ? nullptr : p.ops().back().as<LinearOp>();
    ensure(!last || !last->logits, "an operation follows the logits");
    p.add_op(std::move(op));
}

// A product reads the rows that the last norm or gate made, and writes as many.
void check_product(const Program& p, const LinearOp& op, bool wanted_rows_only) {
    const Op* input = nullptr;
    for (const Op& before : p.ops())
        if (before.makes()) input = &before;
    ensure(input, "linear: no operation before it made rows for it");
    ensure(input->wanted_rows_only == wanted_rows_only,
           "linear: it has other rows than \"" + input->name + "\", which makes its input");
    ensure(!op.logits || (wanted_rows_only && op.segments.size() == 1),
           "linear: logits are one matrix, with the wanted rows");
    const int64_t width = p.width(input->makes()->out);
    for (const Segment& s : op.segments) {
        ensure(s.weight.cols == width, "linear: a matrix of " + std::to_string(s.weight.cols) +
                                           " columns reads rows of " + std::to_string(width));
        ensure(
            op.logits || (s.out >= 0 && s.out < p.n_buffers() && p.width(s.out) == s.weight.rows),
            "linear: the output of a matrix of " + std::to_string(s.weight.rows) + " rows is no buffer of that width");
    }
}

void embed(Program& p, const std::string& name, const PackedMatrix& matrix, int out, float scale) {
    add(p, {name, false, EmbedOp{matrix, out, scale}}, {out});
}

void norm_round(Program& p, const std::string& name, bool wanted_rows_only, int in, int out, OptionalVector weight,
                float eps, bool needs_int8, bool needs_bf16) {
    const LinearInput made{out, needs_int8, needs_bf16};
    add(p, {name, wanted_rows_only, NormRoundOp{made, in, padded(weight), eps}}, {in, out});
}

void gated(Program& p, const std::string& name, bool wanted_rows_only, int gate, int up, int out, Gate kind,
           bool needs_int8, bool needs_bf16) {
    const LinearInput made{out, needs_int8, needs_bf16};
    add(p, {name, wanted_rows_only, GatedOp{made, gate, up, kind}}, {gate, up, out});
}

void norm_add(Program& p, const std::string& name, bool wanted_rows_only, int in, int out, OptionalVector weight,
              float eps) {
    add(p, {name, wanted_rows_only, NormAddOp{in, out, padded(weight), eps}}, {in, out});
}

void add_rows(Program& p, const std::string& name, bool wanted_rows_only, int in, int out) {
    add(p, {name, wanted_rows_only, AddOp{in, out}}, {in, out});
}

void select_rows(Program& p, const std::string& name, int in, int out) {
    add(p, {name, true, SelectOp{in, out}}, {in, out});
}

using SegmentTuple = std::tuple<PackedMatrix, OptionalVector, int, bool>;

void linear(Program& p, const std::string& name, bool wanted_rows_only, bool logits,
            const std::vector<SegmentTuple>& segments) {
    LinearOp op{{}, logits};
    for (const auto& [weight, bias, out, sum] : segments) op.segments.push_back({weight, padded(bias), out, sum});
    check_product(p, op, wanted_rows_only);
    add(p, {name, wanted_rows_only, std::move(op)}, {});
}

void attention(Program& p, const std::string& name, int layer, int q, int k, int v, int out, float scale, int rope,
               std::tuple<int, int, int> shape, OptionalVector q_norm, OptionalVector k_norm, OptionalVector centre,
               float eps) {
    const auto [heads, kv_heads, head_dim] = shape;
    ensure(!centre || int64_t(centre->shape(0)) == int64_t(kv_heads) * head_dim,
           "attention: the centre has one number per KV head and dimension");
    const AttentionOp op{
        layer,          q,  k, v, out, scale, rope, heads, kv_heads, head_dim, padded(q_norm), padded(k_norm),
        padded(centre), eps};
    add(p, {name, false, op}, {q, k, v, out});
}

std::vector<std::tuple<std::string, int64_t, int64_t>> timings(Program& p) {
    std::vector<std::tuple<std::string, int64_t, int64_t>> out;
    for (const Timing& t : p.take_timings()) out.emplace_back(p.ops()[size_t(t.op)].name, t.begin, t.end);
    return out;
}

}  // namespace

namespace kvarn {

void bind_program(nb::module_& m) {
    nb::enum_<Gate>(m, "Gate").value("silu", Gate::Silu).value("gelu", Gate::Gelu);
    nb::class_<Program>(m, "Program")
        .def("__init__",
             [](Program* self, std::shared_ptr<Pool> pool) { new (self) Program(std::move(pool), kernels()); })
        .def("buffer", &Program::add_buffer)
        .def("rope", &Program::add_rope)
        .def("embed", &embed)
        .def("norm_round", &norm_round, nb::arg("name"), nb::arg("wanted_rows_only"), nb::arg("in_"), nb::arg("out"),
             nb::arg("weight").none(), nb::arg("eps"), nb::arg("needs_int8"), nb::arg("needs_bf16"))
        .def("gated", &gated)
        .def("norm_add", &norm_add)
        .def("add", &add_rows)
        .def("select", &select_rows)
        .def("linear", &linear)
        .def("attention", &attention, nb::arg("name"), nb::arg("layer"), nb::arg("q"), nb::arg("k"), nb::arg("v"),
             nb::arg("out"), nb::arg("scale"), nb::arg("rope"), nb::arg("shape"), nb::arg("q_norm").none(),
             nb::arg("k_norm").none(), nb::arg("centre").none(), nb::arg("eps"))
        .def("run", &run)
        .def("hidden", &hidden)
        .def("reserve", &Program::reserve)
        .def_prop_ro("vocabulary", &Program::vocabulary)
        .def_prop_ro("workspace", &Program::workspace_bytes)
        .def("workspace_for", &Program::workspace_for)
        .def("trace", &Program::trace)
        .def("timings", &timings);
}

}  // namespace kvarn
