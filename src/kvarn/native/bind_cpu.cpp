// The Python boundary of the CPU backend: arguments are checked here, once, with errors that name shape and dtype.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>

#include "bandwidth.hpp"
#include "pages.hpp"
#include "program.hpp"

namespace nb = nanobind;
using namespace kvarn;

namespace {

template <typename T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
using Strided = nb::ndarray<nb::device::cpu>;

std::string describe(const Strided& x) {
    std::string text = "[";
    for (size_t i = 0; i < x.ndim(); ++i) text += (i ? ", " : "") + std::to_string(x.shape(i));
    text += "] strides [";
    for (size_t i = 0; i < x.ndim(); ++i) text += (i ? ", " : "") + std::to_string(x.stride(i));
    return text + "] of " + std::to_string(x.dtype().bits) + "-bit " +
           (x.dtype().code == uint8_t(nb::dlpack::dtype_code::Float) ? "floats" : "integers");
}

void ensure(bool holds, const std::string& what) {
    if (!holds) throw nb::value_error(what.c_str());
}

// -- weights ----------------------------------------------------------------------------------------------------------

template <typename Fn>
void over_groups(Pool& pool, int64_t groups, Fn&& fn) {
    Shares shares(pool.size());
    shares.reset(groups);
    pool.run([&](int thread) {
        int64_t begin, end;
        while (shares.take(thread, 16, begin, end)) fn(begin, end);
    });
}

Packed pack_rows(Pool& pool, const std::string& type, Array<const uint8_t, 2> rows, int64_t cols) {
    Kind kind;
    const bool known = kind_of(type, kind);
    ensure(known || type == "Q2_K", "weights of type " + type + " have no packing of their own: give their numbers");
    if (!known) kind = Kind::Whole16Min;
    const int64_t unit = type.size() > 2 && type.ends_with("_K") ? 256 : known && kind < Kind::Whole32 ? 32 : 1;
    ensure(cols > 0 && cols % unit == 0, type + " rows of " + std::to_string(cols) + " are no whole blocks");
    nb::gil_scoped_release release;
    const Packed out = allocate(kind, int64_t(rows.shape(0)), cols);
    const auto bytes = int64_t(rows.shape(1));
    over_groups(pool, out.groups, [&](int64_t begin, int64_t end) {
        if (known)
            pack(rows.data(), bytes, out, begin, end);
        else
            pack_q2_k(rows.data(), bytes, out, begin, end);
    });
    return out;
}

std::optional<Packed> pack_numbers(Pool& pool, Array<const float, 2> rows) {
    nb::gil_scoped_release release;
    for (const Kind kind : {Kind::Whole32, Kind::Whole16}) {
        const Packed out = allocate(kind, int64_t(rows.shape(0)), int64_t(rows.shape(1)));
        std::atomic<bool> exact{true};
        over_groups(pool, out.groups, [&](int64_t begin, int64_t end) {
            if (exact.load(std::memory_order_relaxed) && !pack_floats(rows.data(), out, begin, end)) exact = false;
        });
        if (exact) return out;
    }
    return std::nullopt;
}

void unpack(const Packed& w, Array<float, 2> out) {
    ensure(int64_t(out.shape(0)) == w.rows && int64_t(out.shape(1)) == w.cols,
           "unpack: out has another shape than the weight");
    nb::gil_scoped_release release;
    for (int64_t r = 0; r < w.rows; ++r) unpack_row(w, r, out.data() + r * w.cols);
}

// -- the cache --------------------------------------------------------------------------------------------------------

struct Cache {
    CacheView view;
    std::vector<nb::object> kept;  // the arrays that the view points into
};

Strides strides_of(const Strided& x) {
    return {x.stride(0), x.stride(1), x.stride(2), x.stride(3), x.ndim() > 4 ? x.stride(4) : 0};
}

void add_group(Cache& c, Array<const int32_t, 2> blocks, Array<const int32_t, 2> first,
               Array<const int32_t, 1> n_blocks, Array<const int32_t, 1> kv_len, Array<const int32_t, 1> q_start,
               int64_t n_heads, int64_t n_kv_heads, int64_t window, int64_t pinned) {
    const size_t seqs = blocks.shape(0);
    ensure(first.shape(0) == seqs && first.shape(1) == blocks.shape(1) && n_blocks.shape(0) == seqs &&
               kv_len.shape(0) == seqs && q_start.shape(0) == seqs + 1,
           "table: blocks and first are [S, N], n_blocks and kv_len [S], q_start [S + 1]");
    GroupView g;
    g.table = {blocks.data(),
               first.data(),
               n_blocks.data(),
               kv_len.data(),
               q_start.data(),
               nullptr,
               int64_t(seqs),
               int64_t(blocks.shape(1)),
               0};
    g.spec = {n_heads, n_kv_heads, window, pinned};
    c.view.groups.push_back(g);
    for (const nb::object& x :
         {nb::cast(blocks), nb::cast(first), nb::cast(n_blocks), nb::cast(kv_len), nb::cast(q_start)})
        c.kept.push_back(x);
}

void add_layer(Cache& c, Strided k, Strided v, std::optional<Strided> k_scale, std::optional<Strided> v_scale,
               int codec, int64_t group) {
    ensure(group >= 0 && group < int64_t(c.view.groups.size()), "add_layer: the group is not there");
    ensure(codec >= 0 && codec <= 3, "add_layer: unknown codec");
    const SpecView& spec = c.view.groups[size_t(group)].spec;
    LayerView layer;
    StoreView& s = layer.store;
    s.codec = Codec(codec);
    for (const Strided& x : {k, v})
        ensure(x.ndim() == 5 && int64_t(x.dtype().bits) == 8 * cell_bytes(s.codec),
               "store: cells are [block, panel, head, slot, dim] of " + std::to_string(8 * cell_bytes(s.codec)) +
                   " bits, not " + describe(x));
    for (size_t i = 0; i < 5; ++i)
        ensure(k.shape(i) == v.shape(i), "store: K is " + describe(k) + ", V is " + describe(v));
    s.k = static_cast<uint8_t*>(k.data()), s.v = static_cast<uint8_t*>(v.data());
    s.ks = strides_of(k), s.vs = strides_of(v);
    s.n_blocks = int64_t(k.shape(0)), s.panel_size = int64_t(k.shape(3));
    s.block_size = int64_t(k.shape(1) * k.shape(3));
    s.n_heads = int64_t(k.shape(2)), s.dim = int64_t(k.shape(4));
    ensure(s.panel_size % 16 == 0, "store: a panel holds a multiple of 16 slots, not " + std::to_string(s.panel_size));
    ensure(s.dim <= 256, "store: head dimensions up to 256 are implemented, not " + std::to_string(s.dim));
    ensure(spec.n_heads % s.n_heads == 0 && spec.n_heads / s.n_heads <= 16,
           "store: at most 16 query heads share a KV head, not " + std::to_string(spec.n_heads / s.n_heads));
    if (s.codec == Codec::Int8) {
        ensure(k_scale && v_scale && k_scale->ndim() == 4 && v_scale->ndim() == 4, "store: int8 cells need scales");
        s.k_scale = static_cast<float*>(k_scale->data()), s.v_scale = static_cast<float*>(v_scale->data());
        s.k_scales = strides_of(*k_scale), s.v_scales = strides_of(*v_scale);
        c.kept.push_back(nb::cast(*k_scale)), c.kept.push_back(nb::cast(*v_scale));
    }
    layer.group = group;
    c.view.layers.push_back(layer);
    c.kept.push_back(nb::cast(k)), c.kept.push_back(nb::cast(v));
}

// This step's cells; checked here because kernels write where they point.
void set_slots(Cache& c, int64_t group, Array<const int64_t, 1> slots) {
    ensure(group >= 0 && group < int64_t(c.view.groups.size()), "set_slots: the group is not there");
    TableView& t = c.view.groups[size_t(group)].table;
    ensure(int64_t(slots.shape(0)) == t.q_start[t.n_seqs], "table: one slot per new token is needed");
    int64_t cells = INT64_MAX;
    for (const LayerView& l : c.view.layers)
        if (l.group == group) cells = std::min(cells, l.store.n_blocks * l.store.block_size);
    for (size_t i = 0; i < slots.shape(0); ++i)
        ensure(slots.data()[i] >= -1 && slots.data()[i] < cells, "table: a slot lies outside the store");
    t.slots = slots.data(), t.tokens = int64_t(slots.shape(0));
}

const LayerView& layer_of(const Cache& c, int64_t layer) {
    ensure(layer >= 0 && layer < int64_t(c.view.layers.size()), "the layer is not there");
    return c.view.layers[size_t(layer)];
}

int64_t write_layer(Cache& c, int64_t layer, Array<const float, 3> k, Array<const float, 3> v) {
    const LayerView& l = layer_of(c, layer);
    const GroupView& g = c.view.groups[size_t(l.group)];
    for (const auto& x : {k, v})
        ensure(int64_t(x.shape(0)) == g.table.tokens && int64_t(x.shape(1)) == g.spec.n_kv_heads &&
                   int64_t(x.shape(2)) == l.store.dim,
               "write: k and v are [new tokens, KV heads, dim]");
    nb::gil_scoped_release release;
    int64_t written = 0;
    const int64_t row = g.spec.n_kv_heads * l.store.dim;
    for (int64_t t = 0; t < g.table.tokens; ++t)
        if (g.table.slots[t] >= 0)
            written += write_token(l.store, *kernels().cells, g.table.slots[t], k.data() + t * row, v.data() + t * row,
                                   g.spec.n_kv_heads);
    return written;
}

int64_t attend_layer(Pool& pool, Cache& c, int64_t layer, Array<const float, 3> q, Array<float, 3> out, float scale,
                     bool prefill, bool decode) {
    const LayerView& l = layer_of(c, layer);
    const GroupView& g = c.view.groups[size_t(l.group)];
    const int64_t tokens = g.table.q_start[g.table.n_seqs];
    ensure(int64_t(q.shape(0)) >= tokens && int64_t(q.shape(1)) == g.spec.n_heads &&
               int64_t(q.shape(2)) == l.store.dim && out.shape(0) == q.shape(0) && out.shape(1) == q.shape(1) &&
               out.shape(2) == q.shape(2),
           "attention: q and out are [new tokens, heads, dim] in f32");
    for (int64_t s = 0; s < g.table.n_seqs; ++s)
        for (int64_t i = 0; i < g.table.n_blocks[s]; ++i) {
            const int32_t block = g.table.blocks[s * g.table.max_blocks + i];
            ensure(block >= 0 && block < l.store.n_blocks,
                   "table: block " + std::to_string(block) + " lies outside the store");
        }
    nb::gil_scoped_release release;
    const int64_t stride = g.spec.n_heads * l.store.dim;
    const AttentionArgs args{l.store, g.table, g.spec, scale, q.data(), out.data(), stride, stride};
    return attend(pool, kernels(), args, prefill, decode).read;
}

// -- programs ---------------------------------------------------------------------------------------------------------

Vector padded(const std::optional<Array<const float, 1>>& x) {
    if (!x) return nullptr;
    auto v = std::make_shared<std::vector<float>>((x->shape(0) + 31) / 32 * 32, 0.0f);
    std::copy(x->data(), x->data() + x->shape(0), v->begin());
    return v;
}

using Counts = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t>;

Counts run(Program& p, Cache& c, Array<const int64_t, 1> tokens, Array<const int32_t, 1> positions,
           Array<const int64_t, 1> rows, Array<float, 2> logits) {
    const auto n = int64_t(tokens.shape(0)), wanted = int64_t(rows.shape(0));
    ensure(int64_t(positions.shape(0)) == n, "run: one position per token is needed");
    for (const GroupView& g : c.view.groups) ensure(g.table.tokens == n, "run: the table is prepared for another step");
    for (size_t i = 0; i < tokens.shape(0); ++i)
        ensure(tokens.data()[i] >= 0 && tokens.data()[i] < p.vocabulary(), "run: a token lies outside the vocabulary");
    for (size_t i = 0; i < rows.shape(0); ++i)
        ensure(rows.data()[i] >= 0 && rows.data()[i] < n, "run: a row lies outside the step");
    ensure(int64_t(logits.shape(0)) == wanted && int64_t(logits.shape(1)) == (p.vocabulary() + 15) / 16 * 16,
           "run: logits are [rows, vocabulary rounded up to 16]");
    nb::gil_scoped_release release;
    const Counted k = p.run(c.view, tokens.data(), positions.data(), n, rows.data(), wanted, logits.data());
    return {k.written, k.read, k.prefill, k.decode, k.prefill_ns, k.decode_ns};
}

void check_buffers(const Program& p, const Op& op) {
    const auto ok = [&](int b) { return b >= -1 && b < p.n_buffers(); };
    bool all = ok(op.in) && ok(op.in2) && ok(op.in3) && ok(op.out);
    for (const Segment& s : op.segments) all = all && ok(s.out);
    ensure(all, "an operation names a buffer that is not there");
}

Op named(Op::Kind kind, const std::string& name, bool selected) {
    Op op;
    op.kind = kind, op.name = name, op.selected = selected;
    return op;
}

void add(Program& p, Op op) {
    check_buffers(p, op);
    p.add_op(std::move(op));
}

using OptionalVector = std::optional<Array<const float, 1>>;
using SegmentTuple = std::tuple<Packed, OptionalVector, int, bool>;

void bind_program(nb::module_& m) {
    nb::class_<Program>(m, "Program")
        .def("__init__",
             [](Program* self, std::shared_ptr<Pool> pool) { new (self) Program(std::move(pool), kernels()); })
        .def("buffer", &Program::add_buffer)
        .def("rope", &Program::add_rope)
        .def("embed",
             [](Program& p, const std::string& name, const Packed& matrix, int out, float scale) {
                 Op op = named(Op::Kind::Embed, name, false);
                 op.matrix = matrix, op.out = out, op.scale = scale;
                 add(p, op);
             })
        .def(
            "prepare",
            [](Program& p, const std::string& name, bool selected, int in, int out, OptionalVector weight, float eps,
               bool codes, bool bf16) {
                Op op = named(Op::Kind::Prepare, name, selected);
                op.in = in, op.out = out, op.weight = padded(weight), op.eps = eps, op.codes = codes, op.bf16 = bf16;
                add(p, op);
            },
            nb::arg("name"), nb::arg("selected"), nb::arg("in_"), nb::arg("out"), nb::arg("weight").none(),
            nb::arg("eps"), nb::arg("codes"), nb::arg("bf16"))
        .def("gated",
             [](Program& p, const std::string& name, bool selected, int gate, int up, int out, int kind, bool codes,
                bool bf16) {
                 Op op = named(Op::Kind::Gated, name, selected);
                 op.in = gate, op.in2 = up, op.out = out, op.gate = Gate(kind), op.codes = codes, op.bf16 = bf16;
                 add(p, op);
             })
        .def("norm_add",
             [](Program& p, const std::string& name, bool selected, int in, int out, OptionalVector weight, float eps) {
                 Op op = named(Op::Kind::NormAdd, name, selected);
                 op.in = in, op.out = out, op.weight = padded(weight), op.eps = eps;
                 add(p, op);
             })
        .def("add",
             [](Program& p, const std::string& name, bool selected, int in, int out) {
                 Op op = named(Op::Kind::Add, name, selected);
                 op.in = in, op.out = out;
                 add(p, op);
             })
        .def("select",
             [](Program& p, const std::string& name, int in, int out) {
                 Op op = named(Op::Kind::Select, name, true);
                 op.in = in, op.out = out;
                 add(p, op);
             })
        .def("linear",
             [](Program& p, const std::string& name, bool selected, bool logits,
                const std::vector<SegmentTuple>& segments) {
                 Op op = named(logits ? Op::Kind::Logits : Op::Kind::Linear, name, selected);
                 for (const auto& [weight, bias, out, sum] : segments)
                     op.segments.push_back({weight, padded(bias), out, sum});
                 add(p, op);
             })
        .def(
            "attention",
            [](Program& p, const std::string& name, int layer, int q, int k, int v, int out, float scale, int rope,
               std::tuple<int, int, int> shape, OptionalVector q_norm, OptionalVector k_norm, float eps) {
                Op op = named(Op::Kind::Attention, name, false);
                op.layer = layer, op.in = q, op.in2 = k, op.in3 = v, op.out = out, op.scale = scale, op.rope = rope;
                std::tie(op.heads, op.kv_heads, op.head_dim) = shape;
                op.weight = padded(q_norm), op.weight2 = padded(k_norm), op.eps = eps;
                add(p, op);
            },
            nb::arg("name"), nb::arg("layer"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("out"),
            nb::arg("scale"), nb::arg("rope"), nb::arg("shape"), nb::arg("q_norm").none(), nb::arg("k_norm").none(),
            nb::arg("eps"))
        .def("run", &run)
        .def("reserve", &Program::reserve)
        .def_prop_ro("vocabulary", &Program::vocabulary)
        .def_prop_ro("workspace", &Program::workspace_bytes)
        .def("trace", &Program::trace)
        .def("timings", [](Program& p) {
            std::vector<std::tuple<std::string, int64_t, int64_t>> out;
            for (const Timing& t : p.take_timings()) out.emplace_back(p.ops()[size_t(t.op)].name, t.begin, t.end);
            return out;
        });
}

}  // namespace

// Zeroed memory in large pages, where the system has them; backed when it is first written.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> arena(int64_t bytes) {
    ensure(bytes >= 0 && bytes < (int64_t(1) << 46), "arena: that many bytes cannot be had");
    auto memory = std::make_unique<std::shared_ptr<uint8_t>>(pages(bytes));
    uint8_t* data = memory->get();
    nb::capsule owner(memory.release(), [](void* p) noexcept { delete static_cast<std::shared_ptr<uint8_t>*>(p); });
    return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {size_t(bytes)}, owner);
}

void bind_cpu(nb::module_& m) {
    m.def("arena", &arena, nb::arg("bytes"));
    nb::class_<Pool>(m, "Pool").def(nb::init<int>()).def_prop_ro("size", &Pool::size);
    nb::class_<Packed>(m, "Weight")
        .def_prop_ro("kind", [](const Packed& w) { return std::string(name_of(w.kind)); })
        .def_prop_ro("integer", &Packed::integer)
        .def_ro("rows", &Packed::rows)
        .def_ro("cols", &Packed::cols)
        .def_prop_ro("nbytes", &Packed::nbytes)
        .def("unpack", &unpack, nb::arg("out").noconvert());
    m.def("pack", &pack_rows, nb::arg("pool"), nb::arg("type"), nb::arg("rows").noconvert(), nb::arg("cols"));
    m.def("pack_numbers", &pack_numbers, nb::arg("pool"), nb::arg("rows").noconvert());
    m.def("read_bandwidth", &read_bandwidth, nb::arg("bytes"), nb::arg("threads"),
          nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Cache>(m, "CacheView")
        .def(nb::init<>())
        .def("add_group", &add_group)
        .def("add_layer", &add_layer, nb::arg("k"), nb::arg("v"), nb::arg("k_scale").none(), nb::arg("v_scale").none(),
             nb::arg("codec"), nb::arg("group"))
        .def("set_slots", &set_slots)
        .def("write", &write_layer);
    m.def("attend", &attend_layer, nb::arg("pool"), nb::arg("cache"), nb::arg("layer"), nb::arg("q").noconvert(),
          nb::arg("out").noconvert(), nb::arg("scale"), nb::arg("prefill"), nb::arg("decode"));
    bind_program(m);
}
