// The Python module bagua_syncbn._C. Importing it loads the library, whose static initializers register the kernels.
#include "cpu/loops.h"
#include "cuda/kernels.h"
#include "python.h"

namespace bagua_syncbn::cuda {
// Null in builds without CUDA kernels.
__attribute__((weak)) Support support_of(int32_t device);
}  // namespace bagua_syncbn::cuda

namespace {

// (): returns the instruction set of the CPU kernels.
PyObject* cpu_capability(PyObject* const*) {
  return PyUnicode_FromString(bagua_syncbn::cpu_capability());
}

// (device): returns the device's Support as an integer.
PyObject* cuda_support(PyObject* const* arguments) {
  const auto device = static_cast<int32_t>(bagua_syncbn::integer_of(arguments[0]));
  return PyLong_FromLong(static_cast<long>(bagua_syncbn::cuda::support_of(device)));
}

PyMethodDef methods[] = {
    BAGUA_SYNCBN_METHOD(cpu_capability, 0),
    {nullptr, nullptr, 0, nullptr},
};
PyMethodDef cuda_methods[] = {BAGUA_SYNCBN_METHOD(cuda_support, 1), {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", "Native kernels.", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() {
  PyObject* made = PyModule_Create(&module);
  if (made == nullptr) return nullptr;
  int error = PyModule_AddFunctions(made, bagua_syncbn::exchange::methods);
  if (bagua_syncbn::cuda::support_of != nullptr) error |= PyModule_AddFunctions(made, cuda_methods);
  if (error != 0) Py_CLEAR(made);
  return made;
}
