// The memory of split reductions: parts for one call, counters for each stream and each graph.
#include "workspace.h"

#include <map>
#include <mutex>
#include <utility>

#include "../../allocate.h"

namespace bagua_syncbn::cuda {
namespace {

Tensor make_tickets(const Tensor& like) {
  const int64_t count = kTickets;
  return torch::stable::new_zeros(like, {&count, 1}, ScalarType::Int);
}

// One set of counters for each stream: kernels of one stream do not overlap, and each leaves the counters zero.
//
// The handle of a destroyed stream may come back as that of another one, whose work does not wait for what the first
// still runs; and one handle, that of the per-thread default stream, stands for as many streams as there are threads.
// So a set belongs to the id of a stream, which never comes back. Sets are kept by handle all the same, that there be
// no more of them than handles: a new id under an old handle takes the old one's place. The memory of the old set then
// goes back to torch's allocator, which has always known it by the handle alone.
class TicketSets {
 public:
  Tensor of(const Context& context, const Tensor& like) {
    const uint64_t id = context.stream_id();
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto key = std::make_pair(context.device(), context.stream());
    auto found = sets_.find(key);
    if (found == sets_.end() || found->second.first != id) {
      found = sets_.insert_or_assign(key, std::make_pair(id, make_tickets(like))).first;
    }
    return found->second.second;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int32_t, Stream>, std::pair<uint64_t, Tensor>> sets_;
};

}  // namespace

double* TorchWorkspace::partials(int64_t count) {
  partials_ = allocate_vector(count, ScalarType::Double, like_);
  return static_cast<double*>(partials_->mutable_data_ptr());
}

// A graph gets a set of its own: it may be replayed beside the stream that it was captured on, and a set that was made
// during capture is zero in replay only. It is cleared by a node of the graph before each replay's use, lies in the
// graph's own pool of memory, which lives as long as the graph, and is given out again only to what the graph itself
// runs later.
uint32_t* TorchWorkspace::tickets() {
  static auto* const sets = new TicketSets;  // never destroyed: at exit, torch may be gone first
  tickets_ = context_.capturing() ? make_tickets(like_) : sets->of(context_, like_);
  return static_cast<uint32_t*>(tickets_->mutable_data_ptr());
}

}  // namespace bagua_syncbn::cuda
