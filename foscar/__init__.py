"""A 2-bit and 4-bit key-value cache for large language models, and decode attention over it."""

from foscar import convert, rotation
from foscar._version import __version__
from foscar.attention import decode_attention, extend_attention
from foscar.cache import PagedKVCache, append, dequantize
from foscar.layout import CacheSpec, QuantSpec
from foscar.merge import merge_states
from foscar.sequences import BlockManager, OutOfPagesError

__all__ = [
    "BlockManager",
    "CacheSpec",
    "OutOfPagesError",
    "PagedKVCache",
    "QuantSpec",
    "__version__",
    "append",
    "convert",
    "decode_attention",
    "dequantize",
    "extend_attention",
    "merge_states",
    "rotation",
]
