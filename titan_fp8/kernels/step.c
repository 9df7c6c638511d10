// Launches of kernels by the CUDA driver. `launcher.c` follows in the same module.
//
// A plan, written by `launch.plan`, says how a compiled kernel is launched. It is an array of
// int64_t:
//   the name of the kernel in 8 of them, CUfunction, threads per block, bytes of shared memory,
//   then for each kernel parameter: POINTER, NUMBER or BOX, and the index of the argument;
//   a BOX continues with the driver's numbers for the element type and the swizzle, the bytes of an
//   element, the rank, and the dimensions of the box.
//
// A step is a launch with its grid and its numbers, but without addresses: instead of an address
// it has a slot and an offset. `run_step` is given the addresses of the slots.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cuda.h"

enum { MAX_BOXES = 12, MAX_RANK = 5, MAX_PARAMETERS = 128 }; // `launch.py` defines the others

typedef struct {
  int slot;        // of the address; -1 if the parameter is a number
  int box;         // index of the tensor map to make of the address; -1 if there is none
  uint64_t number; // the number, or the offset to add to the address
} Parameter;

typedef struct {
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle;
  cuuint32_t rank, box[MAX_RANK];
  cuuint64_t sizes[MAX_RANK], pitches[MAX_RANK]; // innermost dimension first
} Map;

typedef struct {
  char name[NAME_BYTES];
  CUfunction function;
  unsigned grid[3], threads, shared;
  int count, boxes;
  Parameter parameters[MAX_PARAMETERS];
  Map maps[MAX_BOXES];
} Step;

static PyObject *get_device, *get_stream; // PyTorch's get_device() and get_stream(device)

// If a call of the driver failed, raises an error that says what, and of which kernel or object.
static bool succeeded(CUresult code, const char *what, const char *of) {
  if (code == CUDA_SUCCESS)
    return true;
  const char *why = NULL;
  cuGetErrorString(code, &why);
  PyErr_Format(PyExc_RuntimeError, "titan_fp8: %s %s failed: %s", what, of,
               why ? why : "unknown error");
  return false;
}

// Finds the current device and stream, and gives the thread a CUDA context if it has none. A thread
// of the autograd engine has none until PyTorch calls CUDA from it.
static bool find_stream(int64_t *device, CUstream *stream) {
  CUcontext context = NULL;
  PyObject *index = PyObject_CallNoArgs(get_device), *number = NULL;
  bool found = index && (number = PyObject_CallOneArg(get_stream, index));
  if (found) {
    *device = PyLong_AsLongLong(index);
    *stream = (CUstream)PyLong_AsUnsignedLongLong(number);
  }
  Py_XDECREF(index);
  Py_XDECREF(number);
  return found && !PyErr_Occurred() &&
         succeeded(cuCtxGetCurrent(&context), "reading", "the context") &&
         (context || (succeeded(cuDevicePrimaryCtxRetain(&context, (CUdevice)*device), "making",
                                "a context") &&
                      succeeded(cuCtxSetCurrent(context), "setting", "the context")));
}

static bool read_map(Map *map, const int64_t *word, PyObject *seen_as) {
  PyObject *shape = PyTuple_GET_ITEM(seen_as, 0), *strides = PyTuple_GET_ITEM(seen_as, 1);
  map->type = (CUtensorMapDataType)word[0], map->swizzle = (CUtensorMapSwizzle)word[1];
  map->rank = (cuuint32_t)word[3];
  for (unsigned i = 0; i < map->rank; i++) { // The driver wants the innermost dimension first.
    unsigned at = map->rank - 1 - i;
    map->sizes[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(shape, at));
    map->box[i] = (cuuint32_t)word[4 + at];
    if (i)
      map->pitches[i - 1] = word[2] * PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(strides, at));
  }
  return !PyErr_Occurred();
}

static bool read_grid(Step *step, PyObject *grid) {
  if (!PyTuple_Check(grid) || PyTuple_GET_SIZE(grid) < 1 || PyTuple_GET_SIZE(grid) > 3) {
    PyErr_SetString(PyExc_TypeError, "titan_fp8: a grid must be a tuple of 1 to 3 numbers");
    return false;
  }
  for (Py_ssize_t i = 0; i < 3; i++) {
    unsigned long size = 1;
    if (i < PyTuple_GET_SIZE(grid))
      size = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(grid, i));
    if (size > INT32_MAX && !PyErr_Occurred())
      PyErr_SetString(PyExc_OverflowError, "titan_fp8: a grid has more than 2^31 - 1 programs");
    if (PyErr_Occurred())
      return false;
    step->grid[i] = (unsigned)size;
  }
  return true;
}

// Makes a step from a plan. values[i] is argument i, if it is a number. places[i] is the (slot,
// offset) of the address of argument i; if `places` is None, it is (i, 0).
static bool read_step(Step *step, PyObject *plan, PyObject *const *arguments,
                      const uint64_t *values, PyObject *places) {
  const int64_t *word = (const int64_t *)PyBytes_AS_STRING(plan);
  const int64_t *end = word + PyBytes_GET_SIZE(plan) / sizeof(int64_t);
  memcpy(step->name, word, NAME_BYTES);
  word += NAME_BYTES / sizeof *word;
  step->function = (CUfunction)word[0];
  step->threads = (unsigned)word[1], step->shared = (unsigned)word[2];
  step->count = step->boxes = 0;
  for (word += 3; word < end; word += 2) {
    int64_t kind = word[0], index = word[1];
    if ((kind == BOX && step->boxes == MAX_BOXES) ||
        step->count + 2 * MAX_RANK + 3 > MAX_PARAMETERS) {
      PyErr_Format(PyExc_ValueError, "titan_fp8: %s has too many parameters", step->name);
      return false;
    }
    Parameter *parameter = &step->parameters[step->count++];
    *parameter = (Parameter){.slot = -1, .box = -1};
    if (kind == NUMBER) {
      parameter->number = values[index];
      continue;
    }
    parameter->slot = (int)index;
    unsigned long long offset = 0;
    if (places != Py_None && !PyArg_ParseTuple(PyTuple_GET_ITEM(places, index), "iK",
                                               &parameter->slot, &offset))
      return false;
    parameter->number = offset;
    if (kind == POINTER)
      continue;
    PyObject *seen_as = PyTuple_GET_ITEM(arguments[index], 1);
    parameter->box = step->boxes++;
    if (!read_map(&step->maps[parameter->box], word + 2, seen_as))
      return false;
    int rank = (int)word[5];
    for (int i = 0; i < 2 * rank; i++) {
      PyObject *sizes = PyTuple_GET_ITEM(seen_as, i / rank);
      uint64_t size = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(sizes, i % rank));
      step->parameters[step->count++] = (Parameter){.slot = -1, .box = -1, .number = size};
    }
    word += 4 + rank;
  }
  for (int i = 0; i < 2; i++) // null pointers for scratch memory, which no kernel uses
    step->parameters[step->count++] = (Parameter){.slot = -1, .box = -1};
  return !PyErr_Occurred();
}

// Launches a step. Called without the GIL. If it fails, `what` says at what.
static CUresult run_step(const Step *step, const uint64_t *addresses, CUstream stream,
                         const char **what) {
  static const cuuint32_t ones[MAX_RANK] = {1, 1, 1, 1, 1};
  CUtensorMap encoded[MAX_BOXES];
  uint64_t numbers[MAX_PARAMETERS]; // little-endian: a 4-byte parameter is the first half
  void *parameters[MAX_PARAMETERS];
  const unsigned *grid = step->grid;
  if (!grid[0] || !grid[1] || !grid[2])
    return CUDA_SUCCESS;
  for (int i = 0; i < step->count; i++) {
    const Parameter *from = &step->parameters[i];
    numbers[i] = from->number + (from->slot < 0 ? 0 : addresses[from->slot]);
    parameters[i] = &numbers[i];
    if (from->box < 0)
      continue;
    const Map *map = &step->maps[from->box];
    parameters[i] = &encoded[from->box];
    CUresult code = cuTensorMapEncodeTiled(&encoded[from->box], map->type, map->rank, (void *)numbers[i],
                                 map->sizes, map->pitches, map->box, ones,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, map->swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    *what = "encoding a tensor map of";
    if (code != CUDA_SUCCESS)
      return code;
  }
  *what = "launching";
  return cuLaunchKernel(step->function, grid[0], grid[1], grid[2], step->threads, 1, 1,
                        step->shared, stream, parameters, NULL);
}
