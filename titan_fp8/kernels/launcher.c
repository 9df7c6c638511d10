// The C part of `launch.py` (Launcher) and of `replay.py` (Replay). It follows `step.c`, which
// explains plans and steps.
//
// A launcher computes a key from the properties of the arguments that Triton specializes on, looks
// up the plan for this key, and launches. If there is no plan yet, or an empty one, it calls
// `Kernel._launch_first` in Python, which launches through Triton.
//
// An argument is a tensor, a number, None, a constant, or a pair: (tensor, dtype) or (tensor,
// TensorMap), where a TensorMap is the tuple (shape, strides, box, layout).

enum { MAX_ARGUMENTS = 64, MAX_KEY = 256, MAX_SLOTS = 128 };

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *first;     // first(key, grid, arguments, options) compiles, launches and adds a plan
  PyObject *plans;     // dict, key -> plan
  PyObject *constants; // a byte for each argument: 1 if it is a constexpr
  PyObject *device;    // device() is the current device
  PyObject *stream;    // stream(device) is its current stream
} Launcher;

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

static PyObject *make_key(Launcher *self, Launch *launch, PyObject *device,
                          PyObject *const *arguments, Py_ssize_t count, PyObject *names) {
  const char *constant = PyBytes_AS_STRING(self->constants);
  if (count < 0 || count > PyBytes_GET_SIZE(self->constants) || count > MAX_ARGUMENTS) {
    PyErr_SetString(PyExc_TypeError, "titan_fp8: a launch has too few or too many arguments");
    return NULL;
  }
  launch->length = 0;
  if (!add_constant(launch, device))
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

// launcher(grid, *arguments, **options) launches. Options may include constexprs.
static PyObject *launcher_call(PyObject *object, PyObject *const *arguments, size_t flags,
                               PyObject *names) {
  Launcher *self = (Launcher *)object;
  Py_ssize_t count = PyVectorcall_NARGS(flags) - 1;
  PyObject *grid = *arguments++;
  Launch launch;
  Step step;
  CUstream stream;
  PyObject *device = PyObject_CallNoArgs(self->device), *key = NULL, *result = NULL;
  if (!device || !ensure_context(PyLong_AsLongLong(device)) || !read_grid(&step, grid) ||
      !(key = make_key(self, &launch, device, arguments, count, names)))
    goto done;
  PyObject *plan = PyDict_GetItemWithError(self->plans, key);
  if (!plan || !PyBytes_GET_SIZE(plan)) {
    if (!PyErr_Occurred())
      result = launch_first(self, key, grid, arguments, count, names);
    goto done;
  }
  if (!read_step(&step, plan, arguments, launch.values, NULL) ||
      !current_stream(self->stream, device, &stream))
    goto done;
  CUresult code;
  const char *what = "";
  Py_BEGIN_ALLOW_THREADS // The driver blocks while the launch queue is full.
  code = run_step(&step, launch.values, stream, &what);
  Py_END_ALLOW_THREADS
  if (succeeded(code, what))
    result = Py_NewRef(Py_None);
done:
  Py_XDECREF(key);
  Py_XDECREF(device);
  return result;
}

// launcher.step(grid, places, *arguments, **options) returns the step of this launch as bytes, or
// None if Triton launches it. places[i] is the (slot, offset) of the address of argument i.
static PyObject *launcher_step(PyObject *object, PyObject *const *arguments, Py_ssize_t count,
                               PyObject *names) {
  Launcher *self = (Launcher *)object;
  Launch launch;
  Step step;
  memset(&step, 0, sizeof step);
  PyObject *device = PyObject_CallNoArgs(self->device), *key = NULL, *result = NULL;
  if (!device || count < 2 || !read_grid(&step, arguments[0]) ||
      !(key = make_key(self, &launch, device, arguments + 2, count - 2, names)))
    goto done;
  PyObject *plan = PyDict_GetItemWithError(self->plans, key);
  if (!plan || !PyBytes_GET_SIZE(plan)) {
    if (!PyErr_Occurred())
      result = Py_NewRef(Py_None);
  } else if (read_step(&step, plan, arguments + 2, launch.values, arguments[1])) {
    result = PyBytes_FromStringAndSize((char *)&step, sizeof step);
  }
done:
  Py_XDECREF(key);
  Py_XDECREF(device);
  return result;
}

static PyMethodDef launcher_methods[] = {
    {"step", (PyCFunction)(void (*)(void))launcher_step, METH_FASTCALL | METH_KEYWORDS,
     "step(grid, places, *arguments, **options): bytes for Replay, or None."},
    {NULL, NULL, 0, NULL},
};

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
    .tp_methods = launcher_methods,
    .tp_new = launcher_new,
};

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *steps;          // bytes: an array of Step
  PyObject *device, *stream; // as in Launcher
  int tensors;               // inputs, outputs and, last, the workspace
  int slots;                 // number of addresses that the steps use
  struct {
    int tensor;
    uint64_t offset;
  } slot[MAX_SLOTS];
  uint64_t zeros; // bytes to clear at the start of the workspace
} Replay;

// replay(*tensors) clears the zeros and launches all steps.
static PyObject *replay_call(PyObject *object, PyObject *const *tensors, size_t flags,
                             PyObject *Py_UNUSED(names)) {
  Replay *self = (Replay *)object;
  uint64_t tensor[MAX_ARGUMENTS], addresses[MAX_SLOTS];
  CUstream stream;
  if (PyVectorcall_NARGS(flags) != self->tensors)
    return PyErr_Format(PyExc_TypeError, "titan_fp8: a replay takes %d tensors", self->tensors);
  for (int i = 0; i < self->tensors; i++)
    if (!address_of(tensors[i], &tensor[i]))
      return NULL;
  for (int i = 0; i < self->slots; i++)
    addresses[i] = tensor[self->slot[i].tensor] + self->slot[i].offset;
  PyObject *device = PyObject_CallNoArgs(self->device);
  bool ready = device && ensure_context(PyLong_AsLongLong(device)) &&
               current_stream(self->stream, device, &stream);
  Py_XDECREF(device);
  if (!ready)
    return NULL;
  const Step *step = (const Step *)PyBytes_AS_STRING(self->steps);
  const Step *end = step + PyBytes_GET_SIZE(self->steps) / sizeof(Step);
  CUresult code = CUDA_SUCCESS;
  const char *what = "clearing the workspace";
  Py_BEGIN_ALLOW_THREADS // The driver blocks while the launch queue is full.
  if (self->zeros)
    code = clear(tensor[self->tensors - 1], 0, self->zeros, stream);
  for (; step < end && code == CUDA_SUCCESS; step++)
    code = run_step(step, addresses, stream, &what);
  Py_END_ALLOW_THREADS
  if (!succeeded(code, what))
    return NULL;
  Py_RETURN_NONE;
}

static PyObject *replay_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
  PyObject *steps, *slots, *device, *stream;
  int tensors;
  unsigned long long zeros;
  if (!PyArg_ParseTuple(args, "SO!iKOO", &steps, &PyTuple_Type, &slots, &tensors, &zeros, &device,
                        &stream))
    return NULL;
  if (tensors < 1 || tensors > MAX_ARGUMENTS || PyTuple_GET_SIZE(slots) > MAX_SLOTS) {
    PyErr_SetString(PyExc_ValueError, "titan_fp8: a replay has too many tensors");
    return NULL;
  }
  Replay *self = (Replay *)type->tp_alloc(type, 0);
  if (!self)
    return NULL;
  self->slots = (int)PyTuple_GET_SIZE(slots);
  for (int i = 0; i < self->slots; i++) {
    unsigned long long offset;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(slots, i), "iK", &self->slot[i].tensor, &offset)) {
      Py_DECREF(self);
      return NULL;
    }
    self->slot[i].offset = offset;
  }
  self->call = replay_call;
  self->steps = Py_NewRef(steps);
  self->device = Py_NewRef(device);
  self->stream = Py_NewRef(stream);
  self->tensors = tensors;
  self->zeros = zeros;
  return (PyObject *)self;
}

static void replay_free(PyObject *object) {
  Replay *self = (Replay *)object;
  Py_XDECREF(self->steps);
  Py_XDECREF(self->device);
  Py_XDECREF(self->stream);
  Py_TYPE(object)->tp_free(object);
}

static PyTypeObject ReplayType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "titan_fp8_launcher.Replay",
    .tp_doc = "Replay(steps, slots, tensors, zeros, device, stream): see replay.py.",
    .tp_basicsize = sizeof(Replay),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Replay, call),
    .tp_call = PyVectorcall_Call,
    .tp_new = replay_new,
    .tp_dealloc = replay_free,
};

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
  if (!made || PyType_Ready(&LauncherType) || PyType_Ready(&ReplayType) ||
      PyModule_AddObjectRef(made, "Launcher", (PyObject *)&LauncherType) ||
      PyModule_AddObjectRef(made, "Replay", (PyObject *)&ReplayType))
    return NULL;
  return made;
}
