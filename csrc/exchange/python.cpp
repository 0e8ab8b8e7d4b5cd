// The exchange, as functions of Python that hold the GIL unless they wait for longer than a message takes.
#include "python.h"

#include <stdexcept>
#include <string>

#include "segment.h"

namespace bagua_syncbn::exchange {
namespace {

constexpr char kCapsule[] = "bagua_syncbn.segment";

// A rank, as Python holds it.
struct Held {
  Rank rank;
  bool is_busy = false;  // read and written with the GIL
};

// Returns what `body` returns; null where it raises, with its error unless Python has one already.
template <typename Body>
PyObject* answer(const Body& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    if (PyErr_Occurred() == nullptr) PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

[[noreturn]] void refuse(const std::string& message) {
  throw std::runtime_error(message);
}

void destroy(PyObject* capsule) {
  delete static_cast<Held*>(PyCapsule_GetPointer(capsule, kCapsule));
}

PyObject* hold(const std::shared_ptr<Memory>& memory, int rank) {
  std::unique_ptr<Held> held(new Held{Rank(memory, rank)});
  held->rank.enter(true);
  PyObject* capsule = PyCapsule_New(held.get(), kCapsule, destroy);
  if (capsule != nullptr) held.release();
  return capsule;
}

Held& held_by(PyObject* capsule) {
  if (capsule == Py_None) {
    refuse(
        "process_group: expected a live group, got one that was destroyed; run forward and backward before "
        "destroy_process_group()");
  }
  Held* held = static_cast<Held*>(PyCapsule_GetPointer(capsule, kCapsule));
  if (held == nullptr) refuse("no segment");
  if (held->rank.is_in_child()) {
    refuse("process_group: expected a call in the process that made the group, got one in a forked child of it");
  }
  if (held->is_busy) {
    refuse("process_group: expected one thread at a time to use a group, got a call while another one waits in it");
  }
  return *held;
}

// Releases the GIL while it waits, and lets Python handle signals.
class Waiting : public Waiter {
 public:
  explicit Waiting(Held& held) : held_(held) {}
  void begin() override {
    held_.is_busy = true;
    state_ = PyEval_SaveThread();
  }
  bool goes_on() override {
    PyEval_RestoreThread(state_);
    const bool goes_on = PyErr_CheckSignals() == 0;
    state_ = PyEval_SaveThread();
    return goes_on;
  }
  void end() override {
    PyEval_RestoreThread(state_);
    held_.is_busy = false;
  }

 private:
  Held& held_;
  PyThreadState* state_ = nullptr;
};

int64_t read(PyObject* argument) {
  const int64_t value = PyLong_AsLongLong(argument);
  if (value == -1 && PyErr_Occurred() != nullptr) refuse("no integer");
  return value;
}

void check_number(Py_ssize_t expected, Py_ssize_t count) {
  if (count != expected) refuse("expected " + std::to_string(expected) + " arguments, got " + std::to_string(count));
}

// (segment, kind, source, numel, itemsize)
constexpr Py_ssize_t kPublished = 5;

void publish_message(Rank& rank, PyObject* const* arguments) {
  const int64_t kind = read(arguments[1]), source = read(arguments[2]);
  const int64_t numel = read(arguments[3]), itemsize = read(arguments[4]);
  const bool is_sound = (kind == kGather || kind == kSum) && (itemsize == 4 || itemsize == 8) && numel >= 0 &&
                        numel <= kSlotBytes / itemsize;
  if (!is_sound) {
    refuse("packed: expected float32 or float64 values of at most " + std::to_string(kSlotBytes) + " bytes, got " +
           std::to_string(numel) + " of " + std::to_string(itemsize) + " bytes");
  }
  const Header header{static_cast<int32_t>(kind), static_cast<int32_t>(itemsize), numel};
  rank.publish(header, reinterpret_cast<const void*>(source));
}

PyObject* collect_message(Held& held, int64_t target) {
  Waiting waiting(held);
  held.rank.collect(reinterpret_cast<void*>(target), waiting);
  Py_RETURN_NONE;
}

// (name, ranks) to the segment of rank 0, and the place at which the other ranks find it
PyObject* make_segment(PyObject*, PyObject* arguments) {
  const char* name = nullptr;
  int ranks = 0;
  if (!PyArg_ParseTuple(arguments, "si", &name, &ranks)) return nullptr;
  return answer([&]() -> PyObject* {
    const auto memory = Memory::make(name, ranks);
    PyObject* capsule = hold(memory, 0);
    return capsule == nullptr ? nullptr : Py_BuildValue("(Ns)", capsule, memory->place().c_str());
  });
}

// (name, ranks, rank, place) to the segment of another rank
PyObject* open_segment(PyObject*, PyObject* arguments) {
  const char *name = nullptr, *place = nullptr;
  int ranks = 0, rank = 0;
  if (!PyArg_ParseTuple(arguments, "siis", &name, &ranks, &rank, &place)) return nullptr;
  return answer([&] { return hold(Memory::open(name, place, ranks), rank); });
}

// (segment, seconds): waits for the others take as long, from now on; false where not all ranks are in the memory
PyObject* start_segment(PyObject*, PyObject* arguments) {
  PyObject* capsule = nullptr;
  double seconds = 0;
  if (!PyArg_ParseTuple(arguments, "Od", &capsule, &seconds)) return nullptr;
  return answer([&]() -> PyObject* {
    Rank& rank = held_by(capsule).rank;
    if (!rank.all_are_here()) Py_RETURN_FALSE;
    rank.start(seconds);
    Py_RETURN_TRUE;
  });
}

// (segment, why)
PyObject* leave_segment(PyObject*, PyObject* arguments) {
  PyObject* capsule = nullptr;
  const char* why = nullptr;
  if (!PyArg_ParseTuple(arguments, "Os", &capsule, &why)) return nullptr;
  return answer([&]() -> PyObject* {
    held_by(capsule).rank.leave(why);
    Py_RETURN_NONE;
  });
}

PyObject* publish(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return answer([&]() -> PyObject* {
    check_number(kPublished, count);
    publish_message(held_by(arguments[0]).rank, arguments);
    Py_RETURN_NONE;
  });
}

// (segment, target)
PyObject* collect(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return answer([&] {
    check_number(2, count);
    Held& held = held_by(arguments[0]);
    if (!held.rank.has_begun()) refuse("process_group: expected a message that was begun, got none");
    return collect_message(held, read(arguments[1]));
  });
}

// publish(), with `target` behind its arguments, and collect()
PyObject* exchange(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return answer([&] {
    check_number(kPublished + 1, count);
    Held& held = held_by(arguments[0]);
    if (held.rank.has_begun()) refuse("process_group: expected all messages that were begun to be collected");
    const int64_t target = read(arguments[kPublished]);
    publish_message(held.rank, arguments);
    return collect_message(held, target);
  });
}

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

PyMethodDef methods[] = {
    {"make_segment", make_segment, METH_VARARGS, "Shared memory for the ranks of a group."},
    {"open_segment", open_segment, METH_VARARGS, "That memory, in another rank."},
    {"start_segment", start_segment, METH_VARARGS, "Whether all ranks are in it."},
    {"leave_segment", leave_segment, METH_VARARGS, "Has the others not wait any more."},
    {"publish", fast(publish), METH_FASTCALL, "Sends a message, without waiting."},
    {"collect", fast(collect), METH_FASTCALL, "Waits for a message of all ranks."},
    {"exchange", fast(exchange), METH_FASTCALL, "Sends a message, and waits for all."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace bagua_syncbn::exchange
