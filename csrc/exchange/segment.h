// Shared memory through which the ranks of a group on one host exchange messages. Independent of torch and Python.
//
// Each rank has kTurns slots. Message n goes into slot n % kTurns: a rank writes the payload and its description, then
// stores the sequence number with release. Its peers load the sequence number with acquire, then read.
//
// A rank publishes at most kMaxPending messages before it collects one. Its peers are then at most 2 * kMaxPending - 1
// messages ahead, so 2 * kMaxPending slots never overwrite an unread message. A rank that raises publishes two messages
// and collects neither: that it raised, and why.
//
// The memory has no name in any file system, so it disappears with its processes: the other ranks open the file
// descriptor of rank 0 through /proc. Each rank holds a record lock on one byte of the file. The kernel releases the
// lock when the process ends, and forked children do not inherit it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace bagua_syncbn::exchange {

constexpr int64_t kSlotBytes = 1 << 16;
constexpr uint32_t kMaxPending = 2;
constexpr uint32_t kTurns = 2 * kMaxPending;

enum Kind : int32_t { kGather, kSum };

// Description of a message. All ranks must send the same.
struct Message {
  int32_t kind = kGather;
  int32_t itemsize = 4;  // 4 for float32, 8 for float64
  int64_t numel = 0;

  bool operator==(const Message& other) const {
    return kind == other.kind && itemsize == other.itemsize && numel == other.numel;
  }
  int64_t bytes() const { return numel * itemsize; }
  std::string text() const;
};

struct RankState;

// One rank's view of the shared memory. Not thread-safe. Errors are std::runtime_error.
class Segment {
 public:
  // `members` are the ranks' numbers in error messages. `name` is random, so a file at `place` with this name is the
  // memory that rank 0 made.
  static std::unique_ptr<Segment> make(const std::string& name, std::vector<int32_t> members);
  static std::unique_ptr<Segment> open(const std::string& name, std::vector<int32_t> members, int rank,
                                       const std::string& place);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::string place() const;  // for open() in another process

  // Called once, when all ranks have opened the memory. `seconds`: time-out of sleep(). `spins`: poll() spins, which
  // only pays off if each rank has a core. `watches`: sleep() detects ranks that ended; false if ranks are threads.
  void start(double seconds, bool spins, bool watches = true);

  // Writes a message without waiting. Raises if kMaxPending messages are not collected yet.
  void publish(const Message& message, const void* payload);
  bool has_pending() const { return published_ != collected_; }

  // Returns whether the next message of every rank is here. Spins for a short time.
  bool poll() const;
  // Waits until it is. Raises if a rank ended, left or is late, or if `is_interrupted`, called ten times a second,
  // returns true. This rank has then left.
  void sleep(const std::function<bool()>& is_interrupted);
  // Writes the messages, or their sum in rank order, to `target`, after poll() or sleep(). Raises if they differ.
  void collect(void* target);

  // Makes the other ranks stop waiting for this one.
  void leave();

  int ranks() const { return static_cast<int>(members_.size()); }
  int rank() const { return rank_; }
  bool is_in_child() const;  // in a process forked after construction

 private:
  Segment(std::vector<int32_t> members, int rank);
  void map();  // and takes the lock of this rank

  const std::vector<int32_t> members_;
  const int rank_;
  const uint32_t forks_;
  int descriptor_ = -1;
  RankState* states_ = nullptr;
  uint32_t published_ = 0, collected_ = 0;
  bool watches_ = false, spins_ = false;
  double seconds_ = 0;
};

}  // namespace bagua_syncbn::exchange
