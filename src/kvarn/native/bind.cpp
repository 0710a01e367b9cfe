// The Python boundary: argument checks and the GIL, no logic.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "isa.hpp"

namespace nb = nanobind;

namespace {

template <typename T>
using Rows = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Column = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename In, typename Out>
void same_shape(const In& x, const Out& out) {
    if (x.shape(0) != out.shape(0) || x.shape(1) != out.shape(1))
        throw nb::value_error("encode: x and out differ in shape");
}

void encode_bf16(Rows<const float> x, Rows<uint16_t> out) {
    same_shape(x, out);
    nb::gil_scoped_release release;
    kvarn::cells().bf16(x.data(), out.data(), int64_t(x.size()));
}

void encode_f16(Rows<const float> x, Rows<uint16_t> out) {
    same_shape(x, out);
    nb::gil_scoped_release release;
    kvarn::cells().f16(x.data(), out.data(), int64_t(x.size()));
}

void encode_int8(Rows<const float> x, Rows<int8_t> out, Column<float> scale) {
    same_shape(x, out);
    if (scale.shape(0) != x.shape(0)) throw nb::value_error("encode_int8: one scale per row of x is needed");
    nb::gil_scoped_release release;
    kvarn::cells().int8(x.data(), out.data(), scale.data(), int64_t(x.shape(0)), int64_t(x.shape(1)));
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("cpu_features", &kvarn::cpu_features);
    m.def("isas", &kvarn::isas);
    m.def("isa", [] { return std::string(kvarn::cells().name); });
    m.def("select", &kvarn::select, nb::arg("name"));
    // noconvert: an array that does not fit is refused; converted silently, `out` would be a copy that nobody sees.
    const auto x = nb::arg("x").noconvert(), out = nb::arg("out").noconvert(), scale = nb::arg("scale").noconvert();
    m.def("encode_bf16", &encode_bf16, x, out);
    m.def("encode_f16", &encode_f16, x, out);
    m.def("encode_int8", &encode_int8, x, out, scale);
}
