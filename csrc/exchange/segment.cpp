// The segment: memfd_create, record locks and futexes, which are Linux only.
#include "segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace bagua_syncbn::exchange {

using Clock = std::chrono::steady_clock;
using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4, "shared between processes, and used as a futex");

constexpr size_t kLine = 128;  // two 64-byte cache lines are fetched together; some Arm CPUs have 128-byte lines
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr long kSliceNanoseconds = 100'000'000;

struct alignas(kLine) Slot {
  Word sequence;  // number of the message in the slot
  Word sleepers;  // number of threads in futex_wait()
  alignas(kLine) Message message;
  alignas(kLine) char payload[kSlotBytes];
};

struct alignas(kLine) RankState {
  Word has_left;
  Slot slots[kTurns];

  Slot& slot(uint32_t sequence) { return slots[sequence % kTurns]; }
};

namespace {

void check(bool succeeded, const char* call, int error = errno) {
  if (!succeeded) throw std::runtime_error(std::string(call) + ": " + std::system_category().message(error));
}

Word forks{0};  // fork generations since the library was loaded
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });

struct flock lock_of(int rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // `yield` is a no-op on most CPUs
#endif
}

void futex_wait(Word& word, uint32_t value) {
  const timespec slice = {0, kSliceNanoseconds};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &slice, nullptr, 0);  // the caller checks why the wait returned
}

void futex_wake_all(Word& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

template <typename T>
void add(void* __restrict target, const void* __restrict values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) static_cast<T*>(target)[i] += static_cast<const T*>(values)[i];
}

}  // namespace

Segment::Segment(int ranks, Waiting waiting, int rank)
    : ranks_(ranks), waiting_(waiting), rank_(rank), forks_(forks.load()) {}

// Delegates to another constructor, so that the destructor runs if the body throws.
Segment::Segment(const std::string& name, int ranks, Waiting waiting, int rank, const std::string& place)
    : Segment(ranks, waiting, rank) {
  const size_t bytes = ranks * sizeof(RankState);
  if (rank == 0) {
    descriptor_ = memfd_create(name.c_str(), MFD_CLOEXEC);
    check(descriptor_ >= 0, "memfd_create");
    check(fchmod(descriptor_, 0600) == 0, "fchmod");
    // Reserves zeroed memory: without it, a write to a page that the system cannot provide would kill the process.
    const int error = posix_fallocate(descriptor_, 0, static_cast<off_t>(bytes));
    check(error == 0, "posix_fallocate", error);
  } else {
    char found[256] = {};
    check(readlink(place.c_str(), found, sizeof(found) - 1) >= 0, "readlink");
    if (found != "/memfd:" + name + " (deleted)") throw std::runtime_error("a different file is at the given place");
    descriptor_ = open(place.c_str(), O_RDWR | O_CLOEXEC);
    check(descriptor_ >= 0, "open");
  }
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  check(address != MAP_FAILED, "mmap");
  states_ = static_cast<RankState*>(address);
  const struct flock lock = lock_of(rank_);
  check(fcntl(descriptor_, F_SETLK, &lock) == 0, "fcntl");
}

Segment::~Segment() {
  if (states_ != nullptr) {
    leave();
    munmap(states_, ranks_ * sizeof(RankState));
  }
  if (descriptor_ >= 0) close(descriptor_);
}

std::string Segment::place() const {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(descriptor_);
}

bool Segment::is_in_child() const {
  return forks.load(std::memory_order_relaxed) != forks_;
}

void Segment::publish(const Message& message, const void* payload) {
  if (message.bytes() > kSlotBytes) throw std::runtime_error("packed: the message is too large for shared memory");
  if (published_ - collected_ == kMaxPending)
    throw std::runtime_error("process_group: too many messages are pending; wait for them first");
  Slot& slot = states_[rank_].slot(++published_);
  slot.message = message;
  if (message.bytes() > 0) std::memcpy(slot.payload, payload, message.bytes());
  // Sequentially consistent, like the accesses in sleep(): a sleeper that is not counted here will read the message.
  slot.sequence.store(published_, std::memory_order_seq_cst);
  if (slot.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(slot.sequence);
}

bool Segment::poll() const {
  const uint32_t sequence = collected_ + 1;
  Clock::time_point end;
  for (int rank = 0; rank < ranks_; ++rank) {
    const Word& word = states_[rank].slot(sequence).sequence;
    for (int i = 1; word.load(std::memory_order_acquire) != sequence; ++i) {
      if (!waiting_.spins) return false;
      if (end == Clock::time_point()) end = Clock::now() + kSpin;  // for all ranks
      if (i % 16 == 0 && Clock::now() >= end) return false;
      relax();
    }
  }
  return true;
}

void Segment::sleep(const std::function<bool()>& is_interrupted) {
  const uint32_t sequence = collected_ + 1;
  const auto end = Clock::now() + std::chrono::duration<double>(waiting_.seconds);
  for (int rank = 0; rank < ranks_; ++rank) {
    RankState& peer = states_[rank];
    Slot& slot = peer.slot(sequence);
    const char* problem = nullptr;
    while (problem == nullptr && slot.sequence.load(std::memory_order_acquire) != sequence) {
      slot.sleepers.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t found = slot.sequence.load(std::memory_order_seq_cst);
      if (found != sequence && peer.has_left.load(std::memory_order_acquire) == 0) futex_wait(slot.sequence, found);
      slot.sleepers.fetch_sub(1, std::memory_order_relaxed);
      // Both are read before the sequence number, because a rank may exit or leave right after its last message.
      const bool has_left = peer.has_left.load(std::memory_order_acquire) != 0;
      struct flock lock = lock_of(rank);
      const bool is_locked = fcntl(descriptor_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
      if (slot.sequence.load(std::memory_order_acquire) == sequence) break;
      problem = has_left                         ? "has left after an error or destroyed the group"
                : waiting_.watches && !is_locked ? "has ended or closed its files"
                : Clock::now() >= end            ? "did not arrive before the timeout"
                : is_interrupted()               ? "did not arrive before an interrupt"
                                                 : nullptr;
    }
    if (problem == nullptr) continue;
    leave();
    throw std::runtime_error("rank " + std::to_string(rank) + " of the group " + problem);
  }
}

void Segment::collect(void* target) {
  const uint32_t sequence = ++collected_;
  const Message& own = states_[rank_].slot(sequence).message;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (states_[rank].slot(sequence).message == own) continue;
    throw std::runtime_error("ranks " + std::to_string(rank) + " and " + std::to_string(rank_) +
                             " sent different messages");
  }
  if (own.numel == 0) return;  // `target` may be null
  for (int rank = 0; rank < ranks_; ++rank) {
    const void* payload = states_[rank].slot(sequence).payload;
    if (own.kind == kSum && rank > 0) {
      (own.itemsize == 4 ? add<float> : add<double>)(target, payload, own.numel);
    } else {
      const int64_t offset = own.kind == kGather ? rank * own.bytes() : 0;
      std::memcpy(static_cast<char*>(target) + offset, payload, own.bytes());
    }
  }
}

void Segment::leave() {
  if (is_in_child()) return;
  RankState& own = states_[rank_];
  own.has_left.store(1, std::memory_order_release);
  for (Slot& slot : own.slots) futex_wake_all(slot.sequence);
}

}  // namespace bagua_syncbn::exchange
