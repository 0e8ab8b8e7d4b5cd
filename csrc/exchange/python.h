// The functions of bagua_syncbn._C for the exchange through shared memory.
#pragma once

#include <Python.h>

namespace bagua_syncbn::exchange {

#if defined(__linux__)
PyObject* make_segment(PyObject*, PyObject* arguments);
PyObject* open_segment(PyObject*, PyObject* arguments);
PyObject* start_segment(PyObject*, PyObject* arguments);
PyObject* publish(PyObject*, PyObject* const* arguments, Py_ssize_t count);
PyObject* collect(PyObject*, PyObject* const* arguments, Py_ssize_t count);
PyObject* exchange(PyObject*, PyObject* const* arguments, Py_ssize_t count);
#endif

}  // namespace bagua_syncbn::exchange
