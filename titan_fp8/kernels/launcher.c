// The fast path of `launch.py`. A launch computes a key from the properties of its arguments that
// Triton specialises on, looks up the plan for this key, and launches. Without a plan it calls
// `Kernel._launch_first` in Python.
//
// An argument is a tensor, a number, None, a constant, or a pair: (tensor, dtype) or (tensor,
// TensorMap), where a TensorMap is the tuple (shape, strides, box, layout).
//
// A plan is an array of int64_t, written by `launch.plan`:
//   CUfunction, threads per block, bytes of shared memory,
//   then for each kernel parameter: POINTER, NUMBER or BOX, index of the argument;
//   a BOX continues with the driver's numbers for the element type and the swizzle, the bytes of an
//   element, the rank, and the dimensions of the box.
// An empty plan leaves the launch to Triton.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda.h"

enum { POINTER, NUMBER, BOX };
enum { MAX_ARGUMENTS = 64, MAX_KEY = 256, MAX_BOXES = 12, MAX_RANK = 5, MAX_PARAMETERS = 128 };

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *first;     // first(key, grid, arguments, options) compiles, launches and adds a plan
  PyObject *plans;     // dict, key -> plan
  PyObject *constants; // a byte for each argument: is it a constexpr?
  PyObject *device;    // device() is the current device
  PyObject *stream;    // stream(device) is its current stream
} Launcher;

typedef struct {
  uint64_t words[MAX_KEY]; // the key
  int length;
  uint64_t values[MAX_ARGUMENTS]; // each argument's number or address
} Launch;

static PyObject *str_data_ptr, *str_dtype;
static CUresult (*launch_kernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
                                 unsigned, unsigned, CUstream, void **, void **);
static CUresult (*encode_tiled)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
static CUresult (*error_string)(CUresult, const char **);
static CUresult (*get_context)(CUcontext *);
static CUresult (*set_context)(CUcontext);
static CUresult (*retain_context)(CUcontext *, CUdevice);

static bool succeeded(CUresult code, const char *what) {
  if (code == CUDA_SUCCESS)
    return true;
  const char *why = NULL;
  error_string(code, &why);
  PyErr_Format(PyExc_RuntimeError, "titan_fp8: %s: %s", what, why ? why : "unknown error");
  return false;
}

// Makes sure that the thread has a CUDA context. A thread of the autograd engine has none until
// PyTorch calls CUDA from it.
static bool ensure_context(int64_t device) {
  CUcontext context = NULL;
  return succeeded(get_context(&context), "the current context") &&
         (context || (succeeded(retain_context(&context, (CUdevice)device), "a context") &&
                      succeeded(set_context(context), "a context")));
}

// The add_* functions append to the key.
static bool add_word(Launch *launch, uint64_t word) {
  if (launch->length == MAX_KEY) {
    PyErr_SetString(PyExc_ValueError, "titan_fp8: a launch with too many arguments");
    return false;
  }
  launch->words[launch->length++] = word;
  return true;
}

static bool address_of(PyObject *tensor, uint64_t *address) {
  PyObject *number = PyObject_CallMethodNoArgs(tensor, str_data_ptr);
  if (!number)
    return false;
  *address = PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  return !PyErr_Occurred();
}

// By address: dtypes are objects that live as long as PyTorch.
static bool add_dtype(Launch *launch, PyObject *tensor) {
  PyObject *dtype = PyObject_GetAttr(tensor, str_dtype);
  if (!dtype)
    return false;
  Py_DECREF(dtype);
  return add_word(launch, (uintptr_t)dtype);
}

static bool add_constant(Launch *launch, PyObject *value) {
  // Other objects, mostly layouts, by address, because hashing them is slow. `launch.py` keeps them
  // alive.
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
      PyErr_SetString(PyExc_TypeError, "titan_fp8: a TensorMap has three tuples of one length");
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
    // Triton specialises on 1, on multiples of 16, and on numbers that need 64 bits.
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

static bool encode(CUtensorMap *map, const int64_t *word, uint64_t address, PyObject *shape,
                   PyObject *strides) {
  int64_t type = word[0], swizzle = word[1], bytes = word[2];
  int rank = (int)word[3];
  cuuint64_t sizes[MAX_RANK], pitches[MAX_RANK];
  cuuint32_t box[MAX_RANK], ones[MAX_RANK];
  for (int i = 0; i < rank; i++) { // The driver wants the innermost dimension first.
    int at = rank - 1 - i;
    sizes[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(shape, at));
    box[i] = (cuuint32_t)word[4 + at];
    ones[i] = 1;
    if (i)
      pitches[i - 1] = bytes * PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(strides, at));
  }
  if (PyErr_Occurred())
    return false;
  CUresult code = encode_tiled(map, (CUtensorMapDataType)type, rank, (void *)address, sizes,
                               pitches, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                               (CUtensorMapSwizzle)swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return succeeded(code, "a tensor for TMA");
}

static PyObject *launch_plan(Launcher *self, Launch *launch, PyObject *plan, unsigned *grid,
                             PyObject *const *arguments, PyObject *device) {
  const int64_t *word = (const int64_t *)PyBytes_AS_STRING(plan);
  const int64_t *end = word + PyBytes_GET_SIZE(plan) / sizeof(int64_t);
  CUfunction function = (CUfunction)word[0];
  unsigned threads = (unsigned)word[1], shared = (unsigned)word[2];
  CUtensorMap maps[MAX_BOXES];
  uint64_t numbers[MAX_PARAMETERS] = {0}; // little-endian, so 4-byte parameters start here too
  void *parameters[MAX_PARAMETERS];
  int count = 0, boxes = 0;
  for (word += 3; word < end; word += 2) {
    int64_t kind = word[0], index = word[1];
    if ((kind == BOX && boxes == MAX_BOXES) || count + 2 * MAX_RANK + 3 > MAX_PARAMETERS) {
      PyErr_SetString(PyExc_ValueError, "titan_fp8: a kernel with too many parameters");
      return NULL;
    }
    if (kind != BOX) {
      numbers[count] = launch->values[index];
      parameters[count] = &numbers[count];
      count++;
      continue;
    }
    PyObject *map = PyTuple_GET_ITEM(arguments[index], 1);
    PyObject *shape = PyTuple_GET_ITEM(map, 0), *strides = PyTuple_GET_ITEM(map, 1);
    int rank = (int)word[5];
    if (!encode(&maps[boxes], word + 2, launch->values[index], shape, strides))
      return NULL;
    parameters[count++] = &maps[boxes++];
    for (int i = 0; i < 2 * rank; i++) {
      PyObject *from = i < rank ? shape : strides;
      numbers[count] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(from, i % rank));
      parameters[count] = &numbers[count];
      count++;
    }
    if (PyErr_Occurred())
      return NULL;
    word += 4 + rank;
  }
  for (int i = 0; i < 2; i++, count++) // null pointers for scratch memory, which no kernel uses
    parameters[count] = &numbers[count];

  PyObject *stream = PyObject_CallOneArg(self->stream, device);
  if (!stream)
    return NULL;
  CUstream handle = (CUstream)PyLong_AsUnsignedLongLong(stream);
  Py_DECREF(stream);
  if (PyErr_Occurred())
    return NULL;
  CUresult code = CUDA_SUCCESS;
  if (grid[0] && grid[1] && grid[2]) {
    Py_BEGIN_ALLOW_THREADS // The call blocks while the launch queue is full.
    code = launch_kernel(function, grid[0], grid[1], grid[2], threads, 1, 1, shared, handle,
                         parameters, NULL);
    Py_END_ALLOW_THREADS
  }
  if (!succeeded(code, "a launch"))
    return NULL;
  Py_RETURN_NONE;
}

static PyObject *launch_first(Launcher *self, PyObject *key, PyObject *grid,
                              PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
  PyObject *values = PyTuple_New(count), *options = PyDict_New(), *result = NULL;
  if (!values || !options)
    goto done;
  for (Py_ssize_t i = 0; i < count; i++)
    PyTuple_SET_ITEM(values, i, Py_NewRef(arguments[i]));
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++)
    if (PyDict_SetItem(options, PyTuple_GET_ITEM(names, i), arguments[count + i]))
      goto done;
  result = PyObject_CallFunctionObjArgs(self->first, key, grid, values, options, NULL);
done:
  Py_XDECREF(values);
  Py_XDECREF(options);
  return result;
}

// launcher(grid, *arguments, **options): options may include constexprs.
static PyObject *launcher_call(PyObject *object, PyObject *const *arguments, size_t flags,
                               PyObject *names) {
  Launcher *self = (Launcher *)object;
  Py_ssize_t count = PyVectorcall_NARGS(flags) - 1;
  const char *constant = PyBytes_AS_STRING(self->constants);
  if (count < 0 || count > PyBytes_GET_SIZE(self->constants) || count > MAX_ARGUMENTS) {
    PyErr_SetString(PyExc_TypeError, "titan_fp8: a launch with too few or too many arguments");
    return NULL;
  }
  PyObject *grid = *arguments++;
  unsigned sizes[3] = {1, 1, 1};
  if (!PyTuple_Check(grid) || PyTuple_GET_SIZE(grid) < 1 || PyTuple_GET_SIZE(grid) > 3) {
    PyErr_SetString(PyExc_TypeError, "titan_fp8: a grid is a tuple of 1 to 3 numbers");
    return NULL;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(grid); i++) {
    unsigned long size = PyLong_AsUnsignedLong(PyTuple_GET_ITEM(grid, i));
    if (size > INT32_MAX && !PyErr_Occurred())
      PyErr_SetString(PyExc_OverflowError, "titan_fp8: a grid of more than 2^31 - 1 programs");
    if (PyErr_Occurred())
      return NULL;
    sizes[i] = (unsigned)size;
  }

  PyObject *device = PyObject_CallNoArgs(self->device), *key = NULL, *result = NULL;
  if (!device)
    return NULL;
  Launch launch;
  launch.length = 0;
  if (!ensure_context(PyLong_AsLongLong(device)) || !add_constant(&launch, device))
    goto done;
  for (Py_ssize_t i = 0; i < count; i++)
    if (!(constant[i] ? add_constant(&launch, arguments[i])
                      : add_argument(&launch, arguments[i], &launch.values[i])))
      goto done;
  for (Py_ssize_t i = 0; names && i < PyTuple_GET_SIZE(names); i++)
    if (!add_word(&launch, (uint64_t)PyObject_Hash(PyTuple_GET_ITEM(names, i))) ||
        !add_constant(&launch, arguments[count + i]))
      goto done;
  key = PyBytes_FromStringAndSize((char *)launch.words, launch.length * sizeof(uint64_t));
  if (!key)
    goto done;
  PyObject *plan = PyDict_GetItemWithError(self->plans, key);
  if (plan && PyBytes_GET_SIZE(plan))
    result = launch_plan(self, &launch, plan, sizes, arguments, device);
  else if (!PyErr_Occurred())
    result = launch_first(self, key, grid, arguments, count, names);
done:
  Py_XDECREF(key);
  Py_DECREF(device);
  return result;
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
  PyObject *first, *plans, *constants, *device, *stream;
  if (!PyArg_ParseTuple(args, "OO!SOO", &first, &PyDict_Type, &plans, &constants, &device,
                        &stream))
    return NULL;
  Launcher *self = (Launcher *)type->tp_alloc(type, 0);
  if (!self)
    return NULL;
  self->call = launcher_call;
  self->first = Py_NewRef(first);
  self->plans = Py_NewRef(plans);
  self->constants = Py_NewRef(constants);
  self->device = Py_NewRef(device);
  self->stream = Py_NewRef(stream);
  return (PyObject *)self;
}

static PyTypeObject LauncherType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "titan_fp8_launcher.Launcher",
    .tp_doc = "Launcher(first, plans, constants, device, stream); never freed.",
    .tp_basicsize = sizeof(Launcher),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Launcher, call),
    .tp_call = PyVectorcall_Call,
    .tp_new = launcher_new,
};

static PyObject *load_driver(PyObject *Py_UNUSED(module), PyObject *path) {
  const struct {
    const char *name;
    void **function;
  } symbols[] = {
      {"cuLaunchKernel", (void **)&launch_kernel},
      {"cuTensorMapEncodeTiled", (void **)&encode_tiled},
      {"cuGetErrorString", (void **)&error_string},
      {"cuCtxGetCurrent", (void **)&get_context},
      {"cuCtxSetCurrent", (void **)&set_context},
      {"cuDevicePrimaryCtxRetain", (void **)&retain_context},
  };
  const char *name = PyUnicode_AsUTF8(path);
  if (!name)
    return NULL;
  void *driver = dlopen(name, RTLD_LAZY);
  for (size_t i = 0; driver && i < sizeof symbols / sizeof *symbols; i++)
    if (!(*symbols[i].function = dlsym(driver, symbols[i].name)))
      driver = NULL;
  if (!driver)
    return PyErr_Format(PyExc_RuntimeError, "titan_fp8: CUDA's driver: %s", dlerror());
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"load_driver", load_driver, METH_O, "load_driver(path): call before the first launch."},
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
  PyObject *made = PyModule_Create(&module);
  if (!made || PyType_Ready(&LauncherType) ||
      PyModule_AddObjectRef(made, "Launcher", (PyObject *)&LauncherType))
    return NULL;
  return made;
}
