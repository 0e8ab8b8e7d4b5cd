// Ranks exchange messages through a segment and check each value. Exits with 0 on success.
//
//   stress threads RANKS MESSAGES SEED     ranks are threads, for ThreadSanitizer, with random delays
//   stress sleepers RANKS MESSAGES SEED    the same without spinning; also checks that sleepers are woken
//   stress deaths                          ranks are processes that end while another one waits for them
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "exchange/segment.h"

using namespace bagua_syncbn::exchange;
using Clock = std::chrono::steady_clock;
using SegmentPtr = std::unique_ptr<Segment>;

namespace {

[[noreturn]] void fail(const std::string& what) {
  std::fprintf(stderr, "wrong: %s\n", what.c_str());
  std::_Exit(1);
}

void expect(bool holds, const std::string& what) {
  if (!holds) fail(what);
}

template <typename Body>
std::string error_of(const Body& body) {
  try {
    body();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

void sleep_for(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

void receive(Segment& rank, void* target) {
  if (!rank.poll()) rank.sleep([] { return false; });
  rank.collect(target);
}

double value_of(int rank, uint32_t number, int64_t i) {
  return static_cast<double>((number * 31 + rank * 7 + i) % 1000);
}

// Message `number`, the same on all ranks.
Message message_of(uint32_t number) {
  std::minstd_rand random(number * 2654435761u + 1);
  random.discard(4);
  Message message;
  message.kind = static_cast<int32_t>(random() % 2);
  message.itemsize = random() % 2 ? 8 : 4;
  message.numel = random() % 8 == 0 ? kSlotBytes / message.itemsize : random() % 40;
  return message;
}

template <typename T>
void send(Segment& rank, uint32_t number) {
  const Message message = message_of(number);
  std::vector<T> values(message.numel + 1);
  for (int64_t i = 0; i < message.numel; ++i) values[i] = static_cast<T>(value_of(rank.rank(), number, i));
  rank.publish(message, values.data());
}

template <typename T>
void receive_and_check(Segment& rank, uint32_t number) {
  const Message message = message_of(number);
  const bool sums = message.kind == kSum;
  const int rows = sums ? 1 : rank.ranks();
  std::vector<T> values(rows * message.numel + 1);
  receive(rank, values.data());
  for (int row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < message.numel; ++i) {
      double expected = sums ? 0 : value_of(row, number, i);
      for (int r = 0; sums && r < rank.ranks(); ++r) expected += value_of(r, number, i);
      expect(values[row * message.numel + i] == expected, "value in message " + std::to_string(number));
    }
  }
}

void delay(std::minstd_rand& random) {
  if (random() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
  for (volatile unsigned i = 0; i < random() % 500; ++i) continue;
}

void run_rank(Segment& rank, uint32_t messages, unsigned seed) {
  std::minstd_rand random(seed * 97 + rank.rank() + 1);
  for (uint32_t sent = 0, collected = 0; collected < messages; ++collected) {
    delay(random);
    const uint32_t ahead = 1 + random() % kMaxPending;
    for (; sent < messages && sent - collected < ahead; ++sent) {
      (message_of(sent).itemsize == 4 ? send<float> : send<double>)(rank, sent);
      delay(random);
    }
    if (sent - collected == kMaxPending)
      expect(!error_of([&] { rank.publish(Message(), nullptr); }).empty(), "too many pending messages");
    (message_of(collected).itemsize == 4 ? receive_and_check<float> : receive_and_check<double>)(rank, collected);
  }
}

void run_threads(int ranks, uint32_t messages, unsigned seed, bool spins) {
  const std::vector<int32_t> members(ranks);
  std::vector<SegmentPtr> all;
  const Options options{20, spins, false};
  for (int rank = 0; rank < ranks; ++rank)
    all.push_back(std::make_unique<Segment>("stress", members, options, rank, rank ? all[0]->place() : ""));
  std::vector<std::thread> threads;
  for (SegmentPtr& rank : all) {
    threads.emplace_back([&rank, messages, seed] { run_rank(*rank, messages, seed); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Runs `body` as rank 1 in a child process. Returns the error of rank 0, which waits for its message.
template <typename Body>
std::string error_beside(const Body& body, double seconds = 3) {
  int opened[2];
  expect(pipe(opened) == 0, "pipe");
  Segment rank("deaths", {0, 1}, {seconds, true}, 0, "");
  const pid_t child = fork();
  if (child == 0) {
    expect(rank.is_in_child(), "a fork is not detected");
    Segment own("deaths", {0, 1}, {}, 1, rank.place());
    expect(write(opened[1], "x", 1) == 1, "write");
    body(own);
    _exit(0);
  }
  char byte;
  expect(read(opened[0], &byte, 1) == 1, "read");
  rank.publish(Message(), nullptr);
  const std::string error = error_of([&] { receive(rank, nullptr); });
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return error;
}

void run_deaths() {
  const auto begin = Clock::now();
  const auto killed = [](Segment&) {
    if (fork() == 0) sleep(2), _exit(0);  // its own child keeps running
    sleep_for(50);
    raise(SIGKILL);
  };
  expect(error_beside(killed) == "rank 1 of the group has ended or closed its files", "a rank that was killed");
  expect(seconds_since(begin) < 2, "a killed rank is noticed late");
  for (int i = 0; i < 50; ++i) {
    const auto ends = [](Segment& rank) { rank.publish(Message(), nullptr); };
    expect(error_beside(ends) == "", "a rank that ends right after its last message");
  }
  const auto stopped = [](Segment& rank) {
    const pid_t self = getpid();
    if (fork() == 0) sleep_for(400), kill(self, SIGCONT), _exit(0);
    raise(SIGSTOP);
    rank.publish(Message(), nullptr);
  };
  expect(error_beside(stopped, 10) == "", "a rank that was stopped and continues");
  const auto leaves = [](Segment& rank) {
    sleep_for(50);
    rank.leave();
    pause();
  };
  expect(error_beside(leaves) == "rank 1 of the group has left it after an error, or destroyed it", "a rank that left");
  const auto late = Clock::now();
  const auto sleeps = [](Segment&) { pause(); };
  expect(error_beside(sleeps, 0.3) == "rank 1 of the group did not come within the timeout", "a rank that is late");
  expect(seconds_since(late) < 2, "a timeout is detected late");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "deaths") return run_deaths(), 0;
  if (argc != 5) fail("arguments");
  const auto messages = static_cast<uint32_t>(std::atol(argv[3]));
  const auto begin = Clock::now();
  run_threads(std::atoi(argv[2]), messages, std::atoi(argv[4]), mode == "threads");
  // A sleeper that is not woken sleeps for 0.1 s.
  if (mode == "sleepers") expect(seconds_since(begin) < 0.05 * messages, "sleepers are not woken");
}
