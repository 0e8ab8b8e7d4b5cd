// The segment, by memfd_create, record locks and futexes of Linux.
#include "segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <linux/memfd.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

namespace bagua_syncbn::exchange {

constexpr size_t kLine = 128;  // two lines of 64 bytes are fetched together; Apple's and some of Arm's have 128
constexpr auto kSpin = std::chrono::microseconds(50);
constexpr long kSliceNanoseconds = 100'000'000;
constexpr char kHasLeft[] = "has left it after an error, or destroyed it";

using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4, "shared between processes, and waited for by futex");

struct alignas(kLine) Slot {
  Word sequence;  // of the message that is in it
  Word sleepers;  // threads that wait for it by futex
  alignas(kLine) Header header;
  alignas(kLine) char payload[kSlotBytes];
};

struct alignas(kLine) RankState {
  Word is_here;
  Word has_left;
  char why[512];  // it has left, ending with a zero
  cpu_set_t cores;
  Slot slots[kTurns];
};

struct Layout {
  RankState& state(int rank) { return reinterpret_cast<RankState*>(this)[rank]; }
  Slot& slot(int rank, uint32_t sequence) { return state(rank).slots[sequence % kTurns]; }
};

namespace {

[[noreturn]] void fail(const char* what, int error) {
  throw std::runtime_error(std::string(what) + ": " + std::system_category().message(error));
}

void check(bool holds, const char* what) {
  if (!holds) fail(what, errno);
}

Word forks{0};  // between this process and the one in which the library was loaded

void count_forks() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  if (registered != 0) fail("pthread_atfork", registered);
}

struct flock byte_of(int rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

int make_descriptor(const std::string& name) {
  constexpr unsigned kNoExec = 8;  // MFD_NOEXEC_SEAL of Linux 6.3, which some systems demand
  const int descriptor = memfd_create(name.c_str(), MFD_CLOEXEC | kNoExec);
  return descriptor >= 0 || errno != EINVAL ? descriptor : memfd_create(name.c_str(), MFD_CLOEXEC);
}

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb" ::: "memory");  // a yield takes no time there
#endif
}

void futex_wait(Word& word, uint32_t value) {
  const timespec slice = {0, kSliceNanoseconds};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &slice, nullptr, 0);  // whatever ends it, the caller looks
}

void futex_wake_all(Word& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

template <typename T>
void add(T* __restrict target, const T* __restrict values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) target[i] += values[i];
}

}  // namespace

std::string Header::text() const {
  const char* does = kind == kGather ? "gathers " : "sums ";
  return does + std::to_string(numel) + (itemsize == 4 ? " float32" : " float64");
}

std::shared_ptr<Memory> Memory::make(const std::string& name, int ranks) {
  const int descriptor = make_descriptor(name);
  check(descriptor >= 0, "memfd_create");
  const std::shared_ptr<Memory> memory(new Memory(descriptor, ranks));
  check(fchmod(descriptor, 0600) == 0, "fchmod");
  const size_t bytes = ranks * sizeof(RankState);
  // Reserves the memory, filled with zeros: a write to a page that cannot be had would end the process.
  const int error = posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
  if (error != 0) fail("posix_fallocate", error);
  memory->map();
  return memory;
}

std::shared_ptr<Memory> Memory::open(const std::string& name, const std::string& place, int ranks) {
  char found[256] = {};
  check(readlink(place.c_str(), found, sizeof(found) - 1) >= 0, "readlink");
  const bool is_same = std::string(found) == "/memfd:" + name + " (deleted)";
  if (!is_same) throw std::runtime_error("another file is in the place of the segment");
  const int descriptor = ::open(place.c_str(), O_RDWR | O_CLOEXEC);
  check(descriptor >= 0, "open");
  const std::shared_ptr<Memory> memory(new Memory(descriptor, ranks));
  memory->map();
  return memory;
}

void Memory::map() {
  const size_t bytes = ranks_ * sizeof(RankState);
  // Not by fstat: older versions of glibc have no symbol for it.
  if (static_cast<size_t>(lseek(descriptor_, 0, SEEK_END)) != bytes)
    throw std::runtime_error("the segment has another size");
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
  check(address != MAP_FAILED, "mmap");
  bytes_ = bytes;
  layout_ = static_cast<Layout*>(address);
}

Memory::~Memory() {
  if (layout_ != nullptr) munmap(layout_, bytes_);
  close(descriptor_);
}

std::string Memory::place() const {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(descriptor_);
}

void Memory::lock(int rank) const {
  const struct flock lock = byte_of(rank);
  check(fcntl(descriptor_, F_SETLK, &lock) == 0, "fcntl");
}

bool Memory::is_locked(int rank) const {
  struct flock lock = byte_of(rank);
  return fcntl(descriptor_, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

Rank::Rank(std::shared_ptr<Memory> memory, int rank)
    : memory_(std::move(memory)), rank_(rank), forks_((count_forks(), forks.load())) {}

Rank::~Rank() {
  leave();
}

bool Rank::is_in_child() const {
  return forks.load(std::memory_order_relaxed) != forks_;
}

void Rank::enter(bool lock) {
  RankState& state = memory_->layout().state(rank_);
  if (lock) memory_->lock(rank_);
  watches_ = lock;
  if (sched_getaffinity(0, sizeof(state.cores), &state.cores) != 0) CPU_ZERO(&state.cores);
  state.is_here.store(1, std::memory_order_release);
}

bool Rank::all_are_here() const {
  for (int rank = 0; rank < ranks(); ++rank) {
    if (memory_->layout().state(rank).is_here.load(std::memory_order_acquire) == 0) return false;
  }
  return true;
}

void Rank::start(double seconds) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (int rank = 0; rank < ranks(); ++rank) CPU_OR(&cores, &cores, &memory_->layout().state(rank).cores);
  spins_ = CPU_COUNT(&cores) >= ranks();
  seconds_ = seconds;
}

void Rank::publish(const Header& header, const void* payload) {
  if (published_ - collected_ == kMostPending) {
    throw std::runtime_error("process_group: expected a call to wait for the " + std::to_string(kMostPending) +
                             " messages that were begun before, got one more");
  }
  Slot& slot = memory_->layout().slot(rank_, ++published_);
  slot.header = header;
  if (header.bytes() > 0) std::memcpy(slot.payload, payload, header.bytes());
  // Sequentially consistent, as what sleep_for() does: a sleeper that this does not see, sees the message.
  slot.sequence.store(published_, std::memory_order_seq_cst);
  if (slot.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(slot.sequence);
}

void Rank::collect(void* target, Waiter& waiter) {
  Layout& layout = memory_->layout();
  const uint32_t sequence = collected_ + 1;
  Clock::time_point end_of_spin;
  for (int rank = 0; rank < ranks(); ++rank) {
    const char* problem = wait_for(rank, sequence, end_of_spin, waiter);
    if (problem != nullptr) {
      leave();
      const char* why = layout.state(rank).why;
      const std::string told = problem == kHasLeft && *why != 0 ? std::string(": ") + why : "";
      throw std::runtime_error("rank " + std::to_string(rank) + " of the group " + problem + told);
    }
  }
  collected_ = sequence;
  const Header& own = layout.slot(rank_, sequence).header;
  for (int rank = 0; rank < ranks(); ++rank) {
    if (layout.slot(rank, sequence).header.agrees_with(own)) continue;
    std::string sent;
    for (int each = 0; each < ranks(); ++each) {
      sent += (each ? "; rank " : "rank ") + std::to_string(each) + ": " + layout.slot(each, sequence).header.text();
    }
    throw std::runtime_error("expected the ranks of a group to send alike, got " + sent);
  }
  const int64_t bytes = own.bytes();
  for (int rank = 0; rank < ranks(); ++rank) {
    const void* payload = layout.slot(rank, sequence).payload;
    if (own.kind == kSum && rank > 0) {
      if (own.itemsize == 4) {
        add(static_cast<float*>(target), static_cast<const float*>(payload), own.numel);
      } else {
        add(static_cast<double*>(target), static_cast<const double*>(payload), own.numel);
      }
    } else {
      std::memcpy(static_cast<char*>(target) + (own.kind == kGather ? rank * bytes : 0), payload, bytes);
    }
  }
}

const char* Rank::wait_for(int rank, uint32_t sequence, Clock::time_point& end_of_spin, Waiter& waiter) {
  Word& word = memory_->layout().slot(rank, sequence).sequence;
  if (word.load(std::memory_order_acquire) == sequence) return nullptr;
  if (spins_) {
    if (end_of_spin == Clock::time_point()) end_of_spin = Clock::now() + kSpin;  // once, not for each rank
    do {
      for (int i = 0; i < 16; ++i) {
        relax();
        if (word.load(std::memory_order_acquire) == sequence) return nullptr;
      }
    } while (Clock::now() < end_of_spin);
  }
  waiter.begin();
  const char* problem = sleep_for(rank, sequence, waiter);
  waiter.end();
  return problem;
}

const char* Rank::sleep_for(int rank, uint32_t sequence, Waiter& waiter) {
  RankState& state = memory_->layout().state(rank);
  Slot& slot = state.slots[sequence % kTurns];
  const auto end = Clock::now() + std::chrono::duration<double>(seconds_);
  while (true) {
    slot.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t found = slot.sequence.load(std::memory_order_seq_cst);
    if (found != sequence && state.has_left.load(std::memory_order_acquire) == 0) futex_wait(slot.sequence, found);
    slot.sleepers.fetch_sub(1, std::memory_order_relaxed);
    // Both before the sequence: a rank may end, or leave, right after its last message.
    const bool has_left = state.has_left.load(std::memory_order_acquire) != 0;
    const bool has_ended = watches_ && rank != rank_ && !memory_->is_locked(rank);
    if (slot.sequence.load(std::memory_order_acquire) == sequence) return nullptr;
    if (has_left) return kHasLeft;
    if (has_ended) return "has ended or closed its files";
    if (Clock::now() >= end) return "did not come within the time-out";
    if (!waiter.goes_on()) return "did not come until this one was interrupted";
  }
}

void Rank::leave(const std::string& why) {
  RankState& state = memory_->layout().state(rank_);
  if (is_in_child() || state.has_left.load(std::memory_order_relaxed) != 0) return;
  why.copy(state.why, sizeof(state.why) - 1);
  state.has_left.store(1, std::memory_order_release);
  for (Slot& slot : state.slots) futex_wake_all(slot.sequence);
}

}  // namespace bagua_syncbn::exchange
