// The Python module bagua_syncbn._C. Importing it loads the library, whose static initializers register the kernels.
#include <Python.h>

#include "cpu/spans.h"

namespace {

PyObject* cpu_capability(PyObject*, PyObject*) {
  return PyUnicode_FromString(bagua_syncbn::cpu_capability());
}

PyMethodDef methods[] = {
    {"cpu_capability", cpu_capability, METH_NOARGS, "The instruction set of the CPU kernels in use."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", "Native kernels.", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  return PyModule_Create(&module);
}
