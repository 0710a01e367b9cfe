"""Copies a GGUF file with all weights in f32. The `gguf` package dequantizes the tensors.

    python scripts/widen_gguf.py MODEL.gguf WIDE.gguf

llama.cpp multiplies quantized weights by activations that are rounded to 8 bits, and f32 weights by f32
activations. With the copy it computes from the same numbers without that rounding. The copy can be
sixteen times as large.
"""

import sys
from pathlib import Path

import gguf
import numpy as np


def widen(source: Path, target: Path) -> None:
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, str(reader.fields["general.architecture"].contents()))
    for field in reader.fields.values():
        if field.name == "general.architecture" or field.name.startswith("GGUF."):  # the writer adds these itself
            continue
        kind, *element = field.types
        writer.add_key_value(field.name, field.contents(), kind, element[-1] if element else None)
    for tensor in reader.tensors:
        writer.add_tensor_info(
            tensor.name, tensor.shape.tolist()[::-1], np.dtype(np.float32), 4 * int(tensor.n_elements)
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.write_tensor_data(np.ascontiguousarray(numbers, np.float32))
    writer.close()


if __name__ == "__main__":
    widen(*map(Path, sys.argv[1:]))
