// Shared memory through which the ranks of one group on one host exchange messages. Knows neither torch nor Python.
//
// Each rank has a slot for each turn. Message n goes into the slot of turn n % kTurns: a rank writes header and
// payload, then the sequence number with release. The others load the sequence number with acquire, then read.
//
// A rank publishes at most kMostPending messages before it collects one. A peer is at most 2 * kMostPending - 1
// messages ahead, so 2 * kMostPending turns never overwrite an unread one. A rank that raises publishes two messages
// and collects neither: that it raises, and why.
//
// The memory has no name in any file system, so nothing is left of it however its processes end: the other ranks open
// the descriptor of the one that made it through /proc. Each rank holds a record lock on one byte of it, which ends
// with its process and passes to no child.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

namespace bagua_syncbn::exchange {

constexpr int64_t kSlotBytes = 1 << 16;
constexpr uint32_t kMostPending = 2;
constexpr uint32_t kTurns = 2 * kMostPending;

enum Kind : int32_t { kGather, kSum };

// All that ranks must have in common in a message.
struct Header {
  int32_t kind = kGather;
  int32_t itemsize = 4;  // 4 for float32, 8 for float64
  int64_t numel = 0;

  bool agrees_with(const Header& other) const {
    return kind == other.kind && itemsize == other.itemsize && numel == other.numel;
  }
  int64_t bytes() const { return numel * itemsize; }
  std::string text() const;
};

struct Layout;

// The mapping, and the descriptor on which the record locks are.
class Memory {
 public:
  // `name` is random: who finds it where the descriptor is said to be has found this memory and no other. Both raise
  // std::runtime_error.
  static std::shared_ptr<Memory> make(const std::string& name, int ranks);
  static std::shared_ptr<Memory> open(const std::string& name, const std::string& place, int ranks);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  std::string place() const;  // for open() in another process
  int ranks() const { return ranks_; }
  Layout& layout() const { return *layout_; }
  void lock(int rank) const;
  bool is_locked(int rank) const;  // by another process

 private:
  Memory(int descriptor, int ranks) : descriptor_(descriptor), ranks_(ranks) {}
  void map();

  const int descriptor_;
  const int ranks_;
  size_t bytes_ = 0;
  Layout* layout_ = nullptr;
};

// How a thread that waits for longer than a message takes behaves.
class Waiter {
 public:
  virtual ~Waiter() = default;
  virtual void begin() {}
  virtual bool goes_on() { return true; }  // asked ten times a second
  virtual void end() {}
};

// One rank of a group. Not for two threads at a time.
class Rank {
 public:
  Rank(std::shared_ptr<Memory> memory, int rank);
  ~Rank();

  // Marks this rank as here and, with `lock`, as alive for as long as its process is.
  void enter(bool lock);
  bool all_are_here() const;
  // Has waiting last no longer than this, and spin at first if each rank has a core. All ranks are here.
  void start(double seconds);

  // Writes a message, and waits for nobody. Raises std::runtime_error where kMostPending are not collected yet.
  void publish(const Header& header, const void* payload);
  // Waits for the next message from all ranks. Writes theirs, or their sum in the order of ranks, to `target`. Raises
  // std::runtime_error where messages differ; and where one does not come, after which this rank has left.
  void collect(void* target, Waiter& waiter);
  // Has the others not wait for this rank any more, and tells them why. Only the first call has an effect.
  void leave(const std::string& why = "");

  bool has_begun() const { return published_ != collected_; }
  int rank() const { return rank_; }
  int ranks() const { return memory_->ranks(); }
  bool is_in_child() const;  // of a fork

 private:
  using Clock = std::chrono::steady_clock;

  // Both return why the message does not come; null where it has come.
  const char* wait_for(int rank, uint32_t sequence, Clock::time_point& end_of_spin, Waiter& waiter);
  const char* sleep_for(int rank, uint32_t sequence, Waiter& waiter);

  const std::shared_ptr<Memory> memory_;
  const int rank_;
  const uint32_t forks_;
  uint32_t published_ = 0, collected_ = 0;
  bool watches_ = false, spins_ = false;
  double seconds_ = 0;
};

}  // namespace bagua_syncbn::exchange
