// The Python module bagua_syncbn._C. Importing it loads the library, whose static initializers register the kernels.
#include <Python.h>

#include <exception>

#include "cpu/loops.h"
#include "exchange/python.h"
#include "ops.h"
#if defined(BAGUA_SYNCBN_CUDA)
#include "cuda/kernels.h"
#endif

namespace {

PyObject* cpu_capability(PyObject*, PyObject*) {
  return PyUnicode_FromString(bagua_syncbn::cpu_capability());
}

PyObject* hold_buffers(PyObject*, PyObject* held) {
  bagua_syncbn::holds_buffers = held == Py_True;
  Py_RETURN_NONE;
}

#if defined(BAGUA_SYNCBN_CUDA)
PyObject* turn_off_cuda(PyObject*, PyObject* device) {
  const long index = PyLong_AsLong(device);
  if (PyErr_Occurred() != nullptr) return nullptr;
  bagua_syncbn::cuda::turn_off(static_cast<int32_t>(index));
  Py_RETURN_NONE;
}

PyObject* cuda_support(PyObject*, PyObject* device) {
  const long index = PyLong_AsLong(device);
  if (PyErr_Occurred() != nullptr) return nullptr;
  using namespace bagua_syncbn::cuda;
  try {
    const int support = static_cast<int>(support_of(static_cast<int32_t>(index)));
    return Py_BuildValue("(iii)", support, versions().runtime, versions().driver);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}
#endif

PyMethodDef methods[] = {
    {"cpu_capability", cpu_capability, METH_NOARGS, "The instruction set of the CPU kernels in use."},
    {"hold_buffers", hold_buffers, METH_O, "Whether merges in this thread leave running statistics as they are."},
#if defined(BAGUA_SYNCBN_CUDA)
    {"turn_off_cuda", turn_off_cuda, METH_O,
     "Has ops on a device, on all for -1, call those of bagua_syncbn_fallback."},
    {"cuda_support", cuda_support, METH_O, "Support of a device, and the CUDA versions of library and driver."},
#endif
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", "Native kernels.", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  PyObject* made = PyModule_Create(&module);
  if (made != nullptr && PyModule_AddFunctions(made, bagua_syncbn::exchange::methods) != 0) Py_CLEAR(made);
  return made;
}
