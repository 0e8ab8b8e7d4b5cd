// The memory of split reductions: partial results for one call, counters for each stream and each graph.
#include <map>
#include <mutex>
#include <utility>

#include "../../allocate.h"
#include "context.h"

namespace bagua_syncbn::cuda {

double* Context::partials(int64_t count) {
  partials_ = allocate_vector(count, ScalarType::Double, input_);
  return static_cast<double*>(partials_->mutable_data_ptr());
}

// One set of counters for each stream: kernels of one stream do not overlap, and each leaves the counters zero.
//
// A new stream may get the handle of a destroyed one, and its work does not wait for what that one still runs; and the
// handle of the per-thread default stream stands for as many streams as there are threads. So a set belongs to the id
// of a stream, which is never used again. A set is never given back, since nobody can tell when the last work of a
// destroyed stream is done: such a stream leaves 4 KiB. A set is not torch's memory: the current pool may be that of
// graphs, as with torch.compile(mode="reduce-overhead"), which take all of it back.
//
// A graph gets a set of its own: it may be replayed beside the stream that it was captured on, and a set that was made
// during capture is zero in replay only. It is cleared by a node of the graph before each replay's use, lies in the
// graph's own pool of memory, which lives as long as the graph, and is given out again only to what the graph itself
// runs later.
uint32_t* Context::tickets() {
  struct Sets {
    std::mutex mutex;
    std::map<std::pair<int32_t, uint64_t>, uint32_t*> by_stream;  // its device and id
  };
  static auto* const sets = new Sets;  // never destroyed: at exit, other threads may still run
  const StreamState now = state();
  if (now.capturing) {
    tickets_ = torch::stable::new_zeros(input_, {&kTickets, 1}, ScalarType::Int);
    return static_cast<uint32_t*>(tickets_->mutable_data_ptr());
  }
  const std::lock_guard<std::mutex> lock(sets->mutex);
  uint32_t*& set = sets->by_stream[{input_.get_device_index(), now.id}];
  if (set == nullptr) set = make_tickets(stream);
  if (set == nullptr) refuse_memory({&kTickets, 1}, ScalarType::Int, input_);
  return set;
}

}  // namespace bagua_syncbn::cuda
