// The functions of bagua_syncbn._C for the exchange through shared memory.
#pragma once

#include <Python.h>

namespace bagua_syncbn::exchange {

extern PyMethodDef methods[];

}  // namespace bagua_syncbn::exchange
