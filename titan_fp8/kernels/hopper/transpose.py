"""The transpose of an FP8 matrix, for dgrad of weights that FSDP2 gathers in FP8.

A program transposes 128 rows of 256 bytes. A thread loads 16 bytes of each of 16 rows, which are 16
bytes of each of 16 rows of the transpose, too. So no byte moves between threads: eight `prmt`
instructions transpose each 4 by 4 bytes in registers. Eight lanes lie along the rows that are read,
so together they write a line of 128 bytes.
"""

import math

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from titan_fp8.kernels.launch import kernel
from titan_fp8.layouts import cdiv

ROWS, WORDS = 128, 64
"""The size of a tile, in rows and in words of four bytes."""
WARPS = 4
MAXNREG = 128
"""More than the kernel needs. Without it the ptxas of Triton 3.6 allocates 80 and spills."""
READ = gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0], [8, 0]],
    [[16, 0], [32, 0], [64, 0], [0, 4], [0, 8]],
    [[0, 16], [0, 32]],
    [],
    [ROWS, WORDS],
)
"""Layout of a tile as it is read, (rows, words)."""
WRITTEN = gl.DistributedLinearLayout(
    [[0, 1], [0, 2], [1, 0], [2, 0]],
    [[0, 4], [0, 8], [0, 16], [4, 0], [8, 0]],
    [[16, 0], [32, 0]],
    [],
    [WORDS, ROWS // 4],
)
"""Layout of every fourth row of the transposed tile: (words of the tile, rows of the tile / 4)."""

TRANSPOSE_4X4 = gl.constexpr("""{
.reg .b32 even<2>, odd<2>;
prmt.b32 even0, $4, $5, 0x5140;
prmt.b32 odd0, $6, $7, 0x5140;
prmt.b32 even1, $4, $5, 0x7362;
prmt.b32 odd1, $6, $7, 0x7362;
prmt.b32 $0, even0, odd0, 0x5410;
prmt.b32 $1, even0, odd0, 0x7632;
prmt.b32 $2, even1, odd1, 0x5410;
prmt.b32 $3, even1, odd1, 0x7632;
}""")
"""Word i of the result has byte i of each of the four operands."""


@kernel()
def transpose_fp8_kernel(q, q_t, R16, C16, READ: gl.constexpr, WRITTEN: gl.constexpr):
    """A tile of q (16 R16, 16 C16 bytes), written to q_t (16 C16, 16 R16 bytes).

    Counting in sixteens tells the compiler that rows start at multiples of 16 bytes.
    """
    RW = R16 * 4
    CW = C16 * 4
    row = gl.program_id(0) * READ.shape[0]
    word = gl.program_id(1) * READ.shape[1]
    matrix = gl.program_id(2).to(gl.int64) * RW * CW * 4
    i = gl.arange(0, READ.shape[0], gl.SliceLayout(1, READ))
    j = gl.arange(0, READ.shape[1], gl.SliceLayout(0, READ))
    inside = (i < RW * 4 - row)[:, None] & (j < CW - word)[None, :]
    tile = q + (matrix + row.to(gl.int64) * CW + word)
    words = gl.load(tile + (i[:, None] * CW + j[None, :]), mask=inside, other=0)

    # w0 to w3 are the words of rows 4n to 4n + 3. Transposing their 4 x 4 bytes gives, for each of
    # four rows of the result, the word of columns 4n to 4n + 3.
    fours = gl.permute(gl.reshape(words, [READ.shape[0] // 4, 2, 2, READ.shape[1]]), (0, 3, 1, 2))
    even, odd = gl.split(fours)
    w0, w2 = gl.split(even)
    w1, w3 = gl.split(odd)
    rows = gl.inline_asm_elementwise(
        TRANSPOSE_4X4, "=r,=r,=r,=r,r,r,r,r", [w0, w1, w2, w3],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip

    i = gl.arange(0, WRITTEN.shape[0], gl.SliceLayout(1, WRITTEN))
    j = gl.arange(0, WRITTEN.shape[1], gl.SliceLayout(0, WRITTEN))
    inside = (i < CW - word)[:, None] & (j < RW - row // 4)[None, :]
    tile = q_t + (matrix + word.to(gl.int64) * 4 * RW + row // 4)
    for k in gl.static_range(4):
        values = gl.convert_layout(gl.permute(rows[k], (1, 0)), WRITTEN)
        gl.store(tile + ((i * 4 + k)[:, None] * RW + j[None, :]), values, mask=inside)


def transpose_fp8(q: Tensor) -> Tensor:
    """q (..., R, C) in FP8, transposed and contiguous: (..., C, R). R and C: multiples of 16."""
    *lead, rows, columns = q.shape
    q_t = q.new_empty(*lead, columns, rows)
    grid = cdiv(rows, ROWS), cdiv(columns, 4 * WORDS), math.prod(lead)
    transpose_fp8_kernel[grid](
        (q, torch.int32), (q_t, torch.int32), rows // 16, columns // 16, READ, WRITTEN,
        maxnreg=MAXNREG, num_warps=WARPS,
    )  # fmt: skip
    return q_t
