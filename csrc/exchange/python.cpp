// The exchange, as functions of Python that hold the GIL unless they wait for longer than a message takes.
#include "python.h"

#if defined(__linux__)

#include <exception>
#include <limits>
#include <string>
#include <utility>

#include "segment.h"

namespace bagua_syncbn::exchange {
namespace {

constexpr char kCapsule[] = "bagua_syncbn.segment";

// A rank, as Python holds it.
struct Held {
  Rank rank;
  bool is_busy = false;  // read and written with the GIL
};

PyObject* refuse(const std::string& message) {
  PyErr_SetString(PyExc_RuntimeError, message.c_str());
  return nullptr;
}

void destroy(PyObject* capsule) {
  delete static_cast<Held*>(PyCapsule_GetPointer(capsule, kCapsule));
}

template <typename Find>
PyObject* hold(int rank, const Find& find) {
  try {
    Held* held = new Held{Rank(find(), rank)};
    held->rank.enter(true);
    PyObject* capsule = PyCapsule_New(held, kCapsule, destroy);
    if (capsule == nullptr) delete held;
    return capsule;
  } catch (const std::exception& error) {
    return refuse(error.what());
  }
}

Held* held_by(PyObject* capsule) {
  if (capsule == Py_None) {
    refuse(
        "process_group: expected a live group, got one that was destroyed; run forward and backward before "
        "destroy_process_group()");
    return nullptr;
  }
  Held* held = static_cast<Held*>(PyCapsule_GetPointer(capsule, kCapsule));
  if (held == nullptr) return nullptr;
  if (held->rank.is_in_child()) {
    refuse("process_group: expected a call in the process that made the group, got one in a forked child of it");
    return nullptr;
  }
  if (held->is_busy) {
    refuse("process_group: expected one thread at a time to use a group, got a call while another one waits in it");
    return nullptr;
  }
  return held;
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

bool read(PyObject* const* arguments, Py_ssize_t count, int64_t* values) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    values[i] = PyLong_AsLongLong(arguments[i]);
    if (values[i] == -1 && PyErr_Occurred() != nullptr) return false;
  }
  return true;
}

// (segment, kind, source, numel, itemsize)
constexpr Py_ssize_t kPublished = 5;

bool publish_message(Rank& rank, PyObject* const* arguments) {
  int64_t values[kPublished - 1];
  if (!read(arguments + 1, kPublished - 1, values)) return false;
  const auto [kind, source, numel, itemsize] = values;
  const bool is_sound = (kind == kGather || kind == kSum) && (itemsize == 4 || itemsize == 8) && numel >= 0 &&
                        numel <= kSlotBytes / itemsize;
  if (!is_sound) {
    refuse("packed: expected float32 or float64 values of at most " + std::to_string(kSlotBytes) + " bytes, got " +
           std::to_string(numel) + " of " + std::to_string(itemsize) + " bytes");
    return false;
  }
  const Header header{static_cast<int32_t>(kind), static_cast<int32_t>(itemsize), numel};
  if (rank.publish(header, reinterpret_cast<const void*>(source))) return true;
  refuse("process_group: expected a call to wait for the " + std::to_string(kMostPending) +
         " messages that were begun before, got one more");
  return false;
}

PyObject* collect_message(Held& held, int64_t target) {
  Rank& rank = held.rank;
  Waiting waiting(held);
  const Result result = rank.collect(reinterpret_cast<void*>(target), waiting);
  const std::string who = "rank " + std::to_string(result.rank) + " of the group ";
  switch (result.outcome) {
    case Outcome::kCollected:
      Py_RETURN_NONE;
    case Outcome::kDiffers:
      return refuse("expected the ranks of a group to send alike, got " + rank.texts());
    case Outcome::kEnded:
      return refuse(who + "has ended or closed its files");
    case Outcome::kLeft:
      return refuse(who + "has left it after an error, or destroyed it");
    case Outcome::kLate:
      return refuse(who + "did not come within the time-out");
    case Outcome::kInterrupted:
      return nullptr;  // with what a handler of signals has raised
  }
  return refuse("no outcome");
}

bool has(Py_ssize_t expected, Py_ssize_t count) {
  if (count == expected) return true;
  PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
  return false;
}

}  // namespace

// (name, ranks) to the segment of rank 0, and the place at which the other ranks find it
PyObject* make_segment(PyObject*, PyObject* arguments) {
  const char* name = nullptr;
  int ranks = 0;
  if (!PyArg_ParseTuple(arguments, "si", &name, &ranks)) return nullptr;
  std::string place;
  PyObject* capsule = hold(0, [&] {
    auto memory = Memory::make(name, ranks);
    place = memory->place();
    return memory;
  });
  return capsule == nullptr ? nullptr : Py_BuildValue("(Ns)", capsule, place.c_str());
}

// (name, ranks, rank, place) to the segment of another rank
PyObject* open_segment(PyObject*, PyObject* arguments) {
  const char *name = nullptr, *place = nullptr;
  int ranks = 0, rank = 0;
  if (!PyArg_ParseTuple(arguments, "siis", &name, &ranks, &rank, &place)) return nullptr;
  return hold(rank, [&] { return Memory::open(name, place, ranks); });
}

// (segment, seconds): waits for the others take as long, from now on; false where not all ranks are in the memory
PyObject* start_segment(PyObject*, PyObject* arguments) {
  PyObject* capsule = nullptr;
  double seconds = 0;
  if (!PyArg_ParseTuple(arguments, "Od", &capsule, &seconds)) return nullptr;
  Held* held = held_by(capsule);
  if (held == nullptr) return nullptr;
  if (!held->rank.all_are_here()) Py_RETURN_FALSE;
  held->rank.start(seconds);
  Py_RETURN_TRUE;
}

PyObject* publish(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Held* held = has(kPublished, count) ? held_by(arguments[0]) : nullptr;
  if (held == nullptr || !publish_message(held->rank, arguments)) return nullptr;
  Py_RETURN_NONE;
}

// (segment, target)
PyObject* collect(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Held* held = has(2, count) ? held_by(arguments[0]) : nullptr;
  int64_t target = 0;
  if (held == nullptr || !read(arguments + 1, 1, &target)) return nullptr;
  if (!held->rank.has_begun()) return refuse("process_group: expected a message that was begun, got none");
  return collect_message(*held, target);
}

// publish(), with `target` behind its arguments, and collect()
PyObject* exchange(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  Held* held = has(kPublished + 1, count) ? held_by(arguments[0]) : nullptr;
  int64_t target = 0;
  if (held == nullptr || !read(arguments + kPublished, 1, &target)) return nullptr;
  if (held->rank.has_begun()) return refuse("process_group: expected all messages that were begun to be collected");
  if (!publish_message(held->rank, arguments)) return nullptr;
  return collect_message(*held, target);
}

}  // namespace bagua_syncbn::exchange

#endif
