"""Shapes at the edges of the kernels, and shapes that the CPU computes in FP64 as well.

Names are as in scripts/bench/shapes.py, which has the shapes of production layers.
"""

ODD_GEMM = (
    (256, 256, 256, None),
    (1, 16, 16, None),
    (333, 144, 1040, None),
    (1000, 1408, 400, None),
    (130, 2000, 2064, None),
    (4096, 1408, 2048, None),
    (512, 384, 272, (128, 128, 384)),
    (1000, 1408, 400, (0, 63, 63, 300, 999)),
    (333, 144, 1040, (5, 100, 100000)),
    (700, 528, 640, (1, 2, 3, 135, 264, 700)),
    (640, 272, 528, (64, 129, 321, 640)),
    (2048, 2000, 2048, (640, 2048)),
    (640, 272, 1408, (0, 0, 0)),
    (3000, 320, 512, tuple(range(11, 11 * 257, 11))),
)
"""(M, N, K, group ends or None): short tiles, empty groups, ends beyond M, tokens of no group."""
LAYER_ENDS = {"dense": None, "aligned": (128, 128, 512, 640), "unaligned": (5, 5, 400, 633)}
"""Group ends of a layer with 768 tokens: an empty group, and tokens of no group."""
ODD_LINEAR = ((512, 576, 704), (333, 1408, 2048), (1, 16, 16), (130, 128, 144))
"""(M, N, K) of layers with short tiles along each dimension."""
ODD_QUANTIZE = ((1, 16), (127, 128), (130, 144), (300, 576), (512, 2048), (4097, 704))
"""(M, K) with short blocks along each dimension."""
QUANTIZE_ENDS = {
    "one": (384,),
    "even": (128, 256, 384, 512),
    "empty": (0, 0, 256, 256, 512, 512),
    "tail": (128, 256),
    "none": (0, 0),
    "beyond": (128, 640, 1024),
    "unaligned": (1, 130, 130, 401),
    "ones": tuple(range(1, 41)),
    "many": tuple(2 * e for e in range(256)),
}
"""Group ends of an input with 512 tokens."""
ODD_WEIGHTS = ((16, 16), (144, 704), (576, 2048), (3, 256, 400), (5, 400, 144), (2, 3, 144, 272))
"""(..., N, K) with short blocks, with up to two leading dimensions."""
LONG_ROWS = (16384, 20480, 65536, 65552, 131072)
"""Columns of rows at and beyond what one warp, or one program, can hold."""
ODD_TRANSPOSE = ((16, 16), (48, 272), (128, 256), (4096, 1024), (3, 144, 528), (64, 1408, 2048))
"""(..., R, C) with tiles of every shape, partly empty, and more than one matrix."""
ODD_SWIGLU = ((1, 16), (128, 128), (200, 272), (4097, 704), (8192, 1408), (0, 256))
"""(M, hidden) with short blocks, and without tokens."""
ODD_ROUTING = {
    "uneven": [[3, 0, 17, 1], [400, 0, 2, 9]],
    "empty rank": [[0, 0, 0, 0], [5, 16, 130, 1]],
    "one rank": [[7, 8, 9, 0]],
    "one expert": [[40], [0], [1500]],
    "no tokens": [[0, 0], [0, 0]],
    "16B": [[384] * 16] * 4,
    "long": [[2100, 1025, 0], [1, 1024, 4000], [0, 7, 1]],
    "many ranks": [[i * j % 7 for i in range(3)] for j in range(63)],
    "many experts": [[i % 5 * 9 for i in range(130)]],
}
"""Tokens that each rank (outer list) sends to each local expert (inner list)."""
ODD_ROW_LENGTHS = (16, 576, 2048, 7168, 2049)
"""Elements of a permuted row; rows of 2049 are not aligned to 16 bytes."""
RANKS_AND_EXPERTS = ((1, 1), (4, 16), (64, 4), (1, 256))
"""Ranks and local experts whose counts `places_of_tokens` reads."""

SMALL_GEMM = {
    "one tile": (16, 16, 16),
    "one token": (1, 128, 144),
    "ragged tokens": (130, 576, 144),
    "ragged K": (77, 144, 704),
    "ragged N": (9, 704, 48),
    "all ragged": (257, 272, 208),
    "four blocks": (512, 512, 512),
    "long K": (3, 16, 10944),
    "long N": (3, 10944, 16),
    "no token": (0, 32, 48),
}
"""(M, N, K) of products that the CPU computes, in FP64 as well."""
SMALL_GROUPS = {
    "unaligned": (301, (1, 130, 130, 300, 301), False),
    "rows past the end": (260, (5, 200), False),
    "end beyond M": (150, (100, 1000, 2000), False),
    "all in one": (200, (0, 0, 200, 200), False),
    "none in any": (50, (0, 0), False),
    "one group": (129, (129,), False),
    "no token": (0, (0, 0, 0), False),
    "aligned, not said": (384, (128, 128, 384), False),
    "aligned": (384, (128, 128, 384), True),
    "aligned, rows past the end": (300, (0, 128, 256), True),
    "aligned, end beyond M": (200, (128, 256), True),
    "multiples of 16": (90, (16, 48, 48, 80), False),
    "many empty": (140, (0,) * 7 + (3,) + (140,) * 8, False),
}
"""(M, group ends, whether the ops are told that these are aligned), small enough for the CPU."""
SMALL_QUANTIZE = (
    (1, 16),
    (5, 128),
    (130, 144),
    (3, 10944),
    (260, 48),
    (512, 32),
    (0, 64),
    (128, 576),
)
"""(M, K) of quantizers on the CPU."""
