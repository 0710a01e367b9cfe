// The Python bindings: they check arguments and release the GIL. They contain no other logic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "base.hpp"
#include "checks.hpp"
#include "isa.hpp"
#include "markers.hpp"
#include "spm.hpp"
#include "unlocked.hpp"

namespace nb = nanobind;

void bind_arithmetic(nb::module_& m);
void bind_cpu(nb::module_& m);
void bind_planes(nb::module_& m);

namespace {

template <typename T>
using Rows = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Column = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename In, typename Out>
void same_shape(const In& x, const Out& out) {
    kvarn::ensure(x.shape(0) == out.shape(0) && x.shape(1) == out.shape(1), "encode: x and out differ in shape");
}

void encode_bf16(Rows<const float> x, Rows<uint16_t> out) {
    same_shape(x, out);
    const kvarn::Unlocked unlocked;
    kvarn::kernels().encoders->bf16(x.data(), out.data(), int64_t(x.size()));
}

void encode_f16(Rows<const float> x, Rows<uint16_t> out) {
    same_shape(x, out);
    const kvarn::Unlocked unlocked;
    kvarn::kernels().encoders->f16(x.data(), out.data(), int64_t(x.size()));
}

void encode_int8(Rows<const float> x, Rows<int8_t> out, Column<float> scale) {
    kvarn::ensure(out.shape(0) == x.shape(0) && int64_t(out.shape(1)) == kvarn::up(int64_t(x.shape(1)), 32),
                  "encode_int8: a row of out has as many codes as a row of x, rounded up to 32");
    kvarn::ensure(scale.shape(0) == x.shape(0), "encode_int8: one scale per row of x is needed");
    const kvarn::Unlocked unlocked;
    kvarn::kernels().encoders->int8(x.data(), out.data(), scale.data(), int64_t(x.shape(0)), int64_t(x.shape(1)));
}

std::string_view view(const nb::bytes& text) { return {text.c_str(), text.size()}; }

std::vector<kvarn::Marker> markers(std::vector<std::string> texts, const std::vector<int32_t>& ids,
                                   const std::vector<bool>& always, const std::vector<bool>& strips_right) {
    kvarn::ensure(texts.size() == ids.size() && texts.size() == always.size() && texts.size() == strips_right.size(),
                  "markers: texts, ids, always and strips_right differ in length");
    std::vector<kvarn::Marker> all;
    all.reserve(texts.size());
    for (size_t i = 0; i < texts.size(); ++i) all.push_back({std::move(texts[i]), ids[i], always[i], strips_right[i]});
    return all;
}

std::vector<std::tuple<int32_t, size_t, size_t>> split(const kvarn::Markers& self, nb::bytes text, bool special) {
    std::vector<std::tuple<int32_t, size_t, size_t>> spans;
    const kvarn::Unlocked unlocked;
    for (const kvarn::TextSpan& span : self.split(view(text), special))
        spans.emplace_back(span.id, span.begin, span.end);
    return spans;
}

using BlockEncoder = void (*)(const int8_t*, const float*, uint8_t*, uint8_t*, int64_t, int64_t);
void encode_blocks(BlockEncoder encode, int64_t bits, Rows<const int8_t> x, Column<const float> x_scale,
                   Rows<uint32_t> out, Rows<uint8_t> scale) {
    const auto rows = x.shape(0);
    kvarn::ensure(x.shape(1) % 32 == 0 && x_scale.shape(0) == rows,
                  "encode: rows of int8 have whole blocks and a scale");
    kvarn::ensure(out.shape(0) == rows && int64_t(out.shape(1)) == int64_t(x.shape(1)) / 32 * bits &&
                      scale.shape(0) == rows && scale.shape(1) == x.shape(1) / 32,
                  "encode: a block of 32 numbers has one word per bit and one scale code");
    const kvarn::Unlocked unlocked;
    encode(x.data(), x_scale.data(), reinterpret_cast<uint8_t*>(out.data()), scale.data(), int64_t(rows),
           int64_t(x.shape(1)));
}
void encode_int4(Rows<const int8_t> x, Column<const float> x_scale, Rows<uint32_t> out, Rows<uint8_t> scale) {
    encode_blocks(kvarn::kernels().encoders->int4, 4, x, x_scale, out, scale);
}
void encode_int6(Rows<const int8_t> x, Column<const float> x_scale, Rows<uint32_t> out, Rows<uint8_t> scale) {
    encode_blocks(kvarn::kernels().encoders->int6, 6, x, x_scale, out, scale);
}
std::vector<int32_t> encode_spm(const kvarn::Spm& self, nb::bytes text, bool special) {
    const kvarn::Unlocked unlocked;
    return self.encode(view(text), special);
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // a tokenizer in a Python cache may outlive the module
    m.def("cpu_features", &kvarn::cpu_features);
    m.def("finish_unlocked", &kvarn::finish_unlocked);
    m.def("isas", &kvarn::isas);
    m.def("isa", [] { return std::string(kvarn::kernels().encoders->name); });
    m.def("select_isa", [](const std::string& name) { return kvarn::select_isa(name); }, nb::arg("name"));
    m.def("sum_order", [] { return kvarn::sum_order() == kvarn::SumOrder::Tiles ? "tiles" : "pairs"; });
    m.def("select_sum_order",
          [](bool tiles) { kvarn::select_sum_order(tiles ? kvarn::SumOrder::Tiles : kvarn::SumOrder::Pairs); });
    // noconvert: refuse an array that does not fit. A silent conversion would write `out` into a
    // copy that is then thrown away.
    const auto x = nb::arg("x").noconvert(), out = nb::arg("out").noconvert(), scale = nb::arg("scale").noconvert();
    m.def("encode_bf16", &encode_bf16, x, out);
    m.def("encode_f16", &encode_f16, x, out);
    m.def("encode_int8", &encode_int8, x, out, scale);
    const auto x_scale = nb::arg("x_scale").noconvert();
    m.def("encode_int4", &encode_int4, x, x_scale, out, scale);
    m.def("encode_int6", &encode_int6, x, x_scale, out, scale);

    bind_arithmetic(m);
    bind_cpu(m);
    bind_planes(m);
    nb::class_<kvarn::Markers>(m, "Markers")
        .def("__init__",
             [](kvarn::Markers* self, std::vector<std::string> texts, const std::vector<int32_t>& ids,
                const std::vector<bool>& always, const std::vector<bool>& strips_right) {
                 new (self) kvarn::Markers(markers(std::move(texts), ids, always, strips_right));
             })
        .def("split", &split, nb::arg("text"), nb::arg("special"));
    nb::class_<kvarn::Spm>(m, "Spm")
        .def(
            "__init__",
            [](kvarn::Spm* self, std::vector<std::string> tokens, Column<const float> scores,
               std::vector<std::string> texts, const std::vector<int32_t>& ids, const std::vector<bool>& always,
               const std::vector<bool>& strips_right, bool space_prefix, int32_t unknown) {
                kvarn::ensure(scores.shape(0) == tokens.size(), "Spm: one score per token is needed");
                const std::vector<float> copy(scores.data(), scores.data() + scores.shape(0));
                new (self) kvarn::Spm(std::move(tokens), copy, markers(std::move(texts), ids, always, strips_right),
                                      space_prefix, unknown);
            },
            nb::arg("tokens"), nb::arg("scores").noconvert(), nb::arg("texts"), nb::arg("ids"), nb::arg("always"),
            nb::arg("strips_right"), nb::arg("space_prefix"), nb::arg("unknown"))
        .def("encode", &encode_spm, nb::arg("text"), nb::arg("special"));
}
