// The Python bindings for the cache: views of stores and tables; writes and attention without a
// program.
#include <nanobind/stl/optional.h>

#include <algorithm>

#include "bind.hpp"

namespace kvarn {
namespace {

struct Fresh {  // the int8 rows of one layer and step, between the write and the attention
    Lines<uint8_t> memory;
};

template <typename Any>
Strides strides_of(const Any& x) {
    return {x.stride(0), x.stride(1), x.stride(2), x.stride(3), x.ndim() > 4 ? x.stride(4) : 0};
}

void add_group(Cache& c, In blocks, In first, In n_blocks, In kv_len, In q_start, int64_t n_heads, int64_t n_kv_heads,
               int64_t window, int64_t pinned) {
    const Array<const int32_t, 2> b(blocks, "table.blocks"), f(first, "table.first");
    const Array<const int32_t, 1> n(n_blocks, "table.n_blocks"), len(kv_len, "table.kv_len"),
        start(q_start, "table.q_start");
    const int64_t seqs = b.shape(0);
    ensure(f.shape(0) == seqs && f.shape(1) == b.shape(1) && n.shape(0) == seqs && len.shape(0) == seqs &&
               start.shape(0) == seqs + 1,
           "table: blocks and first are [S, N], n_blocks and kv_len [S], q_start [S + 1], not " + describe(blocks) +
               ", " + describe(first) + ", " + describe(n_blocks) + ", " + describe(kv_len) + ", " + describe(q_start));
    ensure(n_kv_heads > 0 && n_heads > 0 && n_heads % n_kv_heads == 0,
           "spec: " + std::to_string(n_heads) + " query heads over " + std::to_string(n_kv_heads) + " KV heads");
    ensure((window == -1 || window > 0) && pinned >= 0,
           "spec: a window of " + std::to_string(window) + " and " + std::to_string(pinned) + " pinned tokens");
    GroupView g;
    g.table = {b.data(), f.data(), n.data(), len.data(), start.data(), nullptr, seqs, b.shape(1), 0};
    g.spec = {n_heads, n_kv_heads, window, pinned};
    c.view.groups.push_back(g);
    c.cells.emplace_back();
    for (const In& x : {blocks, first, n_blocks, kv_len, q_start}) c.kept.push_back(nb::cast(x));
}

void add_scales(CellsView& view, const std::optional<Out>& scale, const Out& cells, int64_t dim, const char* name) {
    ensure(scale.has_value(), std::string("store: cells of integers need a ") + name);
    const bool codes = has_tail(view.codec);
    bool fits = codes ? scale->ndim() == 5 && scale->dtype() == nb::dtype<uint8_t>() &&
                            int64_t(scale->shape(4)) == blocks_of(dim)
                      : scale->ndim() == 4 && scale->dtype() == nb::dtype<float>();
    for (size_t i = 0; fits && i < 4; ++i) fits = scale->shape(i) == cells.shape(i);
    ensure(fits, std::string("store: ") + name + " is " +
                     (codes ? "uint8 [block, panel, head, slot, 32 numbers]" : "float32 [block, panel, head, slot]") +
                     " for cells " + describe(cells) + ", not " + describe(*scale));
    view.scales = static_cast<uint8_t*>(scale->data());
    view.scale_strides = strides_of(*scale);
}

CellsView view_of(const Out& x, int codec, int64_t dim, const std::optional<Out>& scale, const char* scale_name) {
    ensure(codec >= 0 && codec <= int(Codec::Int6), "add_layer: unknown codec " + std::to_string(codec));
    CellsView view;
    view.codec = Codec(codec);
    const int64_t bits = 8 * cell_bytes(view.codec);
    ensure(x.ndim() == 5 && int64_t(x.dtype().bits) == bits,
           "store: cells are [block, panel, head, slot, dim] of " + std::to_string(bits) + " bits, not " + describe(x));
    ensure(int64_t(x.shape(4)) == cells_of(view.codec, dim),
           "store: heads of " + std::to_string(dim) + " numbers have " + std::to_string(cells_of(view.codec, dim)) +
               " cells, not " + describe(x));
    view.cells = static_cast<uint8_t*>(x.data());
    view.strides = strides_of(x);
    view.panel_size = int64_t(x.shape(3));
    if (rotated(view.codec)) add_scales(view, scale, x, dim, scale_name);
    return view;
}

// The tail of K or V: int8 rows, two blocks of 32 slots per sequence.
CellsView tail_of(Codec codec, const std::optional<Out>& x, const std::optional<Out>& scale, const StoreView& s,
                  int64_t seqs, const char* name) {
    if (!has_tail(codec)) return {};
    ensure(x.has_value(), std::string("store: these cells need a ") + name);
    const CellsView view = view_of(*x, int(Codec::Int8), s.dim, scale, name);
    ensure(int64_t(x->shape(0)) >= 2 * seqs && int64_t(x->shape(1) * x->shape(3)) == kSlots &&
               int64_t(x->shape(2)) == s.n_heads,
           std::string("store: ") + name + " has two blocks of 32 slots for each of " + std::to_string(seqs) +
               " sequences, not " + describe(*x));
    return view;
}

void check_store(const StoreView& s, const SpecView& spec) {
    ensure(s.panel_size % kHalfTile == 0, "store: a panel holds a multiple of " + std::to_string(kHalfTile) +
                                              " slots, not " + std::to_string(s.panel_size));
    ensure(s.dim <= kMaxHeadDim, "store: head dimensions up to " + std::to_string(kMaxHeadDim) +
                                     " are implemented, not " + std::to_string(s.dim));
    ensure(s.n_heads == spec.n_kv_heads || s.n_heads == spec.n_heads,
           "store: " + std::to_string(s.n_heads) + " heads are neither the " + std::to_string(spec.n_kv_heads) +
               " KV heads nor the " + std::to_string(spec.n_heads) + " query heads");
    ensure(spec.n_heads / s.n_heads <= kMaxQueryGroup, "store: at most " + std::to_string(kMaxQueryGroup) +
                                                           " query heads share a KV head, not " +
                                                           std::to_string(spec.n_heads / s.n_heads));
}

using Maybe = std::optional<Out>;

void add_layer(Cache& c, Out k, Out v, Maybe k_scale, Maybe v_scale, Maybe k_tail, Maybe v_tail, Maybe k_tail_scale,
               Maybe v_tail_scale, int k_codec, int v_codec, int64_t dim, int64_t group) {
    ensure(group >= 0 && group < int64_t(c.view.groups.size()),
           "add_layer: there is no group " + std::to_string(group));
    const GroupView& g = c.view.groups[size_t(group)];
    LayerView layer;
    StoreView& s = layer.store;
    s.k = view_of(k, k_codec, dim, k_scale, "k_scale"), s.v = view_of(v, v_codec, dim, v_scale, "v_scale");
    for (size_t i = 0; i < 4; ++i)
        ensure(k.shape(i) == v.shape(i) && k.shape(i) > 0, "store: K is " + describe(k) + ", V is " + describe(v));
    s.n_blocks = int64_t(k.shape(0)), s.panel_size = int64_t(k.shape(3));
    s.block_size = int64_t(k.shape(1) * k.shape(3));
    s.n_heads = int64_t(k.shape(2)), s.dim = dim;
    s.k_tail = tail_of(s.k.codec, k_tail, k_tail_scale, s, g.table.n_seqs, "k_tail");
    s.v_tail = tail_of(s.v.codec, v_tail, v_tail_scale, s, g.table.n_seqs, "v_tail");
    ensure(!s.has_tail() || s.block_size % kSlots == 0,
           "store: cells with a tail are in blocks of a multiple of 32 slots, not " + std::to_string(s.block_size));
    check_store(s, g.spec);
    layer.group = group;
    c.view.layers.push_back(layer);
    c.kept.push_back(nb::cast(k)), c.kept.push_back(nb::cast(v));
    for (const Maybe& each : {k_scale, v_scale, k_tail, v_tail, k_tail_scale, v_tail_scale})
        if (each) c.kept.push_back(nb::cast(*each));
}

// The cells of this step's tokens. They are checked here, because kernels write to them.
void set_cells(Cache& c, int64_t group, In cells) {
    ensure(group >= 0 && group < int64_t(c.view.groups.size()),
           "set_cells: there is no group " + std::to_string(group));
    const Array<const int64_t, 1> s(cells, "table.cells");
    TableView& t = c.view.groups[size_t(group)].table;
    ensure(s.shape(0) == t.q_start[t.n_seqs], "table: one cell per new token is needed, " +
                                                  std::to_string(t.q_start[t.n_seqs]) + " and not " +
                                                  std::to_string(s.shape(0)));
    int64_t n_cells = 0;
    for (const LayerView& l : c.view.layers)
        if (l.group == group)
            n_cells = n_cells ? std::min(n_cells, l.store.n_blocks * l.store.block_size)
                              : l.store.n_blocks * l.store.block_size;
    for (int64_t i = 0; i < s.shape(0); ++i)
        ensure(s.data()[i] >= -1 && s.data()[i] < n_cells,
               "table: cell " + std::to_string(s.data()[i]) + " lies outside the store of " + std::to_string(n_cells));
    t.cells = s.data(), t.tokens = s.shape(0);
    c.cells[size_t(group)] = nb::cast(cells);
}

const LayerView& layer_of(const Cache& c, int64_t layer) {
    ensure(layer >= 0 && layer < int64_t(c.view.layers.size()), "there is no layer " + std::to_string(layer));
    return c.view.layers[size_t(layer)];
}

int64_t write_layer(Cache& c, int64_t layer, In keys, In values, Fresh& fresh) {
    const LayerView& l = layer_of(c, layer);
    const GroupView& g = c.view.groups[size_t(l.group)];
    const Array<const float, 3> k(keys, "write: k"), v(values, "write: v");
    for (const auto& x : {k, v})
        ensure(x.shape(0) == g.table.tokens && x.shape(1) == g.spec.n_kv_heads && x.shape(2) == l.store.dim,
               "write: k and v are [" + std::to_string(g.table.tokens) + " new tokens, " +
                   std::to_string(g.spec.n_kv_heads) + " KV heads, " + std::to_string(l.store.dim) + "], not " +
                   describe(keys) + " and " + describe(values));
    check_rows(g.table, l.store);
    const Unlocked unlocked;
    return write(kernels(), l.store, g.table, g.spec.n_kv_heads, fresh.memory, k.data(), v.data());
}

int64_t attend_layer(Pool& pool, Cache& c, int64_t layer, In queries, Out result, float scale, bool prefill,
                     bool decode, Fresh& fresh) {
    const LayerView& l = layer_of(c, layer);
    const GroupView& g = c.view.groups[size_t(l.group)];
    const Array<const float, 3> q(queries, "attention: q");
    const Array<float, 3> out(result, "attention: out");
    const int64_t tokens = g.table.q_start[g.table.n_seqs];
    ensure(q.shape(0) >= tokens && q.shape(1) == g.spec.n_heads && q.shape(2) == l.store.dim &&
               out.shape(0) == q.shape(0) && out.shape(1) == q.shape(1) && out.shape(2) == q.shape(2),
           "attention: q and out are [" + std::to_string(tokens) + " new tokens, " + std::to_string(g.spec.n_heads) +
               " heads, " + std::to_string(l.store.dim) + "], not " + describe(queries) + " and " + describe(result));
    check_table(g.table, g.spec, l.store);
    const Unlocked unlocked;
    const int64_t stride = g.spec.n_heads * l.store.dim;
    const AttentionArgs args{l.store, g.table, g.spec, scale, q.data(), out.data(), stride, stride, {}};
    return attend(pool, kernels(), args, fresh.memory, prefill, decode).read;
}

}  // namespace

void bind_cache(nb::module_& m) {
    // An int enum: add_layer takes any int and names the codec that it does not know.
    nb::enum_<Codec>(m, "Codec", nb::is_arithmetic())
        .value("f32", Codec::F32)
        .value("f16", Codec::F16)
        .value("bf16", Codec::BF16)
        .value("int8", Codec::Int8)
        .value("int4", Codec::Int4)
        .value("int6", Codec::Int6);
    nb::class_<Fresh>(m, "FreshRows").def(nb::init<>());
    nb::class_<Cache>(m, "CacheView")
        .def(nb::init<>())
        .def("add_group", &add_group)
        .def("add_layer", &add_layer, nb::arg("k"), nb::arg("v"), nb::arg("k_scale").none(), nb::arg("v_scale").none(),
             nb::arg("k_tail").none(), nb::arg("v_tail").none(), nb::arg("k_tail_scale").none(),
             nb::arg("v_tail_scale").none(), nb::arg("k_codec"), nb::arg("v_codec"), nb::arg("dim"), nb::arg("group"))
        .def("set_cells", &set_cells)
        .def("write", &write_layer);
    m.def("attend", &attend_layer, nb::arg("pool"), nb::arg("cache"), nb::arg("layer"), nb::arg("q"), nb::arg("out"),
          nb::arg("scale"), nb::arg("prefill"), nb::arg("decode"), nb::arg("fresh"));
}

}  // namespace kvarn
