// Python functions of the exchange. They keep the GIL, except while they sleep.
#include "../python.h"

#include <memory>

#include "segment.h"

namespace bagua_syncbn::exchange {
namespace {

constexpr char kCapsule[] = "bagua_syncbn.segment";

// A segment in a Python capsule.
struct Handle {
  Segment segment;
  bool is_busy = false;  // a thread is sleeping in it; guarded by the GIL
};

Handle& handle_of(PyObject* capsule) {
  if (capsule == Py_None) throw std::runtime_error("process_group: this rank has left the group after an error");
  auto* handle = static_cast<Handle*>(PyCapsule_GetPointer(capsule, kCapsule));
  if (handle == nullptr) throw std::runtime_error("not a segment");
  if (handle->segment.is_in_child())
    throw std::runtime_error("process_group: a forked child cannot use the groups of its parent");
  if (handle->is_busy)
    throw std::runtime_error("process_group: another thread is waiting in this group; use one thread at a time");
  return *handle;
}

// Releases the GIL during its lifetime.
class ReleasedGil {
 public:
  explicit ReleasedGil(Handle& handle) : handle_(handle) {
    handle_.is_busy = true;
    state_ = PyEval_SaveThread();
  }
  ~ReleasedGil() {
    PyEval_RestoreThread(state_);
    handle_.is_busy = false;
  }
  // Runs pending signal handlers. Returns whether one raised an exception, such as KeyboardInterrupt.
  bool is_interrupted() {
    PyEval_RestoreThread(state_);
    const bool raised = PyErr_CheckSignals() != 0;
    state_ = PyEval_SaveThread();
    return raised;
  }

 private:
  Handle& handle_;
  PyThreadState* state_ = nullptr;
};

// Publishes the message that the Python arguments 1 to 4 describe: kind, source, numel, itemsize.
void publish_message(Segment& segment, PyObject* const* arguments) {
  const auto kind = static_cast<int32_t>(integer_of(arguments[1]));
  const auto* source = reinterpret_cast<const void*>(integer_of(arguments[2]));
  segment.publish({kind, static_cast<int32_t>(integer_of(arguments[4])), integer_of(arguments[3])}, source);
}

PyObject* collect_message(Handle& handle, PyObject* target) {
  void* const address = reinterpret_cast<void*>(integer_of(target));
  if (!handle.segment.poll()) {
    ReleasedGil gil(handle);
    handle.segment.sleep([&] { return gil.is_interrupted(); });
  }
  handle.segment.collect(address);
  Py_RETURN_NONE;
}

// map_segment(name, ranks, seconds, spins, rank, place) returns the segment and its place. Only peers of rank 0 pass a
// place.
PyObject* map_segment(PyObject* const* arguments) {
  const Waiting waiting{PyFloat_AsDouble(arguments[2]), arguments[3] == Py_True};
  auto handle =
      std::unique_ptr<Handle>(new Handle{{string_of(arguments[0]), static_cast<int>(integer_of(arguments[1])), waiting,
                                          static_cast<int>(integer_of(arguments[4])), string_of(arguments[5])}});
  const std::string place = handle->segment.place();
  PyObject* capsule = PyCapsule_New(handle.get(), kCapsule, [](PyObject* dying) {
    delete static_cast<Handle*>(PyCapsule_GetPointer(dying, kCapsule));
  });
  if (capsule != nullptr) handle.release();
  return Py_BuildValue("(Ns)", capsule, place.c_str());
}

// leave_segment(segment)
PyObject* leave_segment(PyObject* const* arguments) {
  handle_of(arguments[0]).segment.leave();
  Py_RETURN_NONE;
}

// publish(segment, kind, source, numel, itemsize) sends a message without waiting.
PyObject* publish(PyObject* const* arguments) {
  publish_message(handle_of(arguments[0]).segment, arguments);
  Py_RETURN_NONE;
}

// collect(segment, target) waits for the message of every rank.
PyObject* collect(PyObject* const* arguments) {
  return collect_message(handle_of(arguments[0]), arguments[1]);
}

// exchange(segment, kind, source, numel, itemsize, target) calls publish and collect.
PyObject* exchange(PyObject* const* arguments) {
  Handle& handle = handle_of(arguments[0]);
  if (handle.segment.has_pending())
    throw std::runtime_error("process_group: messages are pending; wait for them before sending another one");
  publish_message(handle.segment, arguments);
  return collect_message(handle, arguments[5]);
}

}  // namespace

PyMethodDef methods[] = {
    BAGUA_SYNCBN_METHOD(map_segment, 6), BAGUA_SYNCBN_METHOD(leave_segment, 1), BAGUA_SYNCBN_METHOD(publish, 5),
    BAGUA_SYNCBN_METHOD(collect, 2),     BAGUA_SYNCBN_METHOD(exchange, 6),      {nullptr, nullptr, 0, nullptr},
};

}  // namespace bagua_syncbn::exchange
