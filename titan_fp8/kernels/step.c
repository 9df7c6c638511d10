// Launches of kernels by the CUDA driver. `launcher.c` follows in the same module.
//
// A plan, written by `launch.plan`, says how a compiled kernel is launched. It is an array of
// int64_t:
//   CUfunction, threads per block, bytes of shared memory,
//   then for each kernel parameter: POINTER, NUMBER or BOX, and the index of the argument;
//   a BOX continues with the driver's numbers for the element type and the swizzle, the bytes of an
//   element, the rank, and the dimensions of the box.
//
// A step is a launch with its grid and its numbers, but without addresses: instead of an address
// it has a slot and an offset. `run_step` is given the addresses of the slots.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cuda.h"

enum { POINTER, NUMBER, BOX };
enum { MAX_BOXES = 12, MAX_RANK = 5, MAX_PARAMETERS = 128 };

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
  CUfunction function;
  unsigned grid[3], threads, shared;
  int count, boxes;
  Parameter parameters[MAX_PARAMETERS];
  Map maps[MAX_BOXES];
} Step;

static CUresult (*launch_kernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                 unsigned, unsigned, CUstream, void **, void **);
static CUresult (*encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static CUresult (*clear)(CUdeviceptr, unsigned char, size_t, CUstream);
static CUresult (*error_string)(CUresult, const char **);
static CUresult (*get_context)(CUcontext *);
static CUresult (*set_context)(CUcontext);
static CUresult (*retain_context)(CUcontext *, CUdevice);
static PyObject *get_device, *get_stream; // PyTorch's get_device() and get_stream(device)

static bool succeeded(CUresult code, const char *what) {
  if (code == CUDA_SUCCESS)
    return true;
  const char *why = NULL;
  error_string(code, &why);
  PyErr_Format(PyExc_RuntimeError, "titan_fp8: %s failed: %s", what, why ? why : "unknown error");
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
  return found && !PyErr_Occurred() && succeeded(get_context(&context), "reading the context") &&
         (context || (succeeded(retain_context(&context, (CUdevice)*device), "making a context") &&
                      succeeded(set_context(context), "setting the context")));
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
// offset) of the address of argument i; without `places` it is (i, 0).
static bool read_step(Step *step, PyObject *plan, PyObject *const *arguments,
                      const uint64_t *values, PyObject *places) {
  const int64_t *word = (const int64_t *)PyBytes_AS_STRING(plan);
  const int64_t *end = word + PyBytes_GET_SIZE(plan) / sizeof(int64_t);
  step->function = (CUfunction)word[0];
  step->threads = (unsigned)word[1], step->shared = (unsigned)word[2];
  step->count = step->boxes = 0;
  for (word += 3; word < end; word += 2) {
    int64_t kind = word[0], index = word[1];
    if ((kind == BOX && step->boxes == MAX_BOXES) ||
        step->count + 2 * MAX_RANK + 3 > MAX_PARAMETERS) {
      PyErr_SetString(PyExc_ValueError, "titan_fp8: a kernel has too many parameters");
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
    if (places && !PyArg_ParseTuple(PyTuple_GET_ITEM(places, index), "iK", &parameter->slot,
                                    &offset))
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
    CUresult code = encode_tiled(&encoded[from->box], map->type, map->rank, (void *)numbers[i],
                                 map->sizes, map->pitches, map->box, ones,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, map->swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    *what = "encoding a tensor map";
    if (code != CUDA_SUCCESS)
      return code;
  }
  *what = "launching a kernel";
  return launch_kernel(step->function, grid[0], grid[1], grid[2], step->threads, 1, 1,
                       step->shared, stream, parameters, NULL);
}

static PyObject *load_driver(PyObject *Py_UNUSED(module), PyObject *args) {
  const struct {
    const char *name;
    void **function;
  } symbols[] = {
      {"cuLaunchKernel", (void **)&launch_kernel},
      {"cuTensorMapEncodeTiled", (void **)&encode_tiled},
      {"cuMemsetD8Async", (void **)&clear},
      {"cuGetErrorString", (void **)&error_string},
      {"cuCtxGetCurrent", (void **)&get_context},
      {"cuCtxSetCurrent", (void **)&set_context},
      {"cuDevicePrimaryCtxRetain", (void **)&retain_context},
  };
  const char *name;
  PyObject *device, *stream;
  if (!PyArg_ParseTuple(args, "sOO", &name, &device, &stream))
    return NULL;
  void *driver = dlopen(name, RTLD_LAZY);
  for (size_t i = 0; driver && i < sizeof symbols / sizeof *symbols; i++)
    if (!(*symbols[i].function = dlsym(driver, symbols[i].name)))
      driver = NULL;
  if (!driver)
    return PyErr_Format(PyExc_RuntimeError, "titan_fp8: no CUDA driver: %s", dlerror());
  get_device = Py_NewRef(device), get_stream = Py_NewRef(stream);
  Py_RETURN_NONE;
}
