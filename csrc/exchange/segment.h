// Shared memory in which ranks on a host exchange messages. Independent of torch and Python.
//
// Each rank has kTurns slots. Message n goes into slot n % kTurns: a rank writes the payload and its description, then
// stores the sequence number with release. Its peers load the sequence number with acquire, then read.
//
// A rank publishes at most kMaxPending messages before it collects the first. Peers are then at most
// 2 * kMaxPending - 1 messages ahead, so 2 * kMaxPending slots never overwrite an unread message. A rank that raises
// publishes two messages and does not collect them: a probe and the error's text.
//
// The memory has no name in any file system, so it disappears with the processes: peers open the file descriptor of
// rank 0 through /proc. Each rank holds a record lock on one byte of the file. The kernel releases the lock when the
// process exits, and forked children do not inherit it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace bagua_syncbn::exchange {

constexpr int64_t kSlotBytes = 1 << 16;
constexpr uint32_t kMaxPending = 2;
constexpr uint32_t kTurns = 2 * kMaxPending;

enum Kind : int32_t { kGather, kSum };

// Description of a message, which must be the same on all ranks.
struct Message {
  int32_t kind = kGather;
  int32_t itemsize = 4;  // 4 for float32, 8 for float64
  int64_t numel = 0;

  bool operator==(const Message& other) const {
    return kind == other.kind && itemsize == other.itemsize && numel == other.numel;
  }
  int64_t bytes() const { return numel * itemsize; }
};

struct Waiting {
  double seconds = 0;   // timeout of sleep()
  bool spins = false;   // whether poll() spins, which pays off only if each rank has a core
  bool watches = true;  // whether sleep() detects ranks that exited; false if ranks are threads
};

struct RankState;

// One rank's view of the shared memory. Not thread-safe. Errors are std::runtime_error.
class Segment {
 public:
  // Rank 0 creates the memory; its peers open it at rank 0's `place`, before the first message. `name` is random;
  // peers check it to identify the memory.
  Segment(const std::string& name, int ranks, Waiting waiting, int rank, const std::string& place);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::string place() const;  // path of the memory in other processes

  // Writes a message without waiting. Raises if it is too large, or if kMaxPending messages are not collected yet.
  void publish(const Message& message, const void* payload);
  bool has_pending() const { return published_ != collected_; }

  // Returns whether every rank's next message has arrived. Spins for a short time.
  bool poll() const;
  // Waits for it. Raises if a rank exited, left or is late, or if `is_interrupted` (called ten times a second) returns
  // true. After an error, this rank has left.
  void sleep(const std::function<bool()>& is_interrupted);
  // Writes the messages, or their sum in rank order, to `target`, after poll() or sleep(). Raises if they differ.
  void collect(void* target);

  // Ends peers' waits for this rank.
  void leave();

  int ranks() const { return ranks_; }
  int rank() const { return rank_; }
  bool is_in_child() const;  // in a process forked after construction

 private:
  Segment(int ranks, Waiting waiting, int rank);

  const int ranks_;
  const Waiting waiting_;
  const int rank_;
  const uint32_t forks_;
  int descriptor_ = -1;
  RankState* states_ = nullptr;
  uint32_t published_ = 0, collected_ = 0;
};

}  // namespace bagua_syncbn::exchange
