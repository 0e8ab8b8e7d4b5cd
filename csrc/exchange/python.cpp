// Python functions of the exchange. They keep the GIL, except while they sleep.
#include "../python.h"

#include "segment.h"

namespace bagua_syncbn::exchange {
namespace {

constexpr char kCapsule[] = "bagua_syncbn.segment";

// A segment in a Python capsule.
struct Handle {
  std::unique_ptr<Segment> segment;
  bool is_busy = false;  // a thread sleeps in it; guarded by the GIL
};

PyObject* capsule_of(std::unique_ptr<Segment> segment) {
  auto handle = std::make_unique<Handle>(Handle{std::move(segment)});
  PyObject* capsule = PyCapsule_New(handle.get(), kCapsule, [](PyObject* dying) {
    delete static_cast<Handle*>(PyCapsule_GetPointer(dying, kCapsule));
  });
  if (capsule != nullptr) handle.release();
  return capsule;
}

Handle& handle_of(PyObject* capsule) {
  if (capsule == Py_None) throw std::runtime_error("process_group: this rank has left the group after an error");
  auto* handle = static_cast<Handle*>(PyCapsule_GetPointer(capsule, kCapsule));
  if (handle == nullptr) throw std::runtime_error("not a segment");
  if (handle->segment->is_in_child())
    throw std::runtime_error("process_group: a forked child cannot use the groups of its parent");
  if (handle->is_busy)
    throw std::runtime_error("process_group: another thread is waiting in this group; use one thread at a time");
  return *handle;
}

// Releases the GIL in its lifetime.
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
  // Lets Python handle signals. Returns whether a handler raised, as for Ctrl-C.
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

// The ranks' numbers, from an array of int32 in bytes.
std::vector<int32_t> members_of(PyObject* bytes) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(bytes, &data, &size) != 0) throw std::runtime_error("not bytes");
  const auto* first = reinterpret_cast<const int32_t*>(data);
  return {first, first + size / sizeof(int32_t)};
}

void publish_message(Segment& segment, PyObject* const* arguments) {
  const int64_t kind = integer_of(arguments[1]), source = integer_of(arguments[2]);
  const int64_t numel = integer_of(arguments[3]), itemsize = integer_of(arguments[4]);
  const bool is_valid = (kind == kGather || kind == kSum) && (itemsize == 4 || itemsize == 8) && numel >= 0 &&
                        numel <= kSlotBytes / itemsize;
  if (!is_valid) {
    throw std::runtime_error("packed: expected float32 or float64 values of at most " + std::to_string(kSlotBytes) +
                             " bytes, got " + std::to_string(numel) + " of " + std::to_string(itemsize) + " bytes");
  }
  segment.publish({static_cast<int32_t>(kind), static_cast<int32_t>(itemsize), numel},
                  reinterpret_cast<const void*>(source));
}

PyObject* collect_message(Handle& handle, PyObject* target) {
  void* const address = reinterpret_cast<void*>(integer_of(target));
  if (!handle.segment->poll()) {
    ReleasedGil gil(handle);
    handle.segment->sleep([&] { return gil.is_interrupted(); });
  }
  handle.segment->collect(address);
  Py_RETURN_NONE;
}

// (name, members) -> the segment of rank 0, and the place where the other ranks find it.
PyObject* create_segment(PyObject* const* arguments) {
  auto segment = Segment::make(string_of(arguments[0]), members_of(arguments[1]));
  const std::string place = segment->place();
  return Py_BuildValue("(Ns)", capsule_of(std::move(segment)), place.c_str());
}

// (name, members, rank, place) -> the segment of another rank.
PyObject* open_segment(PyObject* const* arguments) {
  return capsule_of(Segment::open(string_of(arguments[0]), members_of(arguments[1]),
                                  static_cast<int>(integer_of(arguments[2])), string_of(arguments[3])));
}

// (segment, seconds, spins)
PyObject* start_segment(PyObject* const* arguments) {
  const double seconds = PyFloat_AsDouble(arguments[1]);
  handle_of(arguments[0]).segment->start(seconds, arguments[2] == Py_True);
  Py_RETURN_NONE;
}

// (segment)
PyObject* leave_segment(PyObject* const* arguments) {
  handle_of(arguments[0]).segment->leave();
  Py_RETURN_NONE;
}

// (segment, kind, source, numel, itemsize): sends a message without waiting.
PyObject* publish(PyObject* const* arguments) {
  publish_message(*handle_of(arguments[0]).segment, arguments);
  Py_RETURN_NONE;
}

// (segment, target): waits for the message of every rank.
PyObject* collect(PyObject* const* arguments) {
  Handle& handle = handle_of(arguments[0]);
  if (!handle.segment->has_pending()) throw std::runtime_error("process_group: no message is pending");
  return collect_message(handle, arguments[1]);
}

// (segment, kind, source, numel, itemsize, target): publish() and collect().
PyObject* exchange(PyObject* const* arguments) {
  Handle& handle = handle_of(arguments[0]);
  if (handle.segment->has_pending())
    throw std::runtime_error("process_group: messages are pending; wait for them before sending another one");
  publish_message(*handle.segment, arguments);
  return collect_message(handle, arguments[5]);
}

}  // namespace

PyMethodDef methods[] = {
    BAGUA_SYNCBN_METHOD(create_segment, 2), BAGUA_SYNCBN_METHOD(open_segment, 4), BAGUA_SYNCBN_METHOD(start_segment, 3),
    BAGUA_SYNCBN_METHOD(leave_segment, 1),  BAGUA_SYNCBN_METHOD(publish, 5),      BAGUA_SYNCBN_METHOD(collect, 2),
    BAGUA_SYNCBN_METHOD(exchange, 6),       {nullptr, nullptr, 0, nullptr},
};

}  // namespace bagua_syncbn::exchange
