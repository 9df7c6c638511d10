// The C part of `launch.py` (launch) and of `replay.py` (replay): launches by the CUDA driver.
//
// A launch computes a key from the properties of the arguments that Triton specializes on, looks
// up the plan for this key, makes a step and runs it. If there is no plan yet, or an empty one, it
// calls `Kernel._launch_first` in Python, which launches through Triton.
//
// An argument is a tensor, a number, None, a constant, or a pair: (tensor, dtype) or (tensor,
// TensorMap), where a TensorMap is the tuple (shape, strides, box, layout).
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

enum { MAX_BOXES = 12, MAX_RANK = 5, MAX_PARAMETERS = 128, MAX_KEY = 256 };
// `launch.py` defines the other constants.

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
  int size[3] = {1, 1, 1};
  if (!PyArg_ParseTuple(grid, "i|ii", &size[0], &size[1], &size[2]))
    return false;
  for (int i = 0; i < 3; i++)
    step->grid[i] = (unsigned)size[i];
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
    CUresult code = cuTensorMapEncodeTiled(
        &encoded[from->box], map->type, map->rank, (void *)numbers[i], map->sizes, map->pitches,
        map->box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, map->swizzle,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    *what = "encoding a tensor map of";
    if (code != CUDA_SUCCESS)
      return code;
  }
  *what = "launching";
  return cuLaunchKernel(step->function, grid[0], grid[1], grid[2], step->threads, 1, 1,
                        step->shared, stream, parameters, NULL);
}

// What is known of a kernel, the first three arguments of launch.
typedef struct {
  PyObject *first;     // first(key, grid, *arguments, **options) compiles, launches and adds a plan
  PyObject *plans;     // dict, key -> plan
  PyObject *constants; // a byte for each argument: 1 if it is a constexpr
} Kernel;

typedef struct {
  uint64_t words[MAX_KEY]; // the key
  int length;
  uint64_t values[MAX_ARGUMENTS]; // each argument's number or address
} Launch;

static PyObject *str_data_ptr, *str_dtype;

static bool address_of(PyObject *tensor, uint64_t *address) {
  PyObject *number = PyObject_CallMethodNoArgs(tensor, str_data_ptr);
  if (!number)
    return false;
  *address = PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  return !PyErr_Occurred();
}

// The add_* functions append to the key.
static bool add_word(Launch *launch, uint64_t word) {
  if (launch->length == MAX_KEY) {
    PyErr_SetString(PyExc_ValueError, "titan_fp8: a launch has too many arguments");
    return false;
  }
  launch->words[launch->length++] = word;
  return true;
}

// Adds the address of the dtype, an object that lives as long as PyTorch.
static bool add_dtype(Launch *launch, PyObject *tensor) {
  PyObject *dtype = PyObject_GetAttr(tensor, str_dtype);
  if (!dtype)
    return false;
  Py_DECREF(dtype);
  return add_word(launch, (uintptr_t)dtype);
}

static bool add_constant(Launch *launch, PyObject *value) {
  if (PyFloat_CheckExact(value)) { // By its bits: 0.0 is not -0.0, and a NaN is itself.
    double number = PyFloat_AS_DOUBLE(value);
    uint64_t bits;
    memcpy(&bits, &number, sizeof bits);
    return add_word(launch, 'f') && add_word(launch, bits);
  }
  // Other objects than numbers, mostly layouts, are identified by their address, because hashing
  // them is slow. `launch.py` keeps them alive.
  if (!PyLong_Check(value))
    return add_word(launch, 'o') && add_word(launch, (uintptr_t)value);
  int64_t number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred())
    return false;
  return add_word(launch, PyBool_Check(value) ? 'b' : 'i') && add_word(launch, (uint64_t)number);
}

static bool add_tensor_map(Launch *launch, PyObject *map) {
  PyObject *box = PyTuple_GET_ITEM(map, 2);
  for (int i = 0; i < 3; i++) {
    PyObject *sizes = PyTuple_GET_ITEM(map, i);
    if (!PyTuple_Check(sizes) || PyTuple_GET_SIZE(sizes) != PyTuple_Size(box)) {
      PyErr_SetString(PyExc_TypeError,
                      "titan_fp8: a TensorMap must have shape, strides and box of one length");
      return false;
    }
  }
  if (!add_word(launch, 'B') || !add_word(launch, (uintptr_t)PyTuple_GET_ITEM(map, 3)))
    return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(box); i++)
    if (!add_constant(launch, PyTuple_GET_ITEM(box, i)))
      return false;
  return true;
}

static bool add_argument(Launch *launch, PyObject *value, uint64_t *out) {
  if (value == Py_None || PyBool_Check(value))
    return add_constant(launch, value);
  if (PyLong_Check(value)) {
    int64_t number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred())
      return false;
    *out = (uint64_t)number;
    // Triton specializes on 1, on multiples of 16, and on numbers that need 64 bits.
    bool wide = number > INT32_MAX || number < INT32_MIN;
    return add_word(launch, number == 1 ? 1 : (number % 16 == 0) * 16 + wide * 32);
  }
  if (!PyTuple_Check(value))
    return add_dtype(launch, value) && address_of(value, out) && add_word(launch, *out % 16 == 0);
  if (PyTuple_GET_SIZE(value) != 2) {
    PyErr_SetString(PyExc_TypeError, "titan_fp8: a pair is (tensor, dtype) or (tensor, TensorMap)");
    return false;
  }
  PyObject *tensor = PyTuple_GET_ITEM(value, 0), *seen_as = PyTuple_GET_ITEM(value, 1);
  if (PyTuple_Check(seen_as) && PyTuple_GET_SIZE(seen_as) == 4)
    return add_dtype(launch, tensor) && add_tensor_map(launch, seen_as) && address_of(tensor, out);
  return add_word(launch, (uintptr_t)seen_as) && address_of(tensor, out) &&
         add_word(launch, *out % 16 == 0);
}

static PyObject *launch_first(const Kernel *self, PyObject *key, PyObject *grid,
                              PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
  // A key has at least three words for each name, so all arguments fit.
  PyObject *all[2 + MAX_ARGUMENTS + MAX_KEY] = {key, grid};
  Py_ssize_t given = count + (names ? PyTuple_GET_SIZE(names) : 0);
  memcpy(all + 2, arguments, given * sizeof *all);
  return PyObject_Vectorcall(self->first, all, 2 + count, names);
}

static PyObject *make_key(const Kernel *self, Launch *launch, int64_t device,
                          PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
  const char *constant = PyBytes_AS_STRING(self->constants);
  if (count < 0 || count > PyBytes_GET_SIZE(self->constants) || count > MAX_ARGUMENTS) {
    PyErr_SetString(PyExc_TypeError, "titan_fp8: a launch has too few or too many arguments");
    return NULL;
  }
  launch->length = 0;
  if (!add_word(launch, (uint64_t)device))
    return NULL;
  for (Py_ssize_t i = 0; i < count; i++)
    if (!(constant[i] ? add_constant(launch, arguments[i])
                      : add_argument(launch, arguments[i], &launch->values[i])))
      return NULL;
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++)
    if (!add_word(launch, (uint64_t)PyObject_Hash(PyTuple_GET_ITEM(names, i))) ||
        !add_constant(launch, arguments[count + i]))
      return NULL;
  return PyBytes_FromStringAndSize((char *)launch->words, launch->length * sizeof(uint64_t));
}

// Makes the step of a launch and finds the stream. Returns the key, or NULL after an error. If
// there is no plan for the key, or an empty one, `planned` is false.
static PyObject *make_step(const Kernel *self, Launch *launch, Step *step, CUstream *stream,
                           bool *planned, PyObject *grid, PyObject *places,
                           PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
  int64_t device;
  PyObject *key = NULL;
  memset(step, 0, sizeof *step);
  if (!find_stream(&device, stream) || !read_grid(step, grid) ||
      !(key = make_key(self, launch, device, arguments, count, names)))
    return NULL;
  PyObject *plan = PyDict_GetItemWithError(self->plans, key);
  *planned = plan && PyBytes_GET_SIZE(plan);
  if (PyErr_Occurred() || (*planned && !read_step(step, plan, arguments, launch->values, places)))
    Py_CLEAR(key);
  return key;
}

// launch(first, plans, constants, grid, places, *arguments, **options). Options may include
// constexprs. If `places` is None, it launches. Otherwise places[i] is the (slot, offset) of the
// address of argument i, and it returns the step of the launch as bytes, or None if Triton launches
// this kernel.
static PyObject *launch(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count,
                        PyObject *names) {
  const Kernel self = {arguments[0], arguments[1], arguments[2]};
  PyObject *grid = arguments[3], *places = arguments[4], *result = NULL;
  arguments += 5, count -= 5;
  Launch launch;
  Step step;
  CUstream stream;
  bool planned;
  PyObject *key = make_step(&self, &launch, &step, &stream, &planned, grid, places, arguments,
                            count, names);
  if (!key)
    return NULL;
  if (places != Py_None) {
    result = planned ? PyBytes_FromStringAndSize((char *)&step, sizeof step) : Py_NewRef(Py_None);
  } else if (!planned) {
    result = launch_first(&self, key, grid, arguments, count, names);
  } else {
    CUresult code;
    const char *what = "";
    Py_BEGIN_ALLOW_THREADS // The driver blocks while the launch queue is full.
    code = run_step(&step, launch.values, stream, &what);
    Py_END_ALLOW_THREADS
    if (succeeded(code, what, step.name))
      result = Py_NewRef(Py_None);
  }
  Py_DECREF(key);
  return result;
}

// replay(program, tensors) clears the start of the workspace, which is the last tensor, and runs
// all steps. The program, bytes made by `replay.py`, is an array of int64_t: the numbers of tensors
// and of slots, the bytes to clear, and for each slot its tensor and an offset; then the steps.
static PyObject *replay(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count) {
  const char *program = PyBytes_AsString(arguments[0]);
  if (!program)
    return NULL;
  const int64_t *word = (const int64_t *)program;
  int64_t tensors = word[0], slots = word[1], zeros = word[2], device;
  uint64_t tensor[MAX_ARGUMENTS], addresses[MAX_SLOTS];
  CUstream stream;
  if (count != 2 || PyList_Size(arguments[1]) != tensors || tensors > MAX_ARGUMENTS ||
      slots > MAX_SLOTS)
    return PyErr_Format(PyExc_TypeError, "titan_fp8: a replay takes %d tensors", (int)tensors);
  for (int i = 0; i < tensors; i++)
    if (!address_of(PyList_GET_ITEM(arguments[1], i), &tensor[i]))
      return NULL;
  for (int i = 0; i < slots; i++)
    addresses[i] = tensor[word[3 + 2 * i]] + (uint64_t)word[4 + 2 * i];
  if (!find_stream(&device, &stream))
    return NULL;
  const Step *step = (const Step *)(word + 3 + 2 * slots);
  const Step *end = (const Step *)(program + PyBytes_GET_SIZE(arguments[0]));
  CUresult code = CUDA_SUCCESS;
  const char *what = "clearing", *of = "the workspace";
  Py_BEGIN_ALLOW_THREADS // The driver blocks while the launch queue is full.
  if (zeros)
    code = cuMemsetD8Async(tensor[tensors - 1], 0, (size_t)zeros, stream);
  for (; step < end && code == CUDA_SUCCESS; step++) {
    of = step->name;
    code = run_step(step, addresses, stream, &what);
  }
  Py_END_ALLOW_THREADS
  if (!succeeded(code, what, of))
    return NULL;
  Py_RETURN_NONE;
}

static PyObject *set_up(PyObject *Py_UNUSED(module), PyObject *const *arguments,
                        Py_ssize_t Py_UNUSED(count)) {
  get_device = Py_NewRef(arguments[0]), get_stream = Py_NewRef(arguments[1]);
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"set_up", (PyCFunction)(void (*)(void))set_up, METH_FASTCALL,
     "set_up(get_device, get_stream): call before the first launch."},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL | METH_KEYWORDS,
     "launch(first, plans, constants, grid, places, *arguments, **options)"},
    {"replay", (PyCFunction)(void (*)(void))replay, METH_FASTCALL,
     "replay(program, tensors): see replay.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "titan_fp8_launcher",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit_titan_fp8_launcher(void) {
  str_data_ptr = PyUnicode_InternFromString("data_ptr");
  str_dtype = PyUnicode_InternFromString("dtype");
  return PyModule_Create(&module);
}
