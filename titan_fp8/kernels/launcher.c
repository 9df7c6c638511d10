// The C part of `launch.py`: launches a kernel by the CUDA driver.
//
// It computes a key from the properties of the arguments that Triton specializes on, and looks up
// the plan for this key.
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

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "cuda.h"

enum { MAX_RANK = 5, MAX_KEY = 256 };
// `launch.py` defines the other constants.

typedef struct {
  uint64_t words[MAX_KEY]; // the key
  int length;
  uint64_t values[MAX_ARGUMENTS]; // each argument's number or address
} Launch;

static PyObject *str_data_ptr, *str_dtype;

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

// Gives the thread a CUDA context if it has none. A thread of the autograd engine has none until
// PyTorch calls CUDA from it.
static bool has_context(CUdevice device) {
  CUcontext context = NULL;
  return succeeded(cuCtxGetCurrent(&context), "reading", "the context") &&
         (context ||
          (succeeded(cuDevicePrimaryCtxRetain(&context, device), "making", "a context") &&
           succeeded(cuCtxSetCurrent(context), "setting", "the context")));
}

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

static PyObject *make_key(Launch *launch, int device, PyObject *constants,
                          PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
  const char *constant = PyBytes_AS_STRING(constants);
  if (count > PyBytes_GET_SIZE(constants) || count > MAX_ARGUMENTS) {
    PyErr_SetString(PyExc_TypeError, "titan_fp8: a launch has too many arguments");
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

// Encodes what the words of a BOX say. `sizes` becomes the map's shape, and then its strides.
static bool encode(CUtensorMap *map, const int64_t *word, PyObject *seen_as, uint64_t address,
                   uint64_t *sizes, const char *name) {
  static const cuuint32_t ones[MAX_RANK] = {1, 1, 1, 1, 1};
  cuuint64_t shape[MAX_RANK], pitches[MAX_RANK];
  cuuint32_t box[MAX_RANK], rank = (cuuint32_t)word[3];
  for (unsigned i = 0; i < 2 * rank; i++)
    sizes[i] = PyLong_AsUnsignedLongLong(
        PyTuple_GET_ITEM(PyTuple_GET_ITEM(seen_as, i / rank), i % rank));
  for (unsigned i = 0; i < rank; i++) { // The driver wants the innermost dimension first.
    unsigned at = rank - 1 - i;
    shape[i] = sizes[at], box[i] = (cuuint32_t)word[4 + at];
    if (i)
      pitches[i - 1] = word[2] * sizes[rank + at];
  }
  return !PyErr_Occurred() &&
         succeeded(cuTensorMapEncodeTiled(
                       map, (CUtensorMapDataType)word[0], rank, (void *)address, shape, pitches,
                       box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, (CUtensorMapSwizzle)word[1],
                       CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                   "encoding a tensor map of", name);
}

// Launches by a plan; values[i] is the number or address of argument i.
static bool run(PyObject *plan, PyObject *const *arguments, const uint64_t *values,
                const unsigned *grid, CUstream stream) {
  const char *name = PyBytes_AS_STRING(plan);
  const int64_t *word = (const int64_t *)(name + NAME_BYTES), *head = word;
  const int64_t *end = (const int64_t *)(name + PyBytes_GET_SIZE(plan));
  CUtensorMap maps[MAX_BOXES], *map = maps;
  // Little-endian: a 4-byte parameter is the first half. The last two parameters are pointers to
  // scratch memory, which no kernel uses.
  uint64_t numbers[MAX_PARAMETERS] = {0};
  void *parameters[MAX_PARAMETERS];
  int count = 0;
  for (int i = 0; i < MAX_PARAMETERS; i++)
    parameters[i] = &numbers[i];
  for (word += 3; word < end; word += 2) {
    int64_t kind = word[0], index = word[1];
    numbers[count++] = values[index];
    if (kind != BOX)
      continue;
    if (!encode(map, word + 2, PyTuple_GET_ITEM(arguments[index], 1), values[index],
                &numbers[count], name))
      return false;
    parameters[count - 1] = map++;
    count += 2 * (int)word[5];
    word += 4 + word[5];
  }
  CUresult code;
  Py_BEGIN_ALLOW_THREADS // The driver blocks while the launch queue is full.
  code = cuLaunchKernel((CUfunction)head[0], grid[0], grid[1], grid[2], (unsigned)head[1], 1, 1,
                        (unsigned)head[2], stream, parameters, NULL);
  Py_END_ALLOW_THREADS
  return succeeded(code, "launching", name);
}

// launch(plans, constants, device, stream, grid, *arguments, **options) returns None, or the key if
// it has launched nothing, because there is no plan for it, or an empty one. `constants` has a byte
// for each argument: 1 if it is a constexpr. Options may include constexprs.
static PyObject *launch(PyObject *Py_UNUSED(module), PyObject *const *arguments, Py_ssize_t count,
                        PyObject *names) {
  PyObject *plans = arguments[0], *constants = arguments[1], *grid = arguments[4];
  CUdevice device = (CUdevice)PyLong_AsLong(arguments[2]);
  CUstream stream = (CUstream)PyLong_AsUnsignedLongLong(arguments[3]);
  int size[3] = {1, 1, 1};
  arguments += 5, count -= 5;
  if (!PyTuple_Check(grid))
    PyErr_SetString(PyExc_TypeError, "titan_fp8: a grid must be a tuple of 1 to 3 numbers");
  Launch launch;
  if (PyErr_Occurred() || !PyArg_ParseTuple(grid, "i|ii:grid", &size[0], &size[1], &size[2]))
    return NULL;
  PyObject *key = make_key(&launch, device, constants, arguments, count, names);
  PyObject *plan = key ? PyDict_GetItemWithError(plans, key) : NULL;
  if (!PyErr_Occurred() && (!plan || !PyBytes_GET_SIZE(plan)))
    return key;
  Py_XDECREF(key);
  if (PyErr_Occurred())
    return NULL;
  const unsigned programs[3] = {(unsigned)size[0], (unsigned)size[1], (unsigned)size[2]};
  bool is_empty = !size[0] || !size[1] || !size[2];
  if (!is_empty && (!has_context(device) || !run(plan, arguments, launch.values, programs, stream)))
    return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL | METH_KEYWORDS,
     "launch(plans, constants, device, stream, grid, *arguments, **options)"},
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
