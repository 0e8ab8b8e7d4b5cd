// Helpers for the functions of bagua_syncbn._C, which take an array of arguments.
#pragma once

#include <Python.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace bagua_syncbn {

// Calls `body` with `count` arguments. Translates C++ exceptions to Python errors.
template <PyObject* (*body)(PyObject* const*), Py_ssize_t count>
PyObject* call_from_python(PyObject*, PyObject* const* arguments, Py_ssize_t given) {
  try {
    if (given == count) return body(arguments);
    throw std::runtime_error("expected " + std::to_string(count) + " arguments, got " + std::to_string(given));
  } catch (const std::exception& error) {
    if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// An entry of the method table.
#define BAGUA_SYNCBN_METHOD(name, count) \
  {#name, (PyCFunction)(void (*)())bagua_syncbn::call_from_python<name, count>, METH_FASTCALL, nullptr}

inline int64_t integer_of(PyObject* argument) {
  const int64_t value = PyLong_AsLongLong(argument);
  if (value == -1 && PyErr_Occurred() != nullptr) throw std::runtime_error("not an integer");
  return value;
}

inline std::string string_of(PyObject* argument) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(argument, &size);
  if (text == nullptr) throw std::runtime_error("not a string");
  return {text, static_cast<size_t>(size)};
}

namespace exchange {
extern PyMethodDef methods[];  // in exchange/python.cpp
}

}  // namespace bagua_syncbn
