"""Every codec by name: to add one, write its file and add its line here."""

from kvarn.cache.codec import Codec
from kvarn.cache.codecs.bf16 import BF16
from kvarn.cache.codecs.f16 import F16
from kvarn.cache.codecs.f32 import F32
from kvarn.cache.codecs.int8 import Int8

CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        F32(),
        F16(),
        BF16(),
        Int8(),
    )
}
