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
// of a stream, which is never used again. Sets are kept by handle all the same, so that there are no more of them than
// handles: a new id under an old handle takes the old one's place. The memory of the old set then goes back to torch's
// allocator, which knows it by the handle alone.
//
// A graph gets a set of its own: it may be replayed beside the stream that it was captured on, and a set that was made
// during capture is zero in replay only. It is cleared by a node of the graph before each replay's use, lies in the
// graph's own pool of memory, which lives as long as the graph, and is given out again only to what the graph itself
// runs later.
uint32_t* Context::tickets() {
  struct Sets {
    std::mutex mutex;
    std::map<std::pair<int32_t, Stream>, std::pair<uint64_t, Tensor>> by_handle;
  };
  static auto* const sets = new Sets;  // never destroyed: at exit, torch may be gone first
  const auto make = [&] { return torch::stable::new_zeros(input_, {&kTickets, 1}, ScalarType::Int); };
  const StreamState now = state();
  if (now.capturing) {
    tickets_ = make();
  } else {
    const std::lock_guard<std::mutex> lock(sets->mutex);
    const auto key = std::make_pair(input_.get_device_index(), stream);
    auto found = sets->by_handle.find(key);
    if (found == sets->by_handle.end() || found->second.first != now.id) {
      found = sets->by_handle.insert_or_assign(key, std::make_pair(now.id, make())).first;
    }
    tickets_ = found->second.second;
  }
  return static_cast<uint32_t*>(tickets_->mutable_data_ptr());
}

}  // namespace bagua_syncbn::cuda
