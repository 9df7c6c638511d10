// The C part of `launch.py` (launch) and of `replay.py` (replay). It follows `step.c`, which
// explains plans and steps.
//
// A launch computes a key from the properties of the arguments that Triton specializes on, looks
// up the plan for this key, and launches. If there is no plan yet, or an empty one, it calls
// `Kernel._launch_first` in Python, which launches through Triton.
//
// An argument is a tensor, a number, None, a constant, or a pair: (tensor, dtype) or (tensor,
// TensorMap), where a TensorMap is the tuple (shape, strides, box, layout).

enum { MAX_KEY = 256 };

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

// Makes the step of a launch and finds the stream. Returns the key, or NULL after an error. If there
// is no plan for the key, or an empty one, `planned` is false.
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
// constexprs. Without `places`, which is None, it launches. Otherwise places[i] is the (slot, offset)
// of the address of argument i, and it returns the step of the launch as bytes, or None if Triton
// launches this kernel.
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

// replay(program, *tensors) clears the start of the workspace, which is the last tensor, and runs
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
  if (count - 1 != tensors || tensors > MAX_ARGUMENTS || slots > MAX_SLOTS)
    return PyErr_Format(PyExc_TypeError, "titan_fp8: a replay takes %d tensors", (int)tensors);
  for (int i = 0; i < tensors; i++)
    if (!address_of(arguments[1 + i], &tensor[i]))
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
     "replay(program, *tensors): see replay.py."},
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
