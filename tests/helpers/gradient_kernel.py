"""The kernels that copy and sum gradients as PyTorch ops, for the CPU."""


class CopyGradient:
    def __getitem__(self, grid):
        def launch(gradient, buffer, size, offset, stride, tile, layout, num_warps):
            blocks, ranks = grid
            assert (blocks - 1) * tile < size <= blocks * tile
            for rank in range(ranks):
                part = gradient.flatten()[rank * size : (rank + 1) * size]
                start = rank * stride + offset
                buffer[start : start + size] = part.to(buffer.dtype)

        return launch


class SumGradients:
    def __getitem__(self, grid):
        def launch(out, own, received, size, rank, others, scale, tile, layout, num_warps):
            (blocks,) = grid
            assert (blocks - 1) * tile < size <= blocks * tile
            parts = [*received.view(others, size)]
            parts.insert(rank, own)
            out.zero_()
            for part in parts:
                out += part.float() * scale

        return launch
