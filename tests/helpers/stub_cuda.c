// Replaces the CUDA driver in tests. `record` holds the arguments of the last call, and the results
// that calls return.
//
// A CUfunction points to int64_t numbers: how many parameters the kernel has, and the bytes of
// each. A tensor map holds the arguments that it was encoded from.

#include <stdint.h>
#include <string.h>

#include "cuda.h"

struct {
  CUresult launched, encoded; // results to return
  int32_t launches, bytes;
  uint64_t function, stream;
  uint32_t grid[3], block[3], shared;
  uint8_t parameters[2048];
} record;

typedef struct {
  void *base;
  cuuint64_t sizes[5], strides[4];
  cuuint32_t box[5], steps[5];
  uint8_t type, rank, interleave, swizzle, promotion, fill;
} Map;
_Static_assert(sizeof(Map) == sizeof(CUtensorMap), "a map holds the arguments");

static _Thread_local CUcontext current;

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                        unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                        CUstream stream, void **parameters, void **extra) {
  if (!current || extra)
    return CUDA_ERROR_INVALID_CONTEXT;
  if (record.launched != CUDA_SUCCESS)
    return record.launched;
  record.launches++;
  record.function = (uint64_t)function;
  record.stream = (uint64_t)stream;
  memcpy(record.grid, (unsigned[]){grid_x, grid_y, grid_z}, sizeof record.grid);
  memcpy(record.block, (unsigned[]){block_x, block_y, block_z}, sizeof record.block);
  record.shared = shared;
  record.bytes = 0;
  const int64_t *sizes = (const int64_t *)function;
  for (int64_t i = 0; i < sizes[0]; i++) {
    memcpy(record.parameters + record.bytes, parameters[i], sizes[i + 1]);
    record.bytes += sizes[i + 1];
  }
  return CUDA_SUCCESS;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *out, CUtensorMapDataType type, cuuint32_t rank,
                                void *base, const cuuint64_t *sizes, const cuuint64_t *strides,
                                const cuuint32_t *box, const cuuint32_t *steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  if ((uintptr_t)out % 64 || rank < 1 || rank > 5)
    return CUDA_ERROR_INVALID_VALUE;
  if (record.encoded != CUDA_SUCCESS)
    return record.encoded;
  Map map = {.base = base, .type = type, .rank = rank, .interleave = interleave};
  map.swizzle = swizzle;
  map.promotion = promotion;
  map.fill = fill;
  memcpy(map.sizes, sizes, rank * sizeof *sizes);
  memcpy(map.strides, strides, (rank - 1) * sizeof *strides);
  memcpy(map.box, box, rank * sizeof *box);
  memcpy(map.steps, steps, rank * sizeof *steps);
  memcpy(out, &map, sizeof map);
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char **text) {
  *text = code == CUDA_ERROR_INVALID_VALUE ? "invalid argument" : NULL;
  return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  current = context;
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)(intptr_t)(1000 + device);
  return CUDA_SUCCESS;
}
